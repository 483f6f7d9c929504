"""A recorded step does again what it did, with new inputs; whatever is not an operation of ours ends the recording."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from app.kernels.activations import Quantised, quantise, unpacked
from app.kernels.int_panels import IntPacking
from app.kernels.operations import Code, has
from app.kernels.recording import Pool, Unrecordable, record

pytestmark = pytest.mark.skipif(not has(Code.LINEAR_INT), reason="no native kernels here")
PACKING = IntPacking(bits=4, group=32)


def _two_layers() -> tuple[object, object]:
    torch.manual_seed(1)
    first, second = (PACKING.pack(torch.randn(96, 96) / 10, None) for _ in range(2))

    def body(inputs: list[Tensor]) -> Tensor:
        return second.multiply(first.multiply(inputs[0]))

    return body, (first, second)


def test_a_recording_equals_the_body_for_other_inputs() -> None:
    body, _ = _two_layers()
    pool = Pool()
    recorded = record(pool, body, [torch.randn(3, 96).bfloat16()])
    assert len(recorded) == 4  # two products, each with its rows quantised first
    for _ in range(3):
        x = torch.randn(3, 96).bfloat16()
        assert torch.equal(recorded.run([x]), body([x]))


def test_results_that_are_gone_leave_their_memory_to_later_ones() -> None:
    body, _ = _two_layers()

    def often(inputs: list[Tensor]) -> Tensor:
        x = inputs[0]
        for _ in range(8):
            x = body([x])
        return x

    short, long = Pool(), Pool()
    record(short, body, [torch.randn(3, 96).bfloat16()])
    recorded = record(long, often, [torch.randn(3, 96).bfloat16()])
    assert long.nbytes <= short.nbytes * 2
    x = torch.randn(3, 96).bfloat16()
    assert torch.equal(recorded.run([x]), often([x]))


def test_a_result_is_not_overwritten_by_what_is_recorded_later() -> None:
    body, _ = _two_layers()
    pool = Pool()
    first = record(pool, body, [torch.randn(3, 96).bfloat16()])
    x = torch.randn(3, 96).bfloat16()
    kept = first.run([x])
    expected = body([x])
    record(pool, body, [torch.randn(3, 96).bfloat16()])
    gc.collect()
    assert torch.equal(kept, expected)


def test_a_torch_kernel_inside_ends_the_recording() -> None:
    with pytest.raises(Unrecordable, match="mul"):
        record(Pool(), lambda inputs: inputs[0] * 2, [torch.ones(2, 2)])


def test_a_view_that_copies_ends_it_too() -> None:
    with pytest.raises(Unrecordable, match=r"copy|clone"):
        record(Pool(), lambda inputs: inputs[0].T.reshape(6), [torch.ones(2, 3)])


def test_quantised_results_come_back_too() -> None:
    def body(inputs: list[Tensor]) -> Quantised:
        return quantise(inputs[0], 32)

    recorded = record(Pool(), body, [torch.zeros(5, 96).bfloat16()])
    x = torch.randn(5, 96).bfloat16()
    for mine, theirs in zip(unpacked(recorded.run([x])), unpacked(body([x])), strict=True):
        assert torch.equal(mine, theirs)
