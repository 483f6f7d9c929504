"""Native kernels against their torch references, on odd shapes and bad values, and the reason if they cannot run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_kernels.errors import KernelError
from armature_kernels.linear.bf16_panels import Bf16PanelLinear
from armature_kernels.native import library as native_module
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import allocate_weights
from armature_kernels.native.operations import has_kernel
from hypothesis_examples import examples
from native_levels import levels

needs_native = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_BF16), reason=native_library().reason)
# One rounding to bfloat16 (8 bits) on either side, and sums in another order.
CLOSE = {"rtol": 1e-2, "atol": 1e-2}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@needs_native
@settings(max_examples=examples(60), deadline=None)
@given(rows=st.integers(1, 40), inputs=st.integers(1, 150), outputs=st.integers(1, 150), bias=st.booleans())
def test_panels_multiply_as_torch_does(rows: int, inputs: int, outputs: int, bias: bool) -> None:
    x, weight = normal(rows, inputs).bfloat16(), normal(outputs, inputs, seed=1).bfloat16()
    added = normal(outputs, seed=2).bfloat16() if bias else None
    expected = F.linear(x.float(), weight.float(), None if added is None else added.float())
    torch.testing.assert_close(Bf16PanelLinear.pack(weight, added).multiply(x).float(), expected, **CLOSE)


@needs_native
def test_a_row_says_the_same_in_every_batch_of_a_strided_input() -> None:
    weight, wide = normal(96, 200, seed=1).bfloat16(), normal(30, 300).bfloat16()
    form, x = Bf16PanelLinear.pack(weight, None), wide[:, 50:250]
    together = form.multiply(x)
    assert form.nbytes == 96 * 200 * 2
    for row in range(30):
        torch.testing.assert_close(form.multiply(x[row : row + 1])[0], together[row], rtol=1e-2, atol=1e-2)


@needs_native
@pytest.mark.parametrize("inputs", [1, 7, 64])
def test_a_packed_weight_hands_out_its_rows(inputs: int) -> None:
    weight, ids = normal(70, inputs).bfloat16(), torch.tensor([0, 69, 31, 32, 5, 5, 64, 1, 2, 3])
    form = Bf16PanelLinear.pack(weight, None)
    assert torch.equal(form.rows(ids), weight[ids].float())
    assert form.rows(ids[:0]).shape == (0, inputs)
    odd = form.rows(torch.tensor([70, 3, -1]), 2.0)
    assert odd[[0, 2]].isnan().all()  # no such row: nothing is read
    assert torch.equal(odd[1], 2 * weight[3].float())


@needs_native
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_bad_values_stay_bad_in_their_row_and_leave_the_others_alone(bad: float) -> None:
    x, weight = normal(5, 64).bfloat16(), normal(40, 64, seed=1).bfloat16()
    clean = Bf16PanelLinear.pack(weight, None).multiply(x)
    x[2, 7] = bad
    spoiled = Bf16PanelLinear.pack(weight, None).multiply(x)
    assert not spoiled[2].isfinite().any()
    assert torch.equal(spoiled[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


@pytest.mark.skipif(native_library().library is None, reason=native_library().reason)
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads Linux's /proc")
def test_the_process_holds_one_openmp_runtime_of_ours_and_torchs() -> None:
    maps = Path("/proc/self/maps").read_text()
    # numpy's and scipy's wheels bring none; a second libgomp would be a second pool, spinning on the same cores.
    assert len(set(re.findall(r"\S*lib(?:gomp|omp|iomp)[^/\s]*\.so\S*", maps))) == 1


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the library would be looked for, were it not named; nothing lies there."""
    for name in ("ARMATURE_NATIVE_LIBRARY", "ARMATURE_ISA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(native_module, "LIBRARY_PATH", tmp_path / "libarmature.so")
    return tmp_path / "libarmature.so"


@pytest.mark.parametrize(("content", "reason"), [(None, "was not built"), (b"no library at all", "cannot be loaded")])
def test_without_a_library_that_loads_torch_serves_and_the_reason_is_said(
    bare: Path, content: bytes | None, reason: str
) -> None:
    if content is not None:
        bare.write_bytes(content)
    found = native_module.native_library.__wrapped__()
    assert (found.library, found.level) == (None, None)
    assert reason in found.reason
    assert "torch's own products serve" in found.reason


def test_a_library_that_is_asked_for_by_name_is_loaded_or_refused(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARMATURE_NATIVE_LIBRARY", str(bare.parent / "other.so"))
    with pytest.raises(KernelError, match=r"other\.so cannot be loaded"):
        native_module.native_library.__wrapped__()


@pytest.fixture
def level() -> Iterator[str]:
    """The level that serves this process, which serves it again afterwards."""
    chosen = native_library()
    if chosen.library is None or chosen.level is None:
        pytest.skip(chosen.reason)
    yield chosen.level
    assert chosen.library.armature_select(chosen.level.encode()) == 0


def test_a_level_that_is_asked_for_by_name_serves_or_is_refused(level: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lowest = levels()[-1]
    monkeypatch.setenv("ARMATURE_ISA", lowest)
    assert native_module.native_library.__wrapped__().level == lowest
    monkeypatch.setenv("ARMATURE_ISA", "no-such-level")
    with pytest.raises(
        KernelError, match="ARMATURE_ISA is no-such-level, which this library or this processor does not have"
    ):
        native_module.native_library.__wrapped__()


@pytest.mark.parametrize("nbytes", [100, 9 * 2**20])
def test_weights_memory_is_aligned_and_writable(nbytes: int) -> None:
    memory = allocate_weights(nbytes)
    assert (memory.numel(), memory.data_ptr() % 64) == (nbytes, 0)
    memory.fill_(7)
    assert int(memory[-1]) == 7
