"""Steps that run out of memory are tried again in smaller parts; clients see an error only for the smallest."""

from __future__ import annotations

import logging

import pytest

from app.engine.scheduler.batch import Batch, ScheduledSpan, make_sequence
from app.engine.scheduler.policy import TokenBudget
from app.engine.scheduler.scheduler import EngineLimits
from app.errors import StepFailed
from app.messages import Generate, SamplingParams
from engine_simulation import MemoryWanting, Simulation, plain_beam_search, plain_completion

WIDE = EngineLimits(max_model_len=200, max_running_seqs=16, max_batch_tokens=128)


def served(sim: Simulation, names: str, **params: object) -> None:
    for name in names:
        sim.add(name, [ord(name)] * 20, **{"seed": 1, "ignore_eos": True, "max_tokens": 8, **params})


def all_said_theirs(sim: Simulation) -> bool:
    return not sim.failures and all(
        said == plain_completion([ord(name)] * 20, 1, 28, None) for (name, _), said in sim.completions.items()
    )


@pytest.mark.parametrize("flying", [0.0, 1.0])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("most", [1, 3, 7, 30])
def test_a_step_that_is_too_large_is_made_in_parts(most: int, late: bool, flying: float) -> None:
    sim = Simulation(num_slots=16, limits=WIDE).flying(flying)
    sim.runner.most_tokens, sim.runner.wants_late = most, late
    served(sim, "abcdef")
    sim.finish()
    assert len(sim.completions) == 6 and all_said_theirs(sim)
    assert all(batch.num_tokens <= most for batch in sim.runner.wait_measured)
    assert sim.pool.in_use_tokens() == 0


@pytest.mark.parametrize("late", [False, True])
def test_memory_that_runs_out_while_a_step_is_ahead_costs_nobody_anything(late: bool) -> None:
    sim = Simulation(num_slots=16, limits=WIDE).flying()
    served(sim, "abcd")
    for _ in range(3):
        sim.step()
    assert sim.engine._launched_ahead is not None
    sim.runner.most_tokens, sim.runner.wants_late = 2, late
    waited = len(sim.runner.wait_measured)
    sim.step()
    sim.runner.most_tokens = None
    assert sim.scheduler._token_budget.tokens < 16 and sim.engine._launched_ahead is None
    this = sim.runner.wait_measured[waited:]
    assert [len(batch.spans) for batch in this] == ([2] if late else [4]), (
        "what is under way is not lost for want of the next one"
    )
    sim.finish()
    assert all_said_theirs(sim) and len(sim.completions) == 4


def test_only_the_smallest_step_fails_and_ends_its_request_alone() -> None:
    sim = Simulation(num_slots=16, limits=WIDE).flying()
    served(sim, "abc")
    sim.step()
    sim.runner.most_tokens = 0
    sim.step()
    sim.runner.most_tokens = None
    assert set(sim.failures) == {"a"} and isinstance(sim.failures["a"].error, StepFailed)
    sim.finish()
    assert {name for name, _ in sim.endings} == {"b", "c"}


def test_the_beams_of_a_search_are_never_parted() -> None:
    sim = Simulation(num_slots=16, limits=WIDE)
    served(sim, "xy", beam_width=3, max_tokens=6)
    sim.runner.most_tokens = 4
    sim.finish()
    assert not sim.failures
    for name in "xy":
        assert list(sim.endings[name, 0].token_ids) == plain_beam_search([ord(name)] * 20, 3, 26, None)
    served(sim, "z", beam_width=3, max_tokens=6)
    sim.runner.most_tokens = 2
    sim.finish()
    assert set(sim.failures) == {"z"}, "three beams are the smallest step of their search"


def test_draft_tokens_that_were_given_up_keep_no_room() -> None:
    sim = Simulation().with_guesses(1.0)
    served(sim, "a")
    sim.runner.most_tokens = 2
    sim.finish()  # the simulation looks at the accounts
    assert all_said_theirs(sim)


def test_a_fault_that_is_no_want_of_memory_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    sim = Simulation()
    served(sim, "a")
    sim.runner.most_tokens = 1
    monkeypatch.setattr(sim.runner, "survives", lambda error: False)
    with pytest.raises(MemoryWanting):
        sim.engine.step()
    assert len(sim.runner.batches) == 1


def test_it_is_logged_once_for_each_size(caplog: pytest.LogCaptureFixture) -> None:
    sim = Simulation(num_slots=16, limits=WIDE)
    sim.runner.most_tokens = 30
    with caplog.at_level(logging.WARNING):
        served(sim, "abcdef")
        sim.finish()
    assert [record.args for record in caplog.records] == [(120,), (60,), (31,)]
    assert sum(batch.num_tokens > 30 for batch in sim.runner.batches) > 2, "and tried more often"


def test_what_was_too_much_is_tried_again_later_and_not_at_once() -> None:
    allowance = TokenBudget(512)
    sequence = make_sequence(Generate("a", (1,) * 600, SamplingParams(), 0.0))
    assert allowance.shrink(Batch((ScheduledSpan(sequence, 0, 400, 0, None, 0, False),)))
    assert allowance.tokens == 200
    steps = 0
    while allowance.tokens < 400:
        allowance.grow()
        steps += 1
    assert 30 < steps < 60
    for _ in range(100):
        allowance.grow()
    assert allowance.tokens == 512, "and never more than planned"


@pytest.mark.parametrize("tokens", [2, 3, 100])
def test_it_ends_at_a_single_token(tokens: int) -> None:
    allowance = TokenBudget(512)
    sequence = make_sequence(Generate("a", (1,) * 600, SamplingParams(), 0.0))
    tries = 0
    while allowance.shrink(Batch((ScheduledSpan(sequence, 0, min(tokens, allowance.tokens), 0, None, 0, False),))):
        tries += 1
    assert allowance.tokens == 1 and tries == tokens.bit_length() - 1
