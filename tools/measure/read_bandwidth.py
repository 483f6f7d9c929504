"""Compare the read ceiling of `bench engine` with a compiled loop: `python -m tools.measure.read_bandwidth`.

An optional argument is the number of threads. The bench must not need a compiler, but this check does. Both readers
take turns and the best of each round counts, so that a busy neighbour affects both.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from app.kernels.ceilings import ReadBandwidthProbe

ROUNDS = 15
# 32 independent sums, so that no addition waits for the one before it and the compiler can vectorize the loop.
SOURCE = """
#include <stddef.h>
#include <stdint.h>
int64_t read_all(const int64_t *words, size_t count) {
    int64_t sums[32] = {0};
    for (size_t i = 0; i + 32 <= count; i += 32)
        for (size_t lane = 0; lane < 32; lane++) sums[lane] += words[i + lane];
    int64_t sum = 0;
    for (size_t lane = 0; lane < 32; lane++) sum += sums[lane];
    return sum;
}
"""


def compiled(folder: Path) -> ctypes.CDLL:
    """Compile the loop and load it as a library."""
    source, library = folder / "reading.c", folder / "reading.so"
    source.write_text(SOURCE)
    subprocess.run(["cc", "-O3", "-march=native", "-shared", "-fPIC", "-o", library, source], check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.read_all.argtypes, loaded.read_all.restype = [ctypes.c_void_p, ctypes.c_size_t], ctypes.c_int64
    return loaded


def main() -> int:
    """Print both medians and the ratio."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1
    ceiling = ReadBandwidthProbe(threads)
    ours: list[float] = []
    loop: list[float] = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        library = compiled(Path(folder))

        def one_pass() -> float:
            start = time.perf_counter()
            for total in pool.map(lambda part: library.read_all(part, ceiling.share // 8), ceiling.parts):
                assert total != 0, "the buffer holds ones"
            return ceiling.share * threads / (time.perf_counter() - start)

        for _ in range(ROUNDS):
            ours.append(ceiling.sample())
            loop.append(max(one_pass() for _ in range(6)))
    ceiling.close()
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, loop, strict=True))
    print(
        f"{threads} threads: C library {statistics.median(ours) / 1e9:.1f} GB/s, compiled loop {statistics.median(loop) / 1e9:.1f} GB/s"
    )
    print(f"median ratio {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
