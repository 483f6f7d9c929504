"""The words of a batch of texts on a device, one by one, and which shapes small batches are filled up to."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from app.engine.encoder.batching import EncodeState
from app.engine.encoder.device_runner import (
    RECORDED_TOKENS,
    DeviceTextBatch,
    TextBatchShape,
    padded_shape,
    recorded_shapes,
)
from app.messages import Encode, Text
from fake_encoder import CONFIG
from simulated_device import SimulatedDeviceBackend

SKIPPING = replace(CONFIG, pooling=replace(CONFIG.pooling, skips_prompt=True))
A, B = Text((5, 6, 7), (0, 1, 1), num_prompt_tokens=2), Text((8, 9))


def filled(shape: TextBatchShape, *texts: Text) -> DeviceTextBatch:
    place = DeviceTextBatch(SimulatedDeviceBackend(torch.float32), 64, SKIPPING)
    place.fill(EncodeState.from_message(Encode("r", texts, ("embedding",), 0.0)).spans(), shape)
    return place


def test_every_word_is_where_it_is_read() -> None:
    for shape, starts, skipped in (
        (TextBatchShape(5, 2), [0, 3, 5], [2, 0]),
        (TextBatchShape(8, 3), [0, 3, 5, 8], [2, 0, 0]),
        (TextBatchShape(8, 5), [0, 3, 5, 5, 5, 8], [2, 0, 0, 0, 0]),
    ):
        view = filled(shape, A, B).view(shape, 3)
        context, more = view.context(), [0] * (shape.tokens - 5)
        assert view.starts.tolist() == starts and view.skipped is not None and view.skipped.tolist() == skipped
        assert context.token_ids.tolist() == [5, 6, 7, 8, 9, *more]
        assert context.positions.tolist() == [0, 1, 2, 0, 1, *more]
        assert context.type_ids is not None and context.type_ids.tolist() == [0, 1, 1, 0, 0, *more]
        assert all(
            part.data_ptr() % 64 == view.starts.data_ptr() % 64 for part in (context.token_ids, context.type_ids)
        )


def test_a_batch_that_is_described_does_not_touch_the_words_of_the_one_being_sent() -> None:
    place = filled(TextBatchShape(5, 2), A, B)
    before = [staged.clone() for staged in place._staged]
    place.fill(EncodeState.from_message(Encode("r", (B,), ("embedding",), 0.0)).spans(), TextBatchShape(2, 1))
    assert torch.equal(place._staged[0], before[1]), (
        "the words that were sent before: they are the next to be overwritten"
    )


@given(st.integers(1, 600), st.integers(1, 200))
def test_what_fills_a_batch_up_has_room_and_nobody_is_filled_up_to_far_more(tokens: int, texts: int) -> None:
    shape = padded_shape(tokens, texts, recorded_shapes(600))
    if shape is None:
        assert tokens >= RECORDED_TOKENS[-1] or texts * 3 > tokens / 4
    else:
        assert shape.tokens > tokens and shape.texts > texts
        fitting = [size for size in RECORDED_TOKENS if size > tokens]
        assert shape.tokens == fitting[0] or texts >= fitting[0] / 12


@given(st.lists(st.integers(1, 9), min_size=1, max_size=7))
def test_all_texts_begin_and_end_within_the_batch(lengths: list[int]) -> None:
    """Heads read first and last tokens, and a device ends on a row that there is not."""
    texts = [Text(tuple(range(length))) for length in lengths]
    shape = padded_shape(sum(lengths), len(lengths), recorded_shapes(64))
    if shape is None:
        return
    starts = filled(shape, *texts).view(shape, shape.tokens).starts
    assert starts[0] == 0 and starts[-1] == shape.tokens and len(starts) == shape.texts + 1
    assert (starts[:-1] < shape.tokens).all() and (starts[1:] >= 1).all() and (starts.diff() >= 0).all()


def test_nothing_is_recorded_that_there_is_no_room_for() -> None:
    assert recorded_shapes(15) == () and max(recorded_shapes(100)).tokens == 80
    assert len(recorded_shapes(10_000)) == len(set(recorded_shapes(10_000))) < 24
