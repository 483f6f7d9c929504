"""Picks on a device are the sampler's: the same tokens from the same logits, whatever the parameters, ties at a border among them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.engine.sampling.rows import (
    SamplingTensors,
    _float_of_rank,
    _float_rank,
    filtered_probabilities,
    multinomial_on_device,
    sample_greedy,
    sample_random,
    uniform_number,
)
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import NOT_FINITE, Sequence
from app.messages import SamplingParams
from fake_device import CUDA, fake_cuda
from hypothesis_examples import examples
from sequences import rows_of


def drawing_of(params: list[SamplingParams], uniforms: list[float]) -> SamplingTensors:
    return SamplingTensors(
        {
            "temperature": torch.tensor([one.temperature for one in params]),
            "top_k": torch.tensor([min(one.top_k, 2**31 - 1) for one in params], dtype=torch.int32),
            "top_p": torch.tensor([one.top_p for one in params], dtype=torch.float64),
            "min_p": torch.tensor([one.min_p for one in params]),
        },
        torch.tensor(uniforms, dtype=torch.float64),
    )


def sequences_with(params: list[SamplingParams]) -> list[Sequence]:
    return [Sequence("r", 0, one, [5, 6], 2, seed=seed) for seed, one in enumerate(params)]


def on_device(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    uniforms = [uniform_number(seed, 2) for seed in range(len(params))]
    return sample_random(logits, drawing_of(params, uniforms)).tolist()


def by_sampler(logits: Tensor, params: list[SamplingParams]) -> list[int]:
    picked = Sampler(logits.shape[1]).sample(logits, rows_of(sequences_with(params)))
    return [one.token_ids[0] for one in picked]


def logits_of(rows: int, vocab: int, seed: int, grain: float | None) -> Tensor:
    """`grain`: rounded to multiples of it, so that there are ties."""
    logits = torch.randn((rows, vocab), generator=torch.Generator().manual_seed(seed)) * 3
    return logits if grain is None else (logits / grain).round() * grain


a_row = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 1e-30, 1e-6, 0.1, 0.7, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 3, 40, 256, 299, 300, 301, 2**40]),
    top_p=st.sampled_from([0.0, 1e-9, 0.1, 0.5, 0.9, 0.95, 0.999999, 1.0]),
    min_p=st.sampled_from([0.0, 1e-9, 0.05, 0.5, 1.0]),
)


@settings(max_examples=examples(60))
@given(
    params=st.lists(a_row, min_size=1, max_size=4), vocab=st.sampled_from([1, 2, 255, 256, 300, 1000]),
    seed=st.integers(0, 2**20), grain=st.sampled_from([None, 0.5, 4.0]), dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
def test_every_row_samples_what_the_sampler_samples(
    params: list[SamplingParams], vocab: int, seed: int, grain: float | None, dtype: torch.dtype
) -> None:
    logits = logits_of(len(params), vocab, seed, grain).to(dtype)
    assert on_device(logits, params) == by_sampler(logits, params)


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"top_k": 1}, [1]),
        ({"top_k": 4}, [0, 1, 2, 3, 4]),  # two are equal at the border: both stay
        ({"top_p": 0.0}, [1]),
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 3]),
        ({"top_p": 0.71}, [1, 2, 3]),
        ({"top_p": 0.91}, [0, 1, 2, 3, 4]),
        ({"min_p": 0.74}, [1, 3]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of what top_k leaves, 0.4 is 0.57
        ({"temperature": 2.0, "min_p": 0.6}, [1, 2, 3]),
    ],
    ids=str,
)
def test_what_may_be_drawn(params: dict[str, Any], expected: list[int]) -> None:
    logits = torch.tensor([[math.log(share) for share in (0.05, 0.4, 0.2, 0.3, 0.05)]])
    numbers = [(place + 0.5) / 200 for place in range(200)]
    drawing = drawing_of([SamplingParams(**params)] * 200, numbers)
    assert sorted(set(sample_random(logits.repeat(200, 1), drawing).tolist())) == expected


def test_without_filters_the_same_is_drawn_with_less_work() -> None:
    logits, numbers = logits_of(50, 1000, 3, None), [uniform_number(seed, 0) for seed in range(50)]
    params = [SamplingParams(temperature=0.25 * (seed % 5)) for seed in range(50)]
    drawing = drawing_of(params, numbers)
    assert sample_random(logits, drawing, filtered=False).tolist() == sample_random(logits, drawing).tolist()
    shares = filtered_probabilities(logits.clone(), [SamplingParams()] * 50)
    plain = drawing_of([SamplingParams()] * 50, numbers)
    assert (
        sample_random(logits, plain, filtered=False).tolist() == multinomial_on_device(shares, plain.uniforms).tolist()
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_row_that_is_not_finite_says_so_and_leaves_the_others_alone(bad: float) -> None:
    logits = logits_of(4, 300, 5, None)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(top_p=0.5, top_k=3),
        SamplingParams(min_p=0.1),
        SamplingParams(),
    ]
    good = on_device(logits, params)
    assert NOT_FINITE not in good
    for row in range(4):
        broken = logits.clone()
        broken[row, slice(None) if bad < 0 else 7] = bad
        assert on_device(broken, params) == [NOT_FINITE if at == row else one for at, one in enumerate(good)]
        assert (sample_greedy(broken) == NOT_FINITE).nonzero().flatten().tolist() == [row]


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(3, 500, dtype=torch.bfloat16)
    logits[1, [17, 300, 499]] = 2.0
    logits[2, 499] = 2.0
    assert sample_greedy(logits).tolist() == [0, 17, 499]
    assert on_device(logits, [SamplingParams(temperature=0.0)] * 3) == [0, 17, 499]


def test_a_token_that_the_model_rules_out_is_no_failure() -> None:
    logits = logits_of(1, 300, 1, None)
    logits[0, 20:] = -math.inf
    for params in (
        SamplingParams(),
        SamplingParams(top_k=25),
        SamplingParams(top_p=0.99),
        SamplingParams(top_k=19, min_p=0.001),
    ):
        assert on_device(logits, [params]) == by_sampler(logits, [params])


@given(value=st.floats(width=32, allow_nan=False), other=st.floats(width=32, allow_nan=False))
def test_places_are_in_the_order_of_floats(value: float, other: float) -> None:
    values = torch.tensor([value, other])
    places = _float_rank(values)
    assert torch.equal(_float_of_rank(places), values)
    assert bool(places[0] < places[1]) == (value < other) or value == other == 0.0


def test_the_least_number_and_the_greatest_draw_something() -> None:
    logits = logits_of(2, 1000, 9, None)
    drawing = drawing_of([SamplingParams(top_p=0.9)] * 2, [0.0, 1.0 - 2.0**-53])
    shares = filtered_probabilities(logits.clone(), [SamplingParams(top_p=0.9)] * 2)
    kept = [row.nonzero().flatten().tolist() for row in shares]
    assert sample_random(logits, drawing).tolist() == [kept[0][0], kept[1][-1]]


def test_nothing_is_asked_of_the_host() -> None:
    with fake_cuda() as device:
        params = [SamplingParams(top_k=3, top_p=0.5), SamplingParams(temperature=0.0)]
        logits, drawing = device.move(logits_of(2, 300, 0, None)), device.move(drawing_of(params, [0.5, 0.5]))
        assert sample_greedy(logits).device == sample_random(logits, drawing).device == CUDA
