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
    SamplingViews,
    StepSizes,
    StepViews,
    block_arrays,
    block_size,
    block_views,
    fill_logit_rows,
    fill_sampling,
    fill_step,
    pieces_of,
    sampling_arrays,
    sampling_mode,
    sampling_size,
    sampling_views,
    table_update_size,
    table_update_views,
    token_rows,
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


def sampling(rows: int) -> SamplingViews[ColumnArray]:
    return sampling_arrays(torch.full((sampling_size(rows),), -1, dtype=torch.int64), rows)


def all_views(block: torch.Tensor, sizes: StepSizes, rows: int) -> list[torch.Tensor]:
    inputs, parameters = block_views(block[sampling_size(rows) :], sizes), sampling_views(block, rows)
    single = [getattr(inputs, field.name) for field in fields(StepViews)]
    return [*single, parameters.uniforms, *parameters.columns.values()]


@given(st.builds(StepSizes, st.integers(0, 9), st.integers(0, 9), st.integers(1, 9)), st.integers(1, 9))
def test_views_fill_the_block_and_do_not_overlap(sizes: StepSizes, rows: int) -> None:
    block = torch.zeros(sampling_size(rows) + block_size(sizes), dtype=torch.int64)
    for number, view in enumerate(all_views(block, sizes, rows), 1):
        view.fill_(number)
    for number, view in enumerate(all_views(block, sizes, rows), 1):
        assert (view == number).all()
    assert len(block_views(block, sizes).starts) == sizes.sequences + 1


def test_prompts_and_decodes_are_passed_in_the_order_of_the_spans() -> None:
    decode, prompt = sequence_of(8), sequence_of(6)
    spans = (span_of(decode, 7, 8, slot=3), span_of(prompt, 2, 5, slot=1))
    pieces = pieces_of(spans)
    told = views(StepSizes.of(pieces, 1))
    fill_step(told, pieces, [70, 80, 81, 82], DeviceLayout(1000, 9))
    fill_logit_rows(told, spans)
    assert told.token_ids.tolist() == [107, 102, 103, 104]
    assert told.positions.tolist() == [7, 2, 3, 4]
    assert told.sources.tolist() == [1000, 1001, 1002, 1003], "the block's first words are the ids"
    assert told.kv_rows.tolist() == [70, 80, 81, 82]
    assert (told.slots.tolist(), told.lengths.tolist(), told.starts.tolist()) == ([3, 1], [8, 5], [0, 1, 4])
    assert told.logit_rows.tolist() == [0]


def test_padding_of_a_captured_step_lies_behind_its_decodes_and_behind_its_prompts() -> None:
    """It has no context, and what it writes is on the padding page."""
    decode, prompt, last = sequence_of(8), sequence_of(6), sequence_of(5)
    spans = (span_of(decode, 7, 8, slot=3), span_of(prompt, 2, 5, slot=1), span_of(last, 3, 5, slot=2))
    told = views(StepSizes(3 + 8, 3 + 4, 3 + 4))
    fill_step(told, pieces_of(spans), [70, 80, 81, 82, 90, 91], DeviceLayout(1000, 9), decodes=3)
    fill_logit_rows(told, spans, gap=2)
    assert told.token_ids.tolist() == [107, 0, 0, 102, 103, 104, 103, 104, 0, 0, 0]
    assert told.positions.tolist() == [7, 0, 0, 2, 3, 4, 3, 4, 0, 0, 0]
    assert told.starts.tolist() == [0, 1, 2, 3, 6, 8, 11, 11], "one more sequence is all of the padding"
    assert told.slots.tolist() == [3, 9, 9, 1, 2, 9, 9] and told.lengths.tolist() == [8, 0, 0, 5, 5, 0, 0]
    rows = told.kv_rows.tolist()
    assert (rows[0], rows[3:8]) == (70, [80, 81, 82, 90, 91]) and all(one < PAGE_TOKENS for one in rows[1:3] + rows[8:])
    assert told.logit_rows.tolist() == [0, 7, 10, 10, 10, 10, 10], "the first prompt is not complete"


