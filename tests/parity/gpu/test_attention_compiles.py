"""What attends compiles for the GPUs with the least memory to a block and for the newest, and keeps within registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from compiled_kernels import compile_all

_SPILLED = 64  # bytes of stack to a thread that cost nothing one can measure: heads of 256 use every register there is


@pytest.mark.slow
@pytest.mark.parametrize("capability", [86, 90])
def test_every_kernel_compiles(capability: int) -> None:
    found = compile_all("launches_attention", capability)
    assert {one.kernel for one in found} == {"_part", "_merge", "_block", "_gather"}
    assert not [(one.launch, one.kernel, one.stack) for one in found if one.stack > _SPILLED]
