"""Division of batches into lanes: every text once, balanced as promised, and none for one thread or one text."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.engine.encoder.cpu_runner import DEFAULT_PLANNER, MAX_IMBALANCE, LanePlan, LanePlanner, max_lane_tokens


def lanes_of(cut: LanePlan, lengths: Sequence[int]) -> list[list[int]]:
    """Lengths of the texts of each lane."""
    return [[lengths[text] for text in cut.order[begin:end]] for begin, end in pairwise((cut.together, *cut.ends))]


def busiest(costs: Sequence[float], threads: int) -> float:
    """Whoever is free takes the next."""
    loads = [0.0] * threads
    for cost in costs:
        loads[loads.index(min(loads))] += cost
    return max(loads)


TEXTS = st.lists(st.one_of(st.integers(1, 64), st.integers(1, 512)), min_size=1, max_size=60)


@given(
    TEXTS, st.integers(1, 6), st.sampled_from([1, 16, 64]), st.integers(1, 4), st.sampled_from([0.0, 1 / 256, 1 / 20])
)
@example([512, 1], 2, 1, 4, 1 / 256)
def test_every_text_is_in_one_place_and_lanes_are_even(
    lengths: list[int], threads: int, least: int, most: int, pair: float
) -> None:
    rule = LanePlanner(pair, least, most)
    cut = rule.plan(lengths, threads)
    assert sorted(cut.order) == list(range(len(lengths)))
    assert list(cut.ends) == sorted(set(cut.ends)) and (cut.ends[-1:] or (cut.together,)) == (len(lengths),)
    lanes = lanes_of(cut, lengths)
    assert threads > 1 or not lanes
    if not lanes:
        assert cut == LanePlan.none(len(lengths))
        return
    assert len(lanes) % threads == 0 and len(lanes) <= threads * most and sum(map(sum, lanes)) >= least * len(lanes)
    assert all(sum(lane) <= max_lane_tokens(sum(lengths), threads) for lane in lanes)
    costs = [sum(map(rule.cost, lane)) for lane in lanes]
    assert costs == sorted(costs, reverse=True)
    assert busiest(costs, threads) <= MAX_IMBALANCE * sum(costs) / threads * (1 + 1e-9)
    if cut.together:  # no shorter one was taken out of its lane for a longer one's sake
        assert min(lengths[text] for text in cut.order[: cut.together]) >= max(max(lane) for lane in lanes)


@pytest.mark.parametrize(
    ("lengths", "threads", "lanes"),
    [
        ([128, 128], 2, [[128], [128]]),
        ([64, 64, 64, 64], 2, [[64], [64], [64], [64]]),
        ([64] * 16, 2, [[64, 64]] * 8),  # four lanes a thread at most
        ([30] * 8, 2, [[30] * 4] * 2),  # 64 tokens a lane at least, and as many lanes for each thread
        ([512], 2, []),  # one text is everybody's
        ([20, 20, 20], 2, []),  # too few tokens for two lanes
        ([128] * 8, 1, []),  # nobody waits for anybody
        ([300, 80, 80], 2, [[80], [80]]),  # the long one first, by all together
        ([300, 60], 2, []),
    ],
)
def test_usual_batches(lengths: list[int], threads: int, lanes: list[list[int]]) -> None:
    cut = DEFAULT_PLANNER.plan(lengths, threads)
    assert lanes_of(cut, lengths) == lanes
    assert cut.together == len(lengths) - sum(map(len, lanes))


def test_a_long_text_weighs_more_than_its_tokens() -> None:
    lengths = [200, *[20] * 10]
    assert lanes_of(LanePlanner(0.0, 100, 1).plan(lengths, 2), lengths) == [[200], [20] * 10]
    assert LanePlanner(0.05, 100, 1).plan(lengths, 2).together == 1
