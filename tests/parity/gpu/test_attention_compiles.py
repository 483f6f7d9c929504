"""Attention kernels compile for all served GPUs, within the shared memory of the smallest ones and within registers."""

from __future__ import annotations

import re

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from compiled_kernels import CAPABILITIES, compile_all

_LEAST_SHARED = 101_376  # bytes to a block: capability 8.6, 8.9 and 12.0
_SPILLED = 64  # bytes of stack to a thread: blocks of prompts use every register there is


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int) -> None:
    found = compile_all("launches_attention", capability, ptx=True)
    assert {one.kernel for one in found} == {"_attend_decodes", "_attend_block", "_gather"}
    assert {"griddepcontrol.wait" in one.ptx for one in found} == {capability >= 90}
    most = {"_attend_decodes": 8, "_attend_block": _SPILLED, "_gather": 0}
    assert not [(one.launch, one.kernel, one.stack) for one in found if one.stack > most[one.kernel]]
    assert max(one.shared for one in found) <= _LEAST_SHARED
    counts = [one.ptx for one in found if "atom." in one.ptx]
    assert len(counts) >= 5 and all(stores_come_before_the_count(ptx) for ptx in counts)


def stores_come_before_the_count(ptx: str) -> bool:
    """Return True if a barrier is between the stores of partial sums and the only atomic, and between it and the next load."""
    found = re.findall(r"bar\.sync|st\.global|ld\.global|atom\.[\w.]+", ptx)
    counts = [place for place, one in enumerate(found) if one.startswith("atom.")]
    if len(counts) != 1 or found[counts[0]] != "atom.global.gpu.acq_rel.add.u32":
        return False
    return found[counts[0] - 1] == found[counts[0] + 1] == "bar.sync"


def test_a_missing_barrier_is_found() -> None:
    count = "st.global.b32 bar.sync 0; atom.global.gpu.acq_rel.add.u32 bar.sync 0; ld.global.b32"
    assert stores_come_before_the_count(count)
    assert not stores_come_before_the_count(count.replace("bar.sync 0; atom", "atom"))
    assert not stores_come_before_the_count(count.replace("acq_rel", "relaxed"))
