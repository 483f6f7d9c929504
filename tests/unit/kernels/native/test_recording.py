"""A recorded step is replayed with new inputs; an operation outside the native library ends the recording."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor

from armature_kernels.linear.activations import QuantisedActivations, RowGroups, quantise, unpack_tiles
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from armature_kernels.native.recording import NotRecordable, ResultPool, record_dry_run, record_operations

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="no native kernels here")
PACKING = IntPanelFactory(bits=4, group=32)


def _two_layers() -> tuple[object, object]:
    torch.manual_seed(1)
    first, second = (PACKING.pack(torch.randn(96, 96) / 10, None) for _ in range(2))

    def body(x: Tensor) -> Tensor:
        return second.multiply(first.multiply(x))

    return body, (first, second)


def _some_rows() -> Tensor:
    return torch.randn(3, 96).bfloat16()


def test_a_recording_equals_the_body_for_other_inputs() -> None:
    body, _ = _two_layers()
    own = _some_rows()
    recorded = record_operations(ResultPool(), lambda: body(own))
    assert len(recorded) == 4  # two products, each with its rows quantised first
    for _ in range(3):
        own.copy_(_some_rows())
        assert torch.equal(recorded.run(), body(own))


def test_what_is_only_noted_computes_nothing_until_it_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    body, _ = _two_layers()
    own, pool = _some_rows(), ResultPool()
    asked: list[object] = []
    with monkeypatch.context() as patched:
        patched.setattr("armature_kernels.native.operations.native_library", lambda: asked.append(None))
        recorded = record_dry_run(pool, lambda: body(own))
    assert asked == [] and len(recorded) == 4
    for _ in range(2):
        own.copy_(_some_rows())
        assert torch.equal(recorded.run(), body(own))
    with pytest.raises(NotRecordable):
        record_dry_run(pool, lambda: body(own).relu())
    assert torch.equal(body(own), recorded.run())  # whoever is next computes again


def test_results_that_are_gone_leave_their_memory_to_later_ones() -> None:
    body, _ = _two_layers()
    own = _some_rows()

    def often() -> Tensor:
        x = own
        for _ in range(8):
            x = body(x)
        return x

    short, long = ResultPool(), ResultPool()
    record_operations(short, lambda: body(own))
    recorded = record_operations(long, often)
    assert long.nbytes <= short.nbytes * 2
    own.copy_(_some_rows())
    assert torch.equal(recorded.run(), often())


def test_steps_of_many_sizes_share_the_same_memory() -> None:
    body, _ = _two_layers()
    pool, whole = ResultPool(), torch.randn(64, 96).bfloat16()
    record_operations(pool, lambda: body(whole))
    alone = pool.nbytes
    for rows in range(33, 64):
        record_operations(pool, lambda rows=rows: body(whole[:rows]))  # type: ignore[misc]
    assert pool.nbytes <= 2 * alone


def test_a_result_is_not_overwritten_by_what_is_recorded_later() -> None:
    body, _ = _two_layers()
    pool, own, other = ResultPool(), _some_rows(), _some_rows()
    first = record_operations(pool, lambda: body(own))
    own.copy_(_some_rows())
    kept = first.run()
    expected = body(own)
    record_operations(pool, lambda: body(other))
    gc.collect()
    assert torch.equal(kept, expected)


def test_a_torch_kernel_inside_ends_the_recording() -> None:
    x = torch.ones(2, 2)
    with pytest.raises(NotRecordable, match="mul"):
        record_operations(ResultPool(), lambda: x * 2)


def test_a_view_that_copies_ends_it_too() -> None:
    x = torch.ones(2, 3)
    with pytest.raises(NotRecordable, match=r"copy|clone"):
        record_operations(ResultPool(), lambda: x.T.reshape(6))


def test_quantised_results_come_back_too() -> None:
    own = torch.zeros(5, 96).bfloat16()
    recorded = record_operations(ResultPool(), lambda: quantise(own, RowGroups(32)))
    own.copy_(torch.randn(5, 96))
    result = recorded.run()
    assert isinstance(result, QuantisedActivations)
    for mine, theirs in zip(unpack_tiles(result), unpack_tiles(quantise(own, RowGroups(32))), strict=True):
        assert torch.equal(mine, theirs)
