"""Sampled tokens depend on logits, parameters, seed and position alone: filters, penalties, log-probabilities, beams."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from app.engine.sampling.rows import apply_penalties, filtered_probabilities, multinomial, uniform_number
from app.engine.sampling.sampler import Sampler, TokenMasks, top_logits_request
from app.engine.scheduler.batch import NOT_SAMPLED, SampledTokens, ScheduledSpan, Sequence
from app.messages import SamplingParams
from sequences import rows_of

VOCAB = 1000


def sequence_with(
    prompt: list[int] | None = None, completion: list[int] | None = None, seed: int = 0, **params: Any
) -> Sequence:
    prompt, completion = prompt or [5, 6, 7], completion or []
    return Sequence("r", 0, SamplingParams(**params), prompt + completion, len(prompt), seed=seed)


def random_logits(rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * scale


def pick_one(logits: torch.Tensor, sequence: Sequence) -> SampledTokens:
    (picked,) = Sampler(logits.shape[-1]).sample(logits.view(1, -1), rows_of([sequence]))
    return picked


def survivors(logits: list[float], **params: Any) -> list[int]:
    """Tokens that may be drawn."""
    shares = filtered_probabilities(torch.tensor([logits]), [SamplingParams(**params)])
    return shares[0].nonzero().flatten().tolist()


# ---- greedy --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_greedy_takes_the_likeliest_and_among_equals_the_lowest_id(dtype: torch.dtype) -> None:
    logits = random_logits(3).to(dtype)
    logits[0, [17, 400, 999]] = 50.0
    logits[1] = 0.0
    logits[2, 999] = 60.0
    picked = Sampler(VOCAB).sample(logits, rows_of([sequence_with(temperature=0.0) for _ in range(3)]))
    assert [one.token_ids for one in picked] == [(17,), (0,), (999,)]
    assert all(one.logprobs == () and one.top == () for one in picked)


def test_the_logits_are_left_as_they_are() -> None:
    logits = random_logits(4)
    before = logits.clone()
    ways = [
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.5},
        {"repetition_penalty": 2.0, "logprobs": 3},
        {"beam_width": 2},
    ]
    Sampler(VOCAB).sample(logits, rows_of([sequence_with(**way) for way in ways]))
    for row, way in enumerate(ways):
        pick_one(logits[row], sequence_with(**way))  # a whole batch of one kind takes the logits without an index
    assert torch.equal(logits, before)


# ---- filters -------------------------------------------------------------------------------------------------------

LOGITS = [math.log(share) for share in (0.05, 0.4, 0.2, 0.3, 0.05)]


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 2}, [1, 3]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),  # two are equal at the border: both stay
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 50}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.69}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.91}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.13}, [1, 2, 3]),
        ({"min_p": 0.74}, [1, 3]),
        ({"min_p": 1.0}, [1]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of what top_k leaves, 0.4 is 0.57
        ({"top_p": 0.89, "min_p": 0.6}, [1, 3]),
        ({"temperature": 0.1, "top_p": 0.9}, [1]),
        ({"temperature": 2.0, "min_p": 0.6}, [1, 2, 3]),  # square roots: 0.2 is 0.71 of 0.4
    ],
    ids=str,
)
def test_filters(params: dict[str, Any], expected: list[int]) -> None:
    assert survivors(LOGITS, **params) == expected


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 0.9999])
def test_a_nucleus_of_any_width_is_the_one_that_a_full_sort_finds(top_p: float) -> None:
    """Nearly flat logits need more tokens than the first look takes; peaked ones few."""
    logits = torch.stack([random_logits(1, 20_000, 1, scale)[0] for scale in (0.1, 1.0, 4.0, 8.0)])
    kept = filtered_probabilities(logits.clone(), [SamplingParams(top_p=top_p)] * 4) > 0
    shares, order = logits.double().softmax(-1).sort(-1, descending=True)
    inside = shares.cumsum(-1) - shares < top_p
    assert int(inside[0].sum()) != int(inside[3].sum())
    expected = torch.zeros_like(kept).scatter(1, order, inside)
    mass = logits.double().softmax(-1)
    border = shares.masked_fill(~inside, 1.0).amin(
        -1
    )  # sums in float32 may differ by the token at the border, or by their own rounding
    assert bool((mass.masked_fill(kept == expected, 0.0).sum(-1) <= border + 1e-5).all())


def test_rows_with_and_without_filters_share_a_batch() -> None:
    rows = [
        {},
        {"top_k": 3},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"top_k": 7, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.3},
    ]
    params = [SamplingParams(**row) for row in rows]
    logits = random_logits(len(rows))
    together = filtered_probabilities(logits.clone(), params)
    for row, one in enumerate(params):
        assert torch.equal(together[row], filtered_probabilities(logits[row : row + 1].clone(), [one])[0])


# ---- the draw ------------------------------------------------------------------------------------------------------


def test_a_draw_is_where_the_running_sum_passes_the_number() -> None:
    shares = torch.zeros(1, 700)
    shares[0, [3, 300, 650]] = torch.tensor([0.25, 0.5, 0.25])
    numbers = (0.0, 0.249, 0.25, 0.749, 0.75, 1 - 2**-53)
    assert [int(multinomial(shares, [number])) for number in numbers] == [3, 3, 300, 300, 650, 650]


def test_what_was_filtered_is_never_drawn() -> None:
    shares = torch.rand((50, 513), generator=torch.Generator().manual_seed(0))
    shares[:, ::2] = 0.0
    for number in (0.0, 1e-300, 0.3, 0.999999, 1 - 2**-53):
        assert bool((multinomial(shares, [number] * 50) % 2 == 1).all())


def test_draws_follow_the_distribution() -> None:
    """Chi-square over 20,000 seeds: 9 degrees of freedom, p = 0.001 at 27.9. The seeds are fixed, so it passes or fails for ever."""
    logits = torch.linspace(0.0, 3.0, 10).expand(20_000, 10)
    sequences = [sequence_with(seed=seed, temperature=0.8) for seed in range(20_000)]
    picked = Sampler(10).sample(logits, rows_of(sequences))
    counts = torch.bincount(torch.tensor([one.token_ids[0] for one in picked]), minlength=10)
    expected = (logits[0].double() / 0.8).softmax(-1) * 20_000
    assert float(((counts - expected) ** 2 / expected).sum()) < 27.9


def test_positions_of_one_seed_are_independent_draws() -> None:
    """Successive tokens of one sequence, as pairs: 15 degrees of freedom, p = 0.001 at 37.7."""
    sequences = [sequence_with(prompt=[0] * length, seed=99) for length in range(1, 8001)]
    ids = [one.token_ids[0] for one in Sampler(4).sample(torch.zeros(8000, 4), rows_of(sequences))]
    counts = torch.bincount(
        torch.tensor([4 * first + second for first, second in zip(ids[::2], ids[1::2], strict=True)]), minlength=16
    )
    assert float(((counts - 250) ** 2 / 250).sum()) < 37.7


def test_a_seed_and_a_position_give_the_same_token_alone_and_in_any_batch() -> None:
    params = [
        {},
        {"top_p": 0.9},
        {"top_k": 40},
        {"min_p": 0.05, "temperature": 1.3},
        {"temperature": 0.0},
        {"presence_penalty": 1.0},
    ]
    sequences = [sequence_with(completion=[1] * row, seed=row * 31, **params[row % len(params)]) for row in range(24)]
    logits = random_logits(24)
    together = Sampler(VOCAB).sample(logits, rows_of(sequences))
    assert together == [pick_one(logits[row], sequence) for row, sequence in enumerate(sequences)]
    backwards = Sampler(VOCAB).sample(logits.flip(0), rows_of(sequences[::-1]))
    assert together == backwards[::-1]


def test_the_number_is_that_of_the_position_that_the_token_will_have() -> None:
    flat = torch.zeros(VOCAB)
    for length in (0, 1, 5):
        sequence = sequence_with(prompt=[1, 2], completion=[3] * length, seed=12)
        assert pick_one(flat, sequence).token_ids == (int(uniform_number(12, 2 + length) * VOCAB),)


def test_a_preempted_sequence_draws_what_it_would_have_drawn() -> None:
    """Its prompt and completion are computed again; only ids and seed count, not how they were computed."""
    logits = random_logits(1)[0]
    before = sequence_with(completion=[9, 9, 9], seed=4, frequency_penalty=0.5)
    after = sequence_with(completion=[9, 9, 9], seed=4, frequency_penalty=0.5)
    after.num_computed, after.slot = 0, None
    assert pick_one(logits, before) == pick_one(logits, after)


# ---- penalties -----------------------------------------------------------------------------------------------------


def test_penalties_count_what_they_should() -> None:
    logits = torch.tensor([[4.0, -4.0, 4.0, -4.0, 4.0, -4.0]])
    sequence = sequence_with([0, 1, 0], [2, 3, 2], repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25)
    # Prompt tokens are repeated but not present in the completion: 2 was seen twice there, 3 once.
    expected = [2.0, -8.0, 2.0 - 0.5 - 0.5, -8.0 - 0.5 - 0.25, 4.0, -4.0]
    assert apply_penalties(logits, [sequence])[0].tolist() == pytest.approx(expected)
    only = sequence_with([0, 1, 0], [2, 3, 2], presence_penalty=-1.0)
    assert apply_penalties(logits, [only])[0].tolist() == pytest.approx([4.0, -4.0, 5.0, -3.0, 4.0, -4.0])


def test_penalties_touch_only_the_rows_that_ask() -> None:
    logits = random_logits(3)
    scores = apply_penalties(
        logits, [sequence_with(), sequence_with([1], [2], repetition_penalty=1.5), sequence_with()]
    )
    assert torch.equal(scores[[0, 2]], logits[[0, 2]])
    assert (scores[1] != logits[1]).nonzero().flatten().tolist() == [1, 2]


def test_a_greedy_sequence_is_penalised_too() -> None:
    logits = torch.tensor([0.0, 3.0, 2.9])
    assert pick_one(logits, sequence_with([0], [1], temperature=0.0)).token_ids == (1,)
    assert pick_one(logits, sequence_with([0], [1], temperature=0.0, frequency_penalty=0.5)).token_ids == (2,)


@pytest.mark.parametrize("temperature", [0.0, 1e-300, 1.0])
@pytest.mark.parametrize("penalty", [1e-300, 1e-30, 10.0])
def test_extreme_values_of_a_client_are_not_a_failed_step(penalty: float, temperature: float) -> None:
    logits = torch.tensor([[0.0, 1e4, -1e4, 5.0], [0.0, 1.0, 2.0, 30.0]])
    extreme = sequence_with([0, 1, 2], [3], repetition_penalty=penalty, temperature=temperature, presence_penalty=2.0)
    picked = Sampler(4).sample(logits, rows_of([extreme, sequence_with(temperature=0.0)]))
    assert picked[0].token_ids == (1,)
    assert picked[1].token_ids == (3,)


# ---- log-probabilities and beams -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"temperature": 0.3, "top_k": 5}, {"repetition_penalty": 3.0}], ids=str
)
def test_log_probabilities_are_the_models_own(params: dict[str, Any]) -> None:
    logits = random_logits(2)
    expected = logits[1].log_softmax(-1)
    asked = sequence_with([3], [int(logits[1].argmax())], logprobs=4, **params)
    plain, one = Sampler(VOCAB).sample(logits, rows_of([sequence_with(), asked]))
    assert (plain.logprobs, plain.top) == ((), ())
    assert one.logprobs == pytest.approx((float(expected[one.token_ids[0]]),))
    assert [token_id for token_id, _ in one.top] == expected.topk(4).indices.tolist()
    assert [logprob for _, logprob in one.top] == pytest.approx(expected.topk(4).values.tolist())


def test_no_alternatives_are_given_where_none_were_asked_for() -> None:
    one = pick_one(random_logits(1)[0], sequence_with(logprobs=0))
    assert len(one.logprobs) == 1 and one.top == ()


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_log_probabilities_of_chosen_tokens_replace_the_best_ones(temperature: float) -> None:
    logits = random_logits(2)
    expected = logits[1].log_softmax(-1)
    worst = [int(place) for place in expected.topk(2, largest=False).indices]
    asked = sequence_with(logprobs=4, logprob_token_ids=tuple(worst), temperature=temperature, top_k=1)
    plain, one = Sampler(VOCAB).sample(logits, rows_of([sequence_with(logprobs=1), asked]))
    assert len(plain.top) == 1
    best = int(logits[1].argmax())
    assert one.token_ids == (best,)
    assert one.top == tuple((place, pytest.approx(float(expected[place]))) for place in (best, worst[1], worst[0]))
    assert asked.params.num_top_logprobs == 3
    assert top_logits_request(rows_of([asked])) is None  # the tokens may be any of the vocabulary


def test_a_beam_gets_its_best_candidates_best_first() -> None:
    logits = random_logits(2)
    logits[0, [700, 40]] = 20.0
    expected = logits.log_softmax(-1)
    two, three = sequence_with(beam_width=2), sequence_with(beam_width=3, logprobs=2)
    first, second = Sampler(VOCAB).sample(logits, rows_of([two, three]))
    assert len(first.token_ids) == two.num_candidates and len(second.token_ids) == three.num_candidates
    assert first.token_ids[:2] == (40, 700)
    assert second.token_ids == tuple(expected[1].topk(6).indices.tolist())
    assert second.logprobs == pytest.approx(expected[1].topk(6).values.tolist())
    assert first.top == () and second.top == tuple(zip(second.token_ids[:2], second.logprobs[:2], strict=True))


def test_a_beam_of_a_small_vocabulary_gets_all_of_it() -> None:
    assert len(pick_one(torch.tensor([0.0, 1.0, 2.0]), sequence_with(beam_width=8)).token_ids) == 3


# ---- refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {}, {"temperature": 0.0, "presence_penalty": 1.0}, {"beam_width": 2}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_that_is_not_finite_is_not_sampled_and_changes_no_other(
    bad: float, params: dict[str, Any], dtype: torch.dtype
) -> None:
    logits = random_logits(3).to(dtype)
    rows = rows_of([sequence_with(seed=5, **params) for _ in range(3)])
    expected = Sampler(VOCAB).sample(logits, rows)
    broken = logits.clone()
    broken[1, 500] = bad
    found = Sampler(VOCAB).sample(broken, rows)
    assert found == [expected[0], NOT_SAMPLED, expected[2]] and broken[1, 500].isfinite().logical_not()
    found = Sampler(VOCAB).sample(
        broken, rows_of([sequence_with(), sequence_with(seed=5, **params), sequence_with(temperature=0.0)])
    )
    assert [one.is_finite for one in found] == [True, False, True]


def test_a_row_without_an_allowed_token_that_is_finite_is_not_sampled() -> None:
    sequence = sequence_with(allowed_token_ids=(1, 2))
    logits = random_logits(2)
    logits[0, :3] = -math.inf
    masks = TokenMasks(VOCAB).for_step([ScheduledSpan(sequence, 2, 1, 0, None, 0, samples=True)] * 2, 2)
    found = Sampler(VOCAB).sample(logits, rows_of([sequence, sequence]), masks)
    assert [one.is_finite for one in found] == [False, True]


def test_a_token_that_the_model_rules_out_is_no_failure() -> None:
    logits = torch.tensor([-math.inf, 1.0, -math.inf])
    for params in ({"temperature": 0.0}, {}, {"repetition_penalty": 2.0}):
        assert pick_one(logits, sequence_with([0, 2], **params)).token_ids == (1,)


def test_a_row_of_logits_for_each_sequence() -> None:
    with pytest.raises(AssertionError, match="one row of logits for each"):
        Sampler(VOCAB).sample(random_logits(2), rows_of([sequence_with()]))
