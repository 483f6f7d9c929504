"""Recorded steps of an encoder: sizes that are replayed, and hidden states equal to the model's, with lanes or
without.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.engine.encoder.batching import EncodeState
from app.engine.encoder.cpu_runner import DEFAULT_PLANNER, MIN_RECORDED_TOKENS, EncoderReplay, LanePlan, TextBatch
from app.messages import Encode, Text
from armature_kernels.attention.context import EncodeContext
from armature_kernels.elementwise.embedding import add_embedding_rows, embedding_rows
from armature_kernels.elementwise.norms import gather
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from armature_kernels.native.recording import NotRecordable

ROOM = 128
pytestmark = pytest.mark.skipif(not has_kernel(OpCode.EMBEDDING), reason="no native kernels here")


@pytest.fixture(params=[1, 2, 3], autouse=True)
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


class Layers:
    """Rows of a table for tokens and positions, of which some are wanted; more than `most` tokens at once are somebody else's operation."""

    def __init__(self, most: int = ROOM + 1) -> None:
        self.most = most
        self.table = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
        self.addresses = torch.randn(ROOM, 8, generator=torch.Generator().manual_seed(2))
        self.batch = TextBatch(ROOM, 0)
        self.calls: list[int] = []

    def fill(self, *lengths: int, some: bool = False, cut: LanePlan | None = None) -> LanePlan:
        """Texts of so many tokens each, in the order of a cut; of which the first tokens are wanted, or all."""
        texts = tuple(Text(tuple((7 * at + length) % 60 for at in range(length))) for length in lengths)
        spans = EncodeState.from_message(Encode("r", texts, ("embedding",), 0.0)).spans()
        cut = cut or LanePlan.none(len(lengths))
        self.batch.fill([spans[text] for text in cut.order])
        if some:
            self.batch.select_rows(self.batch.starts[:-1])
        return cut

    def __call__(self, context: EncodeContext, rows: Tensor | None) -> Tensor:
        self.calls.append(len(context.token_ids))
        if len(context.token_ids) > self.most:
            raise NotRecordable("a large product")
        hidden = embedding_rows(self.table, context.token_ids)
        add_embedding_rows(hidden, self.addresses, context.positions)
        return hidden if rows is None else gather(hidden, rows)


def check(layers: Layers, replay: EncoderReplay, cut: LanePlan) -> None:
    """To the bit what one call of the layers gives."""
    result = replay(cut).clone()
    batch, most, calls = layers.batch, layers.most, list(layers.calls)
    layers.most = ROOM
    assert torch.equal(result, layers(batch.context(batch.num_tokens), batch.selected_rows(batch.num_selected)))
    layers.most, layers.calls = most, calls


STEPS: Sequence[tuple[tuple[int, ...], bool]] = [
    ((3,), False),
    ((50,), False),
    ((1,), False),
    ((ROOM,), False),
    ((2, 3, 3, 1), True),
    ((ROOM - 5, 5), True),
    ((1,) * 40, True),
    ((1,) * ROOM, True),
]


def test_one_recording_serves_all_steps_of_a_kind(threads: int) -> None:
    layers = Layers()
    replay = EncoderReplay(layers, layers.batch, ROOM)
    for lengths, some in STEPS:
        check(layers, replay, layers.fill(*lengths, some=some))
    assert replay.num_runs == len(STEPS) and replay.reason == "" and replay.most_tokens == ROOM
    assert len(layers.calls) == 2 * (
        1 if threads == 1 else 1 + threads
    )  # once for the team, once for each thread's lanes


@pytest.mark.parametrize("some", [False, True])
def test_lanes_give_what_all_together_give(threads: int, some: bool) -> None:
    layers = Layers()
    replay = EncoderReplay(layers, layers.batch, ROOM, planner=replace(DEFAULT_PLANNER, min_lane_tokens=4))
    for lengths in [
        (30, 30, 30),
        (7, 1, 1, 9, 12, 40, 2),
        (60, 5, 5, 6, 4, 7),
        (1,) * 30,
        (20, 21),
        (ROOM - 20, 10, 10),
    ]:
        cut = replay.plan_lanes(lengths)
        assert len(cut.ends) > 1 or threads == 1 or threads > 2
        check(layers, replay, layers.fill(*lengths, some=some, cut=cut))
    assert replay.num_runs == 6


def test_another_number_of_threads_has_lanes_of_its_own() -> None:
    layers = Layers()
    replay = EncoderReplay(layers, layers.batch, ROOM, planner=replace(DEFAULT_PLANNER, min_lane_tokens=4))
    for number in (2, 1, 3):
        torch.set_num_threads(number)
        cut = replay.plan_lanes([20] * 6)
        assert bool(cut.ends) == (number > 1)
        check(layers, replay, layers.fill(*[20] * 6, cut=cut))


def test_where_large_products_are_somebody_elses_fewer_tokens_are_run_again() -> None:
    layers = Layers(most=50)
    replay = EncoderReplay(layers, layers.batch, ROOM)
    check(layers, replay, layers.fill(20))
    assert replay.most_tokens == 32 and replay.num_runs == 1
    with pytest.raises(NotRecordable):
        replay(layers.fill(60))  # eager, which so many are not here
    check(layers, replay, layers.fill(33))
    assert replay.num_runs == 1  # eager, as that one was


def test_more_tokens_than_is_usual_are_eager() -> None:
    layers = Layers()
    replay = EncoderReplay(layers, layers.batch, 40)
    for tokens, num_runs in [(40, 1), (41, 1), (12, 2)]:
        check(layers, replay, layers.fill(tokens))
        assert replay.num_runs == num_runs
    assert replay.plan_lanes([21, 21]).ends == ()


def test_what_cannot_even_be_recorded_with_few_is_never_tried_again() -> None:
    layers = Layers(most=0)
    replay = EncoderReplay(layers, layers.batch, ROOM)
    cut = layers.fill(5)
    with pytest.raises(NotRecordable):
        replay(cut)  # eager, which this one is not either
    assert replay.reason == "a large product cannot be recorded" and replay.most_tokens == 0
    tried = len(layers.calls)
    assert layers.calls[-2:] == [MIN_RECORDED_TOKENS, 5]
    with pytest.raises(NotRecordable):
        replay(cut)
    assert len(layers.calls) == tried + 1


def test_where_it_is_off_nothing_is_recorded() -> None:
    layers = Layers()
    replay = EncoderReplay(
        layers, layers.batch, ROOM, off_reason="asked for", planner=replace(DEFAULT_PLANNER, min_lane_tokens=1)
    )
    assert replay.plan_lanes([30, 30, 30]) == LanePlan.none(3)
    check(layers, replay, layers.fill(30, 30, 30))
    assert layers.calls == [90] and replay.most_tokens == 0
