"""Elementwise Triton kernels against torch references: odd sizes, rows with gaps between them, bad values."""

from __future__ import annotations

import importlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hypothesis_examples import examples

pytest.importorskip("triton", reason="Triton is not installed")
from armature_kernels.elementwise import activations, embedding, norms, rope

pytestmark = pytest.mark.usefixtures("served_by_triton")
# One unit in the last place: the interpreter cuts off where hardware rounds to nearest.
RELATIVE = {torch.float32: 2e-6, torch.float16: 2**-9, torch.bfloat16: 2**-7}
few = settings(max_examples=examples(12))
sizes = st.sampled_from([1, 7, 64, 100, 576, 1025])
num_rows = st.integers(0, 3)
dtypes = st.sampled_from(list(RELATIVE))
bad_values = st.sampled_from([None, torch.nan, torch.inf])


def close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    relative = RELATIVE[found.dtype]
    torch.testing.assert_close(found.float(), expected.float(), rtol=relative, atol=relative, equal_nan=True)


def made(gpu: torch.device, rows: int, size: int, seed: int = 0, bad: float | None = None) -> Tensor:
    """fp32 [rows, size], a view of wider rows, with a bad value in the last one."""
    wide = torch.randn(rows, size + 3, generator=torch.Generator().manual_seed(size * 31 + seed)).to(gpu)
    if bad is not None and rows:
        wide[-1, size // 2] = bad
    return wide[:, :size]


@few
@given(rows=num_rows, size=sizes, dtype=dtypes, bad=bad_values)
def test_the_norm_equals_its_reference(
    gpu: torch.device, rows: int, size: int, dtype: torch.dtype, bad: float | None
) -> None:
    hidden, weight = made(gpu, rows, size, bad=bad), made(gpu, 1, size, 1)[0]
    found = norms.rms_norm(hidden, weight, 1e-5, dtype)
    # torch's own kernel on a GPU makes a whole row with an infinity NaN, as it does not on a processor.
    close(found, norms.rms_norm_torch(hidden.cpu(), weight.cpu(), 1e-5, dtype).to(gpu))
    assert found.isfinite()[:-1].all()


@few
@given(rows=num_rows, size=sizes, dtype=dtypes, bad=bad_values)
def test_what_is_added_after_a_branch(
    gpu: torch.device, rows: int, size: int, dtype: torch.dtype, bad: float | None
) -> None:
    hidden, weight = made(gpu, rows, size), made(gpu, 1, size, 1)[0]
    branch = made(gpu, rows, size, 2, bad).to(dtype)
    expected = hidden.to("cpu", copy=True)
    norms.add_rms_norm_torch(expected, branch.cpu(), weight.cpu(), 1e-6)
    norms.add_rms_norm(hidden, branch, weight, 1e-6)
    close(hidden, expected.to(gpu))


@few
@given(rows=num_rows, size=sizes, dtype=dtypes, biased=st.booleans(), in_place=st.booleans(), bad=bad_values)
def test_the_layer_norm_equals_its_reference(
    gpu: torch.device, rows: int, size: int, dtype: torch.dtype, biased: bool, in_place: bool, bad: float | None
) -> None:
    hidden, (weight, bias) = made(gpu, rows, size, bad=bad), made(gpu, 2, size, 1)
    norm = (weight, bias if biased else None, 1e-5)
    before, expected = hidden.clone(), norms.layer_norm_torch(hidden, norm)
    close(norms.layer_norm(hidden, norm, dtype, in_place=in_place), expected.to(dtype))
    close(hidden, expected if in_place else before)
    hidden.copy_(before)
    norms.layer_norm_in_place(hidden, norm)
    close(hidden, expected)


EXTREMES = [
    0.0,
    1e-6,
    -1e-6,
    0.0999,
    0.1001,
    -0.1001,
    12.0,
    -12.0,
    1e4,
    -1e4,
    torch.nan,
]  # of infinities torch itself makes this and that


@pytest.mark.parametrize("dtype", list(RELATIVE))
@pytest.mark.parametrize("activation", list(activations.ACTIVATIONS))
def test_activations_equal_their_references(gpu: torch.device, activation: str, dtype: torch.dtype) -> None:
    wide = made(gpu, 3, 2100)
    wide[1, : len(EXTREMES)] = torch.tensor(EXTREMES)
    x = wide.to(dtype)
    close(activations.activate(x, activation), activations.activate_torch(x.float(), activation).to(dtype))
    first, second = x.float().chunk(2, -1)
    close(norms.gate(x, activation), (activations.activate_torch(first, activation) * second).to(dtype))
    assert len(norms.gate(x[:0], activation)) == len(activations.activate(x[:0], activation)) == 0


def test_small_arguments_keep_their_digits(gpu: torch.device) -> None:
    x = torch.logspace(-30, 1, 500, device=gpu)[None]
    torch.testing.assert_close(activations.activate(x, "tanh"), x.double().tanh().float(), rtol=1e-6, atol=0)


@few
@given(
    ids=st.lists(st.integers(-3, 12), max_size=5), size=sizes, dtype=dtypes, per_input=st.booleans(),
    call=st.sampled_from(["rows", "add"]),
)  # fmt: skip
def test_rows_of_a_table(
    gpu: torch.device, ids: list[int], size: int, dtype: torch.dtype, per_input: bool, call: str
) -> None:
    weight, at = made(gpu, 10, size).to(dtype).contiguous(), torch.tensor(ids, dtype=torch.int64, device=gpu)
    factor = made(gpu, 1, size, 1)[0] if per_input else 1.75
    expected = embedding.embedding_rows_torch(weight, at, factor)
    assert expected.isnan().any(-1).tolist() == [not 0 <= row < 10 for row in ids]
    if call == "rows":
        close(embedding.embedding_rows(weight, at, factor), expected)
    else:
        hidden = torch.ones(len(ids), size, device=gpu)
        embedding.add_embedding_rows(hidden, weight, at, factor)
        close(hidden, 1 + expected)


@few
@given(
    positions=st.lists(st.integers(0, 2**20), max_size=5),
    half=st.sampled_from([1, 4, 24, 64]),
    scale=st.sampled_from([1.0, 1.4]),
)
def test_angles_are_exact_far_out(gpu: torch.device, positions: list[int], half: int, scale: float) -> None:
    at = torch.tensor(positions, dtype=torch.int64, device=gpu)
    frequencies = 10000.0 ** -(torch.arange(half, device=gpu) / half)
    for found, expected in zip(
        rope.rope_angles(at, frequencies, scale), rope.rope_angles_torch(at, frequencies, scale), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["norms", "gates", "rows", "angles"])
def test_triton_served(gpu: torch.device, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a kernel cannot be reached, the public function fails: so the tests above are of kernels, not of twins."""
    module = importlib.import_module(f"armature_kernels.triton.{'rope' if name == 'angles' else 'elementwise'}")
    monkeypatch.setattr(module, "triton", None)
    x = made(gpu, 2, 8)
    ids = torch.zeros(2, dtype=torch.int64, device=gpu)
    calls: dict[str, list[Callable[[], object]]] = {
        "norms": [
            lambda: norms.rms_norm(x, x[0], 1e-5, torch.float32),
            lambda: norms.add_rms_norm(x, x, x[0], 1e-5),
            lambda: norms.layer_norm(x, (x[0], None, 1e-5), torch.float32),
            lambda: norms.layer_norm_in_place(x, (x[0], None, 1e-5)),
        ],
        "gates": [lambda: norms.gate(x, "silu"), lambda: activations.activate(x, "silu")],
        "rows": [lambda: embedding.embedding_rows(x, ids), lambda: embedding.add_embedding_rows(x, x, ids)],
        "angles": [lambda: rope.rope_angles(ids, x[0])],
    }
    for call in calls[name]:
        with pytest.raises(AttributeError):
            call()
