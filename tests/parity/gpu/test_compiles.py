"""Elementwise kernels compile for all served GPUs and stay within registers."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
from compiled_kernels import CAPABILITIES, compile_all


@pytest.mark.nightly
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_kernel_compiles(capability: int) -> None:
    found = compile_all("launches_elementwise", capability, ptx=True)
    assert {one.launch for one in found} == {
        "angles", "gates", "layer_norms", "longest_norm", "norms", "rows", "states", "turning"
    }  # fmt: skip
    assert {"griddepcontrol.wait" in one.ptx for one in found} == {capability >= 90}
    # Sines of large angles are reduced by a table on the stack; the quick instruction, which is wrong there, is not used.
    assert [one.kernel for one in found if one.stack] == ["_rope_angles"]
    assert not any("sin.approx" in one.ptx or "cos.approx" in one.ptx for one in found)
