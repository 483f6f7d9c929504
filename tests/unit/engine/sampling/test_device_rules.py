"""Rows with penalties, masks and log-probabilities, sampled on a device, against the sampler of a processor."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.sampling.device_rules import DeviceRules, TokenTallies, forbidden
from app.engine.sampling.rows import SamplingTensors, tensor_columns, uniform_number
from app.engine.sampling.sampler import Sampler, TokenMasks
from app.engine.scheduler.batch import NOT_FINITE, LogitRow, SampledTokens, ScheduledSpan, Sequence
from app.messages import SamplingParams
from hypothesis_examples import examples

VOCABULARY = 70
CPU = torch.device("cpu")
PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.7, 1.3]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.5, -1.0]),
    frequency_penalty=st.sampled_from([0.0, 0.7]),
    repetition_penalty=st.sampled_from([1.0, 0.6, 1.4]),
    logit_bias=st.sampled_from([(), ((3, 5.0), (9, -100.0))]),
    logprobs=st.sampled_from([None, 0, 4]),
    min_tokens=st.sampled_from([0, 8]),
    allowed_token_ids=st.sampled_from([None, tuple(range(2, 40))]),
    stop_token_ids=st.just((1, 2)),
    max_tokens=st.just(30),
)


def sequence_of(params: SamplingParams, length: int, number: int = 0) -> Sequence:
    ids = torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(length + number)).tolist()
    stop_ids = frozenset(params.stop_token_ids)
    return Sequence(f"r{number}", 0, params, ids, length // 2, seed=number, slot=number, stop_ids=stop_ids)


def sampled(rules: DeviceRules, logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledTokens]:
    """Sample every second row by the device's rules."""
    places = list(range(0, len(logits), 2))
    params = [one.params for one in sequences]
    rows = [LogitRow(one, len(one.token_ids)) for one in sequences]
    columns = tensor_columns([one for one in params for _ in range(2)][: len(logits)])
    uniforms = torch.zeros(len(logits), dtype=torch.float64)
    uniforms[::2] = torch.tensor([uniform_number(row.sequence.seed, row.position) for row in rows]).double()
    masks = TokenMasks(VOCABULARY).for_step(spans_of(sequences), len(rows))
    words = None if masks is None else masks.words[: len(rows)]
    sampling = None if all(one.greedy for one in params) else SamplingTensors(columns, uniforms)
    last = torch.tensor([one.token_ids[-1] for one in sequences])
    ids, report = rules.sample(logits, rules.rows(places, sequences), rows, last, words, sampling)
    samples = [SampledTokens((0,))] * len(logits)
    for place, token_id in zip(places, ids.tolist(), strict=True):
        samples[place] = SampledTokens((token_id,))
    if report is not None:
        host = torch.zeros(report.packed.numel(), dtype=torch.int64)
        report.on_host(host).add_to(samples)
    return [samples[place] for place in places]


def spans_of(sequences: list[Sequence]) -> list[ScheduledSpan]:
    return [
        ScheduledSpan(one, len(one.token_ids) - 1, 1, number, None, 0, samples=True)
        for number, one in enumerate(sequences)
    ]


def expected(logits: torch.Tensor, sequences: list[Sequence]) -> list[SampledTokens]:
    rows = [LogitRow(one, len(one.token_ids)) for one in sequences]
    masks = TokenMasks(VOCABULARY).for_step(spans_of(sequences), len(rows))
    return Sampler(VOCABULARY).sample(logits[::2], rows, masks)


def logits_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randn((rows, VOCABULARY), generator=torch.Generator().manual_seed(seed)) * 4


def held_to(found: list[SampledTokens], wanted: list[SampledTokens]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-6)
        assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]
        assert [value for _, value in one.top] == pytest.approx([value for _, value in other.top], abs=1e-6)