def test_draft_tokens_are_decodes_that_see_the_ones_before_them() -> None:
    sequence = sequence_of(8)
    spans = (span_of(sequence, 7, 8, slot=3).with_drafts((5, 6)), span_of(sequence_of(4), 3, 4, slot=1))
    pieces = pieces_of(spans)
    told = views(StepSizes.of(pieces, 4))
    fill_step(told, pieces, [70, 71, 72, 80], DeviceLayout(1000, 9))
    assert told.token_ids.tolist() == [107, 5, 6, 103] and told.lengths.tolist() == [8, 9, 10, 4]
    assert told.slots.tolist() == [3, 3, 3, 1] and told.starts.tolist() == [0, 1, 2, 3, 4]
    assert token_rows(spans) == [0, 1, 2, 3]


def test_a_step_that_samples_nothing_works_out_one_row_of_logits() -> None:
    spans = (span_of(sequence_of(6), 0, 4, slot=0),)
    told = views(StepSizes.of(pieces_of(spans), 0))
    fill_logit_rows(told, spans)
    assert told.logit_rows.tolist() == [3]


def test_rows_that_fill_a_bucket_have_no_context_and_write_where_nobody_reads() -> None:
    spans = (span_of(sequence_of(8, SHAPED), 7, 8, slot=3),)
    told, parameters = views(StepSizes.of_bucket(4)), sampling(4)
    fill_step(told, pieces_of(spans), [70], DeviceLayout(1000, 9), decodes=4)
    fill_sampling(parameters, logit_rows_of(spans))
    assert told.slots.tolist() == [3, 9, 9, 9] and told.lengths.tolist() == [8, 0, 0, 0]
    assert told.starts.tolist() == [0, 1, 2, 3, 4], "each row is a sequence of one query"
    assert told.kv_rows[0] == 70 and all(row < PAGE_TOKENS for row in told.kv_rows[1:].tolist())
    assert told.token_ids.tolist() == [107, 0, 0, 0] and told.positions.tolist() == [7, 0, 0, 0]
    assert parameters.columns["temperature"].tolist() == [pytest.approx(0.7), 0.0, 0.0, 0.0], "the others are greedy"
    assert parameters.columns["top_p"].tolist() == [0.9, 1.0, 1.0, 1.0]


def test_draws_are_equal_to_the_last_bit() -> None:
    sequence = sequence_of(8, SHAPED, seed=11)
    spans = (span_of(sequence, 7, 8, slot=3),)
    told = sampling(1)
    fill_sampling(told, logit_rows_of(spans))
    assert told.uniforms.tolist() == [uniform_number(11, 8)]
    assert told.columns["top_k"].tolist() == [2**31 - 1], "as many as there are"
    assert told.columns["top_p"].tolist() == [0.9] and told.columns["min_p"].tolist() == [pytest.approx(0.05)]


def test_a_token_that_is_being_sampled_is_not_reported_as_known() -> None:
    spans = (span_of(sequence_of(5), 5, 6, slot=2),)
    with pytest.raises(AssertionError, match="must know all tokens of the spans"):
        pieces_of(spans)


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
    parameters = sampling(len(spans) + spare)
    course.fill(told, parameters, DeviceLayout(1000, 9))
    for span in spans:  # what each picked meanwhile, as the host knows it in the end
        span.sequence.token_ids += [0] * (span.end - len(span.sequence.token_ids))
    known, expected = views(sizes), sampling(len(spans) + spare)
    fill_step(known, pieces_of(spans), rows_of(spans), DeviceLayout(1000, 9), decodes=len(spans) + spare)
    fill_sampling(expected, logit_rows_of(spans))
    rows = [row + (steps == 1) for row in range(len(spans))]
    assert told.sources.tolist() == rows + [1000] * spare and not told.token_ids.any()
    for name in (
        "positions",
        "kv_rows",
        "slots",
        "lengths",
        "starts",
    ):
        assert getattr(told, name).tolist() == getattr(known, name).tolist(), name
    assert parameters.uniforms.tolist() == expected.uniforms.tolist()
    for name in ("top_k", "temperature", "top_p", "min_p"):
        assert parameters.columns[name].tolist() == expected.columns[name].tolist(), name


def test_a_temperature_that_fp32_has_no_number_for_is_not_greedy() -> None:
    sequence = sequence_of(8, SamplingParams(temperature=1e-60))
    spans = (span_of(sequence, 7, 8, slot=3),)
    told = sampling(1)
    fill_sampling(told, logit_rows_of(spans))
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
        ([], SamplingMode.GREEDY),
    ],
)
def test_one_way_is_enough_for_every_row(params: list[SamplingParams], way: SamplingMode) -> None:
    rows = [LogitRow(sequence_of(4, one), 4) for one in params]
    assert sampling_mode(rows) is way
