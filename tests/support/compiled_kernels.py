"""Compiles the Triton kernels to machine code of NVIDIA GPUs with Triton's own tools, on a machine without a GPU.

`compile_all("launches_elementwise", 90)` runs every function of tests/support/launches_elementwise.py whose name begins with
`launch_` in a separate interpreter, in which a launch compiles and starts nothing. Tensors are in host memory, and
only their types, strides and alignment count.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

SUPPORT = Path(__file__).resolve().parent
ROOT = SUPPORT.parents[1]
# The most shared memory of one block, by compute capability (CUDA C++ programming guide, technical specifications per compute capability).
CAPABILITIES = (80, 86, 89, 90, 100)
MOST_SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}


@dataclass(frozen=True, slots=True)
class Compiled:
    """One kernel as it would be loaded: bytes of shared memory to a block, registers and bytes of stack (spilled registers) to a thread."""

    launch: str
    kernel: str
    shared: int
    registers: int
    stack: int
    ptx: str = ""


def compile_all(module: str, capability: int, ptx: bool = False) -> list[Compiled]:
    """Compile the launches of tests/support/`module`.py; fail if one does not compile or needs too much memory."""
    with tempfile.TemporaryDirectory(prefix="compiled-kernels-") as cache:
        environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        environment |= {"TRITON_CACHE_DIR": cache, "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}"}
        command = [sys.executable, __file__, module, str(capability), str(int(ptx))]
        result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    found = [Compiled(**line) for line in json.loads(result.stdout.splitlines()[-1])]
    assert found, f"{module} launches nothing"
    greedy = [(one.launch, one.kernel, one.shared) for one in found if one.shared > MOST_SHARED[capability]]
    assert not greedy, f"more shared memory than {MOST_SHARED[capability]} bytes: {greedy}"
    return found


class _Target:
    """In place of a driver: the GPU that is compiled for."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def _main(module: str, capability: int, ptx: bool) -> list[dict[str, Any]]:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    driver.set_active(_Target(capability))
    found: dict[tuple[str, str], Compiled] = {}
    launch = ""
    run = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        assert all(0 < size < 65536 for size in grid[1:]), f"{self.fn.__name__}: a grid of {grid}"
        kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        registers, stack = _resources(kernel.asm["cubin"])
        one = Compiled(
            launch, self.fn.__name__, kernel.metadata.shared, registers, stack, kernel.asm["ptx"] if ptx else ""
        )
        found[(launch, kernel.hash)] = one
        return kernel

    JITFunction.run = compile_only
    launches = importlib.import_module(module)
    for name in sorted(vars(launches)):
        if name.startswith("launch_"):
            launch = name.removeprefix("launch_")
            getattr(launches, name)()
    return [asdict(one) for one in found.values()]


def _resources(cubin: bytes) -> tuple[int, int]:
    """Registers and bytes of stack to a thread."""
    import triton

    path = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([str(path), "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return int(found[1]), int(found[2])


if __name__ == "__main__":
    with contextlib.redirect_stdout(sys.stderr):
        compiled = _main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1")
    sys.stdout.write(json.dumps(compiled) + "\n")
