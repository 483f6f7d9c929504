"""Compare the read ceiling of `bench engine` with compiled loops: `python -m tools.measure.read_bandwidth`.

The loops read one, two and four streams of memory in each thread. An optional argument is the number of threads. The
bench must not need a compiler, but this check does. All readers take turns and the best of each round counts, so that a
busy neighbour affects all.
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

from armature_kernels.ceilings import ReadBandwidthProbe

ROUNDS = 15
STREAMS = (1, 2, 4)
# 32 independent sums, so that no addition waits for the one before it and the compiler can vectorize the loop. The streams
# are equal parts of the buffer, which are read in turns.
SOURCE = """
#include <stddef.h>
#include <stdint.h>
int64_t read_all(const int64_t *words, size_t count, size_t streams) {
    const size_t each = count / streams / 32 * 32;
    int64_t sums[32] = {0};
    for (size_t i = 0; i < each; i += 32)
        for (size_t stream = 0; stream < streams; stream++)
            for (size_t lane = 0; lane < 32; lane++) sums[lane] += words[stream * each + i + lane];
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
    loaded.read_all.argtypes, loaded.read_all.restype = (
        [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t],
        ctypes.c_int64,
    )
    return loaded


def main() -> int:
    """Print all medians, and the ratio of the ceiling to the fastest loop of each round."""
    threads = int(sys.argv[1]) if len(sys.argv) > 1 else os.cpu_count() or 1
    ceiling = ReadBandwidthProbe(threads)
    ours: list[float] = []
    loops: dict[int, list[float]] = {streams: [] for streams in STREAMS}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(threads) as pool:
        library = compiled(Path(folder))

        def one_pass(streams: int) -> float:
            start = time.perf_counter()
            for total in pool.map(lambda part: library.read_all(part, ceiling.share // 8, streams), ceiling.parts):
                assert total != 0, "the buffer holds ones"
            return ceiling.share * threads / (time.perf_counter() - start)

        for _ in range(ROUNDS):
            ours.append(ceiling.sample())
            for streams, rates in loops.items():
                rates.append(max(one_pass(streams) for _ in range(3)))
    ceiling.close()
    fastest = [max(rates) for rates in zip(*loops.values(), strict=True)]
    ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, fastest, strict=True))
    rates = ", ".join(f"{streams}: {statistics.median(rates) / 1e9:.1f}" for streams, rates in loops.items())
    print(f"{threads} threads: ceiling {statistics.median(ours) / 1e9:.1f} GB/s, compiled loop by streams {rates}")
    print(f"median ratio {ratio:.3f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
