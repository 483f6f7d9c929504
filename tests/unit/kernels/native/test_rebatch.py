"""A recording with many rows, replayed with fewer, gives the same bits as fewer rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from armature_kernels.elementwise.embedding import embedding_rows
from armature_kernels.elementwise.norms import gate, gather, rms_norm
from armature_kernels.elementwise.rope import rope_angles
from armature_kernels.linear.bf16_product import WideRows
from armature_kernels.linear.int_panels import IntPanelFactory
from armature_kernels.linear.linear import Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.memory import Int64Buffer
from armature_kernels.native.operations import has_kernel
from armature_kernels.native.recording import NotRecordable, RecordedRowCounts, ResultPool, record_operations

SIZE, INNER, MOST = 64, 96, 40
pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="no native kernels here")


class Net:
    """Every kind of operation that has rows, on token ids that are refreshed in place; the last product is of some rows alone."""

    def __init__(self, wide: WideRows = WideRows.NEVER) -> None:
        generator = torch.Generator().manual_seed(7)
        self.table = torch.randn((50, SIZE), generator=generator)
        self.norm, self.frequencies = torch.rand(SIZE, generator=generator), torch.rand(8, generator=generator)
        self.up, self.down = Linear(("up",), SIZE, 2 * INNER), Linear(("down",), INNER, SIZE)
        for linear in (self.up, self.down):
            weight = torch.randn((linear.out_features, linear.in_features), generator=generator)
            linear.form = IntPanelFactory(8, 128, wide=wide).pack(weight, None)
        self.ids, self.wanted = Int64Buffer(MOST), Int64Buffer(MOST)

    def fill(self, tokens: int, wanted: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.ids.fill(torch.randint(0, 50, (tokens,), generator=generator).tolist())
        self.wanted.fill(torch.randint(0, tokens, (wanted,), generator=generator).tolist())

    def __call__(self, tokens: int, wanted: int) -> tuple[Tensor, Tensor, Tensor]:
        ids = self.ids.tensor[:tokens]
        hidden, (cos, sin) = embedding_rows(self.table, ids), rope_angles(ids, self.frequencies)
        hidden = gather(hidden, self.wanted.tensor[:wanted])
        inner = gate(
            self.up(rms_norm(hidden, self.norm, 1e-6, torch.bfloat16, self.up.activation_group(wanted))),
            "silu",
            self.down.activation_group(wanted),
        )
        self.down.add_to(hidden, inner)
        return hidden, cos, sin


@pytest.mark.parametrize("wide", [WideRows.NEVER, WideRows.ALWAYS])
def test_fewer_rows_come_out_as_if_they_had_been_all(wide: WideRows) -> None:
    net = Net(wide)
    net.fill(MOST, MOST - 1, seed=0)
    recorded = record_operations(ResultPool(), lambda: net(MOST, MOST - 1))
    resizing = RecordedRowCounts(recorded.operations, (MOST, MOST - 1))
    for seed, (tokens, wanted) in enumerate([(17, 3), (1, 1), (MOST, MOST - 1), (33, 33), (33, 32), (2, 1), (MOST, 1)]):
        net.fill(tokens, wanted, seed)
        resizing.set((tokens, wanted))
        result, cos, sin = recorded.run()
        expected = net(tokens, wanted)
        assert torch.equal(result[:wanted], expected[0])
        assert torch.equal(cos[:tokens], expected[1]) and torch.equal(sin[:tokens], expected[2])


def test_an_operation_of_another_number_of_rows_cannot_be_resized() -> None:
    net = Net()
    net.fill(MOST, 5, seed=0)
    recorded = record_operations(ResultPool(), lambda: net(MOST, 5))
    with pytest.raises(NotRecordable, match="of 5 rows"):
        RecordedRowCounts(recorded.operations, (MOST,))


@pytest.mark.parametrize("sizes", [(MOST + 1,), (0,), (1, 1)])
def test_more_rows_than_there_is_room_for_are_a_mistake_of_ours(sizes: tuple[int, ...]) -> None:
    net = Net()
    net.fill(MOST, MOST, seed=0)
    recorded = record_operations(ResultPool(), lambda: net(MOST, MOST))
    with pytest.raises(AssertionError):
        RecordedRowCounts(recorded.operations, (MOST,)).set(sizes)
