"""A beam search in the engine says what a plain one says, alone and in company."""

from __future__ import annotations

import math

import pytest

from app.engine.scheduler.batch import SampledTokens, Sequence
from app.engine.scheduler.beam_search import BeamGroup
from app.engine.scheduler.scheduler import EngineLimits
from app.messages import Abort, SamplingParams
from engine_simulation import EOS, Simulation, fingerprints, log_probabilities, plain_beam_search

PROMPTS = [[1, 2, 3], [4, 4], [5, 6, 1, 2, 3, 4] * 5, [2] * 9]


def group(width: int, limit: int = 100) -> BeamGroup:
    params = SamplingParams(beam_width=width, logprobs=1)
    return BeamGroup(Sequence("a", 0, params, [1, 2], 2, stop_ids=frozenset({EOS}), max_length=limit))


def odds(*chances: tuple[int, float]) -> SampledTokens:
    return SampledTokens(tuple(token for token, _ in chances), tuple(math.log(chance) for _, chance in chances))


@pytest.mark.parametrize("width", [2, 3, 4])
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
@pytest.mark.parametrize("max_tokens", [1, 4, 12])
def test_it_finds_what_the_plain_search_finds(width: int, prompt: list[int], max_tokens: int) -> None:
    sim = Simulation()
    sim.add("a", prompt, beam_width=width, max_tokens=max_tokens)
    sim.finish()
    expected = plain_beam_search(prompt, width, len(prompt) + max_tokens)
    ending = sim.endings["a", 0]
    assert list(ending.token_ids) == expected
    assert sim.completions == {}, "nothing is streamed before the search is over"
    assert ending.num_completion_tokens == len(expected) + (ending.reason == "stop")


def test_a_search_that_loses_its_memory_begins_again_and_finds_the_same() -> None:
    sim = Simulation(capacity=80, page=2, limits=EngineLimits(80, 6, 64))
    sim.add("old", [3] * 30, max_tokens=30, ignore_eos=True)
    sim.add("search", PROMPTS[2], beam_width=3, max_tokens=9, ignore_eos=True)
    sim.finish()
    assert sum(batch.preempted for batch in sim.runner.batches) >= 1
    expected = plain_beam_search(PROMPTS[2], 3, 39, eos=None)
    assert list(sim.endings["search", 0].token_ids) == expected


def test_beams_share_their_prompt() -> None:
    sim = Simulation()
    sim.add("a", [1] * 40, beam_width=4, max_tokens=8, ignore_eos=True)
    for _ in range(6):
        sim.step()
    assert sim.pool.used_tokens < 40 + 5 * 8
    assert sim.runner.computed_tokens == 40 + 5 * 4


def test_log_probabilities_come_with_the_best_completion_where_asked_for() -> None:
    sim = Simulation()
    sim.add("a", [1, 2, 3], beam_width=2, max_tokens=5, logprobs=2, ignore_eos=True)
    sim.finish()
    ending = sim.endings["a", 0]
    assert [entry.token_id for entry in ending.logprobs] == list(ending.token_ids)
    for at, entry in enumerate(ending.logprobs):
        known = log_probabilities(fingerprints([1, 2, 3, *ending.token_ids[:at]])[-1])
        assert entry.logprob == known[entry.token_id]
        assert [logprob for _, logprob in entry.top] == sorted(known, reverse=True)[:2]


def test_an_abort_frees_all_beams() -> None:
    sim = Simulation()
    sim.add("a", [1] * 20, beam_width=3, ignore_eos=True)
    for _ in range(5):
        sim.step()
    sim.hear(sim.scheduler.abort(Abort("a", "timeout")))
    assert sim.endings["a", 0].reason == "timeout"
    assert sim.pool.in_use_tokens() == 0 and not sim.engine.has_work


def test_a_stop_token_above_the_last_survivor_becomes_a_hypothesis() -> None:
    search = group(2)
    chosen = search.select([(search.root, odds((5, 0.5), (EOS, 0.3), (6, 0.15), (7, 0.05)))])
    assert [one.token.token_id for one in chosen] == [5, 6]
    assert [(one.token_ids, one.stop_token_id) for one in search.finished] == [((), EOS)]


def test_a_stop_token_below_the_last_survivor_is_forgotten() -> None:
    search = group(2)
    search.select([(search.root, odds((5, 0.5), (6, 0.3), (EOS, 0.2)))])
    assert search.finished == []


def test_it_is_over_when_enough_have_ended_and_no_active_beam_is_better() -> None:
    search = group(2)
    search.root.stop_ids = frozenset({EOS, 9})
    assert search.select([(search.root, odds((EOS, 0.5), (9, 0.3), (5, 0.15), (6, 0.05)))]) == []
    assert search.best()[0].score == math.log(0.5)


def test_the_mean_counts_not_the_sum() -> None:
    search = group(2, limit=4)
    first, second = search.select([(search.root, odds((5, 0.4), (EOS, 0.3), (6, 0.2)))])
    beams = [first.child(), second.child()]
    search.beams = beams
    assert search.select([(beams[0], odds((7, 0.9), (8, 0.1))), (beams[1], odds((7, 0.1), (8, 0.1)))]) == []
    assert search.best()[0].token_ids == (5, 7), "0.4 × 0.9 over two tokens beats 0.3 over one"
    assert search.best()[0].reason == "length"
