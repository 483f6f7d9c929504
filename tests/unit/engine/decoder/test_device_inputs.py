"""The input block of a step has the same values on the device as on the host, and padding rows change nothing."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from app.engine.decoder.device_inputs import (
    ColumnArray,
    DecodeInputs,
    DeviceLayout,
    SamplingMode,
    StepSizes,
    StepViews,
    block_arrays,
    block_size,
    block_views,
    fill_sampling,
    fill_step,
    sampling_mode,
    table_update_size,
    table_update_views,
)
from app.engine.sampling.rows import uniform_number
from app.engine.scheduler.batch import LogitRow, ScheduledSpan, Sequence, logit_rows_of
from app.messages import SamplingParams
from armature_kernels.attention.paged import PAGE_TOKENS

GREEDY = SamplingParams(temperature=0.0)
SHAPED = SamplingParams(temperature=0.7, top_k=2**40, top_p=0.9, min_p=0.05)


DRAWING = SamplingParams(temperature=1.3)


def sequence_of(length: int, params: SamplingParams = GREEDY, seed: int = 3) -> Sequence:
    return Sequence(f"r{length}", 0, params, list(range(100, 100 + length)), max(1, length - 2), seed=seed)


def span_of(sequence: Sequence, start: int, end: int, slot: int) -> ScheduledSpan:
    return ScheduledSpan(sequence, start, end - start, slot, None, 0, samples=end >= len(sequence.token_ids))


def rows_of(spans: Items[ScheduledSpan]) -> list[int]:
    """Of spans of one token: pages lie in no order."""
    return [
        (span.start // PAGE_TOKENS * 7 + span.slot * 1000) * PAGE_TOKENS + span.start % PAGE_TOKENS for span in spans
    ]


def views(sizes: StepSizes) -> StepViews[ColumnArray]:
    return block_arrays(torch.full((block_size(sizes),), -1, dtype=torch.int64), sizes)


def all_views(views: StepViews[torch.Tensor]) -> list[torch.Tensor]:
    single = [getattr(views, field.name) for field in fields(StepViews) if field.name != "columns"]
    return [*single, *views.columns.values()]


@given(st.builds(StepSizes, st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)))
def test_views_fill_the_block_and_do_not_overlap(sizes: StepSizes) -> None:
    block = torch.zeros(block_size(sizes), dtype=torch.int64)
    for number, view in enumerate(all_views(block_views(block, sizes)), 1):
        view.fill_(number)
    for number, view in enumerate(all_views(block_views(block, sizes)), 1):
        assert (view == number).all()
    assert len(block_views(block, sizes).starts) == sizes.sequences + 1


def test_prompts_and_decodes_are_passed_in_the_order_of_the_spans() -> None:
    decode, prompt = sequence_of(8), sequence_of(6)
    spans = (span_of(decode, 7, 8, slot=3), span_of(prompt, 2, 5, slot=1))
    told = views(StepSizes.of(spans, 1))
    fill_step(told, spans, [70, 80, 81, 82], DeviceLayout(1000, 9))
    fill_sampling(told, spans, logit_rows_of(spans), SamplingMode.GREEDY)
    assert told.token_ids.tolist() == [107, 102, 103, 104]
    assert told.positions.tolist() == [7, 2, 3, 4]
    assert told.sources.tolist() == [1000, 1001, 1002, 1003], "the block's first words are the ids"
    assert told.kv_rows.tolist() == [70, 80, 81, 82]
    assert (told.slots.tolist(), told.lengths.tolist(), told.starts.tolist()) == ([3, 1], [8, 5], [0, 1, 4])
    assert told.logit_rows.tolist() == [0]


def test_a_step_that_samples_nothing_works_out_one_row_of_logits() -> None:
    spans = (span_of(sequence_of(6), 0, 4, slot=0),)
    told = views(StepSizes.of(spans, 0))
    fill_sampling(told, spans, [], SamplingMode.GREEDY)
    assert told.logit_rows.tolist() == [3]


def test_rows_that_fill_a_bucket_have_no_context_and_write_where_nobody_reads() -> None:
    spans = (span_of(sequence_of(8, SHAPED), 7, 8, slot=3),)
    told = views(StepSizes.of_bucket(4))
    fill_step(told, spans, [70], DeviceLayout(1000, 9))
    fill_sampling(told, spans, logit_rows_of(spans), SamplingMode.FILTERED)
    assert told.slots.tolist() == [3, 9, 9, 9] and told.lengths.tolist() == [8, 0, 0, 0]
    assert told.starts.tolist() == [0, 1, 2, 3, 4], "each row is a sequence of one query"
    assert told.kv_rows[0] == 70 and all(row < PAGE_TOKENS for row in told.kv_rows[1:].tolist())
    assert told.token_ids.tolist() == [107, 0, 0, 0] and told.positions.tolist() == [7, 0, 0, 0]
    assert told.columns["temperature"].tolist() == [pytest.approx(0.7), 0.0, 0.0, 0.0], "the others are greedy"
    assert told.columns["top_p"].tolist() == [0.9, 1.0, 1.0, 1.0]


def test_draws_are_equal_to_the_last_bit() -> None:
    sequence = sequence_of(8, SHAPED, seed=11)
    spans = (span_of(sequence, 7, 8, slot=3),)
    told = views(StepSizes.of(spans, 1))
    fill_sampling(told, spans, logit_rows_of(spans), SamplingMode.RANDOM)
    assert told.uniforms.tolist() == [uniform_number(11, 8)]
    assert told.columns["top_k"].tolist() == [2**31 - 1], "as many as there are"
    assert told.columns["top_p"].tolist() == [0.9] and told.columns["min_p"].tolist() == [pytest.approx(0.05)]


def test_a_token_that_is_being_sampled_is_not_reported_as_known() -> None:
    spans = (span_of(sequence_of(5), 5, 6, slot=2),)
    with pytest.raises(AssertionError, match="must know all tokens of the spans"):
        fill_step(views(StepSizes.of(spans, 1)), spans, [70], DeviceLayout(1000, 9))


@given(
    st.lists(
        st.tuples(st.integers(3, 200), st.sampled_from([GREEDY, SHAPED, DRAWING]), st.integers(0, 2**63 - 1)),
        min_size=1,
        max_size=9,
    ),
    st.integers(1, 140),
    st.integers(0, 3),
)
def test_decode_inputs_equal_those_of_the_spans_step_after_step(
    asked: list[tuple[int, SamplingParams, int]], steps: int, spare: int
) -> None:
    """Each id is read where it was picked, each row of the cache is found by its page, each number drawn is the position's."""
    sequences = [sequence_of(length, params, seed) for length, params, seed in asked]
    spans = tuple(span_of(one, len(one.token_ids), len(one.token_ids) + 1, slot) for slot, one in enumerate(sequences))
    course = DecodeInputs.after_step((span_of(sequence_of(9), 8, 9, 99), *spans), spans, SamplingMode.FILTERED, rows_of)
    for step in range(steps):
        if step:
            spans = tuple(span.next_position() for span in spans)
            course = course.next_step(spans, rows_of)
    told, sizes = views(StepSizes.of_bucket(len(spans) + spare)), StepSizes.of_bucket(len(spans) + spare)
    course.fill(told, DeviceLayout(1000, 9))
    for span in spans:  # what each picked meanwhile, as the host knows it in the end
        span.sequence.token_ids += [0] * (span.end - len(span.sequence.token_ids))
    known = views(sizes)
    fill_step(known, spans, rows_of(spans), DeviceLayout(1000, 9))
    fill_sampling(known, spans, logit_rows_of(spans), SamplingMode.FILTERED)
    rows = [row + (steps == 1) for row in range(len(spans))]
    assert told.sources.tolist() == rows + [1000] * spare and not told.token_ids.any()
    for name in (
        "positions",
        "kv_rows",
        "slots",
        "lengths",
        "starts",
        "uniforms",
    ):
        assert getattr(told, name).tolist() == getattr(known, name).tolist(), name
    for name in ("top_k", "temperature", "top_p", "min_p"):
        assert told.columns[name].tolist() == known.columns[name].tolist(), name