@given(st.lists(PARAMS, min_size=1, max_size=4), st.integers(0, 10**6))
@settings(max_examples=examples(40))
def test_the_device_samples_what_the_sampler_samples_step_after_step(params: list[SamplingParams], seed: int) -> None:
    """Tallies follow the tokens: those that the device saw alone, and those that the host counts anew."""
    rules = DeviceRules(VOCABULARY, CPU)
    sequences = [sequence_of(one, 7 + number, number) for number, one in enumerate(params)]
    for step in range(4):
        logits = logits_of(2 * len(sequences), seed + step)
        found = sampled(rules, logits, sequences)
        held_to(found, expected(logits, sequences))
        held_to(sampled(rules, logits, sequences), found)  # a step that is launched again
        for sequence, one in zip(sequences, found, strict=True):
            sequence.token_ids.append(one.token_ids[0])


def test_a_tally_is_counted_anew_where_tokens_are_missing() -> None:
    params = SamplingParams(temperature=0.0, repetition_penalty=1.5, frequency_penalty=1.0)
    sequence, tallies = sequence_of(params, 9), TokenTallies(VOCABULARY, CPU)
    tallies.update([LogitRow(sequence, 9)], torch.tensor([0]))
    sequence.token_ids += [5, 5, 6]
    found = tallies.update([LogitRow(sequence, 12)], torch.tensor([6]))
    assert found[0, 5] % 2**30 == sequence.token_ids[4:].count(5)
    fresh = TokenTallies(VOCABULARY, CPU).update([LogitRow(sequence, 12)], torch.tensor([6]))
    assert torch.equal(found, fresh)


def test_tallies_of_sequences_that_left_are_used_again() -> None:
    params, tallies = SamplingParams(presence_penalty=1.0), TokenTallies(VOCABULARY, CPU)
    for number in range(20):
        sequences = [sequence_of(params, 6 + number, 2 * number), sequence_of(params, 9 + number, 2 * number + 1)]
        rows = [LogitRow(one, len(one.token_ids)) for one in sequences]
        found = tallies.update(rows, torch.zeros(2, dtype=torch.int64))
        assert found.sum(1).tolist() == [
            len(ids) - len(ids) // 2 + 2**30 * len(set(ids[: len(ids) // 2]))
            for ids in (one.token_ids for one in sequences)
        ]
        for sequence in sequences:
            sequence.slot = None
    assert len(tallies._counts) == 2


def test_logits_that_are_not_finite_are_not_sampled_whatever_the_rules_hide() -> None:
    sequences = [
        sequence_of(SamplingParams(temperature=0.0, allowed_token_ids=(3, 4), logprobs=1), 6 + n, n) for n in (0, 1)
    ]
    logits = logits_of(4, 1)
    logits[0, 60] = torch.nan
    found = sampled(DeviceRules(VOCABULARY, CPU), logits, sequences)
    assert found[0].token_ids == (NOT_FINITE,) and found[1].token_ids[0] in (3, 4) and found[1].logprobs


def test_named_tokens_have_their_log_probabilities() -> None:
    params = SamplingParams(temperature=0.0, logprobs=0, logprob_token_ids=(7, 9, 11))
    sequences = [sequence_of(params, 8), sequence_of(replace(params, logprob_token_ids=(5,)), 9, 1)]
    logits = logits_of(4, 2)
    held_to(sampled(DeviceRules(VOCABULARY, CPU), logits, sequences), expected(logits, sequences))


def test_masks_are_read_bit_by_bit() -> None:
    masks = TokenMasks(VOCABULARY)
    masks.words[0] = torch.tensor([-1, 5, 1], dtype=torch.int32)
    expected_ids = [*range(32), 32, 34, 64]
    assert (~forbidden(masks.words[:1], VOCABULARY))[0].nonzero().squeeze(1).tolist() == expected_ids
    assert torch.equal(~forbidden(masks.words[:1], VOCABULARY), masks.allowed(1))


def test_rows_that_stay_the_same_are_described_once() -> None:
    rules, sequence = DeviceRules(VOCABULARY, CPU), sequence_of(SamplingParams(logprobs=1), 8)
    first = rules.rows([1], [sequence])
    assert rules.rows([1], [sequence]) is first
    assert rules.rows([2], [sequence]) is not first and rules.rows(
        [2], [sequence_of(sequence.params, 8)]
    ).at.tolist() == [2]
