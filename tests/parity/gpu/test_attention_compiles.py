"""Attention kernels compile for all served GPUs, within the shared memory of the smallest ones and within registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from compiled_kernels import CAPABILITIES, compile_all

_LEAST_SHARED = 101_376  # bytes to a block: capability 8.6, 8.9 and 12.0
_SPILLED = 64  # bytes of stack to a thread that cost nothing one can measure: heads of 256 use every register there is


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int) -> None:
    found = compile_all("launches_attention", capability)
    assert {one.kernel for one in found} == {"_attend_split", "_merge_splits", "_attend_block", "_gather"}
    assert not [(one.launch, one.kernel, one.stack) for one in found if one.stack > _SPILLED]
    assert max(one.shared for one in found) <= _LEAST_SHARED
