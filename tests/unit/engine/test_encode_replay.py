"""Which steps of an encoder are run again: all that a recording has room for, of as many tokens as our own operations will take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from app.engine.encode_replay import LEAST_TOKENS, EncodeReplay
from app.kernels.memory import Words
from app.kernels.operations import Code, has
from app.kernels.recording import Unrecordable
from app.kernels.rowwise import gather
from app.kernels.table import stored_rows

ROOM = 128
pytestmark = pytest.mark.skipif(not has(Code.ROWS), reason="no native kernels here")


class Layers:
    """Rows of a table, of which some are wanted; more than `most` tokens at once are somebody else's operation."""

    def __init__(self, most: int = ROOM) -> None:
        self.most, self.room = most, ROOM
        self.table = torch.randn(60, 8, generator=torch.Generator().manual_seed(1))
        self.ids, self.rows = Words(ROOM), Words(ROOM)
        self.num_tokens, self.num_wanted = 0, None
        self.calls: list[int] = []

    num_wanted: int | None

    def fill(self, tokens: int, wanted: int | None = None) -> None:
        self.ids.fill([(7 * at + tokens) % 60 for at in range(tokens)])
        self.num_tokens, self.num_wanted = tokens, wanted
        if wanted is not None:
            self.rows.fill([(3 * at) % tokens for at in range(wanted)])

    def __call__(self, tokens: int, wanted: int | None) -> Tensor:
        self.calls.append(tokens)
        if tokens > self.most:
            raise Unrecordable("a large product")
        hidden = stored_rows(self.table, self.ids.tensor[:tokens])
        return hidden if wanted is None else gather(hidden, self.rows.tensor[:wanted])


def check(layers: Layers, replay: EncodeReplay) -> None:
    result = replay().clone()
    most, layers.most = layers.most, ROOM
    assert torch.equal(result, layers(layers.num_tokens, layers.num_wanted))
    layers.most = most


def test_one_recording_serves_all_steps_of_a_kind() -> None:
    layers = Layers()
    replay = EncodeReplay(layers, layers, ROOM)
    for tokens, wanted in [(3, None), (50, None), (1, None), (ROOM, None), (9, 4), (ROOM, 1), (40, 40)]:
        layers.fill(tokens, wanted)
        check(layers, replay)
    assert replay.num_runs == 7 and replay.reason == "" and replay.most_tokens == ROOM
    assert layers.calls.count(ROOM) == 4  # two recordings, and twice asked for by this test


def test_where_large_products_are_somebody_elses_fewer_tokens_are_run_again() -> None:
    layers = Layers(most=50)
    replay = EncodeReplay(layers, layers, ROOM)
    layers.fill(20)
    check(layers, replay)
    assert replay.most_tokens == 32 and replay.num_runs == 1
    layers.fill(33)
    check(layers, replay)
    assert replay.num_runs == 1  # eager, as that one was


def test_as_many_wanted_as_there_are_tokens_at_the_most_are_eager() -> None:
    layers = Layers()
    replay = EncodeReplay(layers, layers, ROOM)
    layers.fill(ROOM, ROOM)  # a recording needs two different numbers
    check(layers, replay)
    assert replay.num_runs == 0


def test_more_tokens_than_is_usual_are_eager() -> None:
    layers = Layers()
    replay = EncodeReplay(layers, layers, 40)
    for tokens, num_runs in [(40, 1), (41, 1), (12, 2)]:
        layers.fill(tokens)
        check(layers, replay)
        assert replay.num_runs == num_runs


def test_what_cannot_even_be_recorded_with_few_is_never_tried_again() -> None:
    layers = Layers(most=0)
    replay = EncodeReplay(layers, layers, ROOM)
    layers.fill(5)
    with pytest.raises(Unrecordable):
        replay()  # eager, which this one is not either
    assert replay.reason == "a large product is not an operation of ours" and replay.most_tokens == 0
    tried = len(layers.calls)
    assert layers.calls[-2:] == [LEAST_TOKENS, 5]
    with pytest.raises(Unrecordable):
        replay()
    assert len(layers.calls) == tried + 1


def test_where_it_is_off_nothing_is_recorded() -> None:
    layers = Layers()
    replay = EncodeReplay(layers, layers, ROOM, off="asked for")
    layers.fill(5)
    check(layers, replay)
    assert layers.calls == [5, 5] and replay.most_tokens == 0