def test_a_temperature_that_fp32_has_no_number_for_is_not_greedy() -> None:
    sequence = sequence_of(8, SamplingParams(temperature=1e-60))
    spans = (span_of(sequence, 7, 8, slot=3),)
    told = views(StepSizes.of(spans, 1))
    fill_sampling(told, spans, logit_rows_of(spans), SamplingMode.RANDOM)
    assert told.columns["temperature"].item() > 0


@pytest.mark.parametrize("count", [0, 1, 2, 7])
def test_updates_lie_behind_the_words(count: int) -> None:
    block = torch.zeros(table_update_size(count), dtype=torch.int64)
    cells, pages = table_update_views(block, count)
    cells.fill_(2**40)
    pages.fill_(5)
    assert (len(cells), len(pages)) == (count, count)
    assert (cells == 2**40).all() and (pages == 5).all() and pages.dtype == torch.int32


@pytest.mark.parametrize(
    ("params", "way"),
    [
        ([GREEDY, GREEDY], SamplingMode.GREEDY),
        ([GREEDY, SamplingParams(temperature=0.3)], SamplingMode.RANDOM),
        ([SamplingParams(temperature=0.0, top_p=0.5)], SamplingMode.GREEDY),
        ([GREEDY, SamplingParams(), SHAPED], SamplingMode.FILTERED),
        ([SamplingParams(top_k=3)], SamplingMode.FILTERED),
        ([SamplingParams(min_p=0.1)], SamplingMode.FILTERED),
        ([GREEDY, SamplingParams(temperature=0.0, logprobs=0)], SamplingMode.LOGITS),
        ([SHAPED, SamplingParams(frequency_penalty=0.1)], SamplingMode.LOGITS),
        ([SHAPED, SamplingParams(beam_width=2)], SamplingMode.LOGITS),
        ([], SamplingMode.GREEDY),
    ],
)
def test_one_way_is_enough_for_every_row(params: list[SamplingParams], way: SamplingMode) -> None:
    rows = [LogitRow(sequence_of(4, one), 4) for one in params]
    assert sampling_mode(rows, samples_randomly=True) is way
    assert sampling_mode(rows, samples_randomly=False) is (
        way if way is SamplingMode.GREEDY else SamplingMode.LOGITS
    ), "who does not draw there draws here"


def test_a_device_without_float64_reads_its_other_words_as_they_are_meant() -> None:
    block = torch.zeros(block_size(StepSizes.of_bucket(3)), dtype=torch.int64)
    here, there = (
        block_views(block, StepSizes.of_bucket(3)),
        block_views(block, StepSizes.of_bucket(3), samples_randomly=False),
    )
    fill_step(
        block_arrays(block, StepSizes.of_bucket(3)),
        (span_of(sequence_of(8), 7, 8, slot=3),),
        [70],
        DeviceLayout(1000, 9),
    )
    for name in ("token_ids", "sources", "positions", "kv_rows", "slots", "lengths", "starts"):
        assert getattr(there, name).tolist() == getattr(here, name).tolist()
    assert there.uniforms.dtype == there.columns["top_p"].dtype == torch.int64
