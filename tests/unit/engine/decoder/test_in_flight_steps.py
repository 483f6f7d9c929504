"""Steps launched while another is in flight: when this is allowed, and the effect of sequences that end meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count

import pytest

from app.engine.scheduler.batch import Batch, InFlightStep, SampledTokens
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits
from app.errors import ServiceStopping
from app.messages import Abort
from engine_simulation import DeviceBroke, Simulation, oracular, plain_completion

PROMPTS = {"a": [1] * 20, "b": [2] * 20, "c": [3] * 20}


def decoding(*names: str, steps: int = 1, **params: object) -> Simulation:
    """All of these decode, and the last of the steps was launched ahead where there were two or more."""
    sim = Simulation().flying()
    for name in names:
        sim.add(name, PROMPTS[name], **{"seed": 1, "ignore_eos": True, **params})
    for _ in range(1 + steps):
        sim.step()
    return sim


def seed_that_stops(prompt: list[int], after: int) -> int:
    return next(seed for seed in count() if len(plain_completion(prompt, seed, len(prompt) + 50)) == after)


def names_of(batch: Batch | None) -> list[str]:
    return [] if batch is None else [span.sequence.request_id for span in batch.spans]


def flight_of(sim: Simulation) -> Batch | None:
    return None if sim.engine._launched_ahead is None else sim.engine._launched_ahead.batch


def test_the_next_step_is_launched_before_this_one_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    sim, deeds = Simulation().flying(), []
    launch, wait = sim.runner.launch, sim.runner.wait

    def launching(batch: Batch, after: InFlightStep | None = None) -> InFlightStep:
        deeds.append(f"launch {batch.spans[0].end}")
        return launch(batch, after)

    def waiting(flight: InFlightStep) -> list[SampledTokens]:
        deeds.append(f"wait {flight.batch.spans[0].end}")
        return wait(flight)

    monkeypatch.setattr(sim.runner, "launch", launching)
    monkeypatch.setattr(sim.runner, "wait", waiting)
    sim.add("a", PROMPTS["a"], max_tokens=5, ignore_eos=True, seed=1)
    sim.finish()
    prompt, steps = ["launch 20", "wait 20"], ["launch 21", "launch 22", "wait 21", "launch 23", "wait 22"]
    assert deeds == [*prompt, *steps, "launch 24", "wait 23", "wait 24"], (
        "the last token is known to be the last: no void step"
    )
    assert sim.completions["a", 0] == plain_completion(PROMPTS["a"], 1, 25, None)


def test_each_reports_its_own_tokens_and_no_more_steps_are_made_than_without() -> None:
    flying, plain = decoding("a", "b", "c", max_tokens=9), Simulation()
    for name, prompt in PROMPTS.items():
        plain.add(name, prompt, seed=1, ignore_eos=True, max_tokens=9)
    flying.finish()
    plain.finish()
    assert flying.completions == plain.completions
    assert len(flying.runner.batches) == len(flying.runner.wait_measured) == len(plain.runner.batches)


def test_who_ends_unforeseen_has_a_finished_row_once() -> None:
    sim, seed = Simulation().flying(), seed_that_stops(PROMPTS["a"], 3)
    sim.add("a", PROMPTS["a"], seed=seed)
    sim.add("b", PROMPTS["b"], seed=1, ignore_eos=True, max_tokens=8)
    counted = 0
    while ("a", 0) not in sim.endings:
        sim.step()
        counted += sim.engine.stats.decode_tokens  # type: ignore[union-attr]
    under_way = flight_of(sim)
    assert names_of(under_way) == ["a", "b"] and under_way is not None and names_of(under_way.active()) == ["b"]
    sim.step()
    stats = sim.engine.stats
    assert stats is not None and (stats.num_sequences, stats.decode_tokens, stats.context_tokens) == (1, 1, 24)
    assert names_of(flight_of(sim)) == ["b"], "gone from the step after"
    sim.finish()
    assert sim.completions["a", 0] == plain_completion(PROMPTS["a"], seed, 200) and len(sim.completions["b", 0]) == 8
    assert counted == 3 + 3, (
        "b's three and a's with its stop token, but for the first of each, which the prompt's step made"
    )


def test_when_the_last_one_ends_its_finished_row_is_not_waited_for() -> None:
    sim, seed = Simulation().flying(), seed_that_stops(PROMPTS["a"], 3)
    sim.add("a", PROMPTS["a"], seed=seed)
    sim.finish()
    assert flight_of(sim) is None and len(sim.runner.batches) == len(sim.runner.wait_measured) + 1
    sim.add("b", [*PROMPTS["a"], 5], seed=1, ignore_eos=True, max_tokens=4)
    sim.finish()
    assert sim.completions["b", 0] == plain_completion([*PROMPTS["a"], 5], 1, 25, None)


def test_who_reaches_a_limit_is_not_in_the_next_step() -> None:
    sim = Simulation().flying()
    for name, most in (("a", 3), ("b", 6)):
        sim.add(name, PROMPTS[name], max_tokens=most, ignore_eos=True)
    ahead = [names_of(flight_of(sim)) for _ in range(6) if sim.step()]
    assert ahead == [[], ["a", "b"], ["b"], ["b"], ["b"], []]


def in_a_full_house(sim: Simulation) -> None:
    for name in "defg":
        sim.add(name, [ord(name)] * 20, max_tokens=50, ignore_eos=True)


def lacking_memory(sim: Simulation) -> None:
    sim.pool.capacity_tokens = sim.pool.used_tokens + 10
    sim.add("d", [4] * 30)


@pytest.mark.parametrize("arrange", [in_a_full_house, lacking_memory])
def test_those_who_could_not_be_admitted_hold_nobody_up(arrange: Callable[[Simulation], None]) -> None:
    sim = decoding("a")
    arrange(sim)
    for _ in range(4):
        sim.step()
    assert sim.scheduler.queues.waiting and flight_of(sim) is not None


def test_who_could_be_admitted_is_not_kept_waiting() -> None:
    sim = decoding("a")
    sim.add("b", PROMPTS["b"])
    assert names_of(sim.step()) == ["a"] and flight_of(sim) is None, (
        "the step that was launched already, and none on top"
    )
    assert names_of(sim.step()) == ["a", "b"]


def test_a_place_that_is_known_to_come_free_is_waited_for() -> None:
    sim = Simulation(limits=EngineLimits(200, 2, 64)).flying()
    for name, most in (("a", 4), ("b", 50), ("c", 50)):
        sim.add(name, PROMPTS[name], max_tokens=most, ignore_eos=True)
    ahead = [names_of(flight_of(sim)) for _ in range(4) if sim.step()]
    assert ahead == [[], ["a", "b"], ["a", "b"], []], "c is admitted in the fifth"
    assert names_of(sim.step()) == ["b", "c"]


@pytest.mark.parametrize("params", [{"beam_width": 2}, {"n": 2}], ids=str)
def test_beams_are_not_followed_and_choices_are(params: dict[str, int]) -> None:
    sim = decoding("a", steps=3, max_tokens=20, **params)
    assert (flight_of(sim) is None) == ("beam_width" in params)


def test_a_prompt_that_is_read_in_parts_is_not_passed_over() -> None:
    sim = Simulation().flying()
    sim.add("a", PROMPTS["a"], ignore_eos=True)
    sim.step()
    sim.add("b", [2] * 150, max_tokens=1)
    while ("b", 0) not in sim.endings:
        sim.step()
        assert flight_of(sim) is None
    sim.step()
    assert flight_of(sim) is not None


def test_who_reads_a_prompt_outside_this_step_is_not_passed_over_either() -> None:
    sim = Simulation(pace=PrefillBudget(64)).flying()  # it knows no decode step yet: the first one is measured alone
    sim.add("a", PROMPTS["a"], ignore_eos=True)
    sim.add("b", [2] * 150, ignore_eos=True)
    assert names_of(sim.step()) == ["a", "b"]
    assert names_of(sim.step()) == ["a"] and flight_of(sim) is None
    assert names_of(sim.step()) == ["a", "b"]


def test_draft_tokens_and_steps_ahead_exclude_each_other() -> None:
    sim = decoding("a")
    sim.scheduler.speculation = oracular(1.0)
    sim.step()
    assert flight_of(sim) is None


def test_nobody_is_preempted_for_a_step_ahead() -> None:
    sim = Simulation(capacity=60, limits=EngineLimits(60, 4, 64)).flying()
    for name in ("a", "b"):
        sim.add(name, PROMPTS[name], max_tokens=25, ignore_eos=True)
    while not any(batch.preempted for batch in sim.runner.batches):
        sim.step()
    index = next(index for index, batch in enumerate(sim.runner.batches) if batch.preempted)
    before, tight = sim.runner.batches[index - 1 : index + 1]
    assert not tight.ahead and names_of(tight) == ["a"]
    assert names_of(before) == ["a", "b"] and sum(span.end for span in before.spans) == 60, "as long as there was room"
    sim.finish()
    assert [len(said) for said in sim.completions.values()] == [25, 25]


def test_an_abort_leaves_a_finished_row_and_the_last_one_no_in_flight_step() -> None:
    sim = decoding("a", "b", steps=2)
    sim.hear(sim.engine.abort(Abort("a")))
    under_way = flight_of(sim)
    assert names_of(under_way) == ["a", "b"]
    told = len(sim.completions["a", 0])
    sim.step()
    assert len(sim.completions["a", 0]) == told and sim.engine.has_work
    sim.hear(sim.engine.abort(Abort("b")))
    assert flight_of(sim) is None and not sim.engine.has_work and sim.pool.in_use_tokens() == 0
    assert sim.step() is None


def test_what_an_aborted_one_left_is_used_by_the_next_although_its_finished_row_still_wrote() -> None:
    sim = decoding("a", steps=5)
    said = sim.completions["a", 0]
    sim.hear(sim.engine.abort(Abort("a")))
    sim.add("a2", [*PROMPTS["a"], *said, 9], seed=3, ignore_eos=True, max_tokens=4)
    sim.finish()
    assert sim.runner.batches[-4].cached_tokens == 20 + len(said) - 1
    assert sim.completions["a2", 0] == plain_completion([*PROMPTS["a"], *said, 9], 3, 20 + len(said) + 5, None)


@pytest.mark.parametrize("late", [False, True])
def test_a_break_ends_those_who_live_in_the_step_and_nobody_twice(late: bool) -> None:
    """Launching the step ahead breaks, or waiting for this one; a's end was told before, and its row is void."""
    sim = decoding("a", "b", steps=2)
    sim.hear(sim.engine.abort(Abort("a")))
    sim.runner.broken, sim.runner.broken_late = not late, late
    sim.step()
    sim.runner.broken = sim.runner.broken_late = False
    assert set(sim.failures) == {"b"} and flight_of(sim) is None
    sim.add("c", PROMPTS["c"], max_tokens=2, ignore_eos=True)
    sim.finish()
    assert len(sim.completions["c", 0]) == 2


def test_when_all_is_over_nothing_is_under_way() -> None:
    sim = decoding("a", "b", steps=2)
    sim.hear(sim.engine.fail_all(ServiceStopping("over")))
    assert set(sim.failures) == {"a", "b"} and flight_of(sim) is None and not sim.engine.has_work


def test_a_check_drops_what_is_under_way_and_nothing_is_lost() -> None:
    sim = decoding("a", "b", steps=2, max_tokens=9)
    sim.engine.check()
    assert flight_of(sim) is None
    sim.runner.broken_late = True
    with pytest.raises(DeviceBroke):
        sim.engine.check()
    sim.runner.broken_late = False
    sim.finish()
    assert all(said == plain_completion(PROMPTS[name], 1, 29, None) for (name, _), said in sim.completions.items())


def test_a_followed_step_takes_its_time_from_the_one_before_it() -> None:
    """Until then the device was busy with another: no second is counted twice, and none is left out."""
    sim, now = Simulation().flying(), [0.0]
    sim.engine._clock = lambda: now[0]
    wait = sim.runner.wait

    def slow(flight: InFlightStep) -> list[SampledTokens]:
        now[0] += 1.0
        return wait(flight)

    sim.runner.wait = slow  # type: ignore[method-assign]
    sim.add("a", PROMPTS["a"], max_tokens=4, ignore_eos=True)
    seconds = []
    while sim.engine.has_work:
        sim.step()
        now[0] += 0.25  # clients are told
        assert sim.engine.stats is not None
        seconds.append(sim.engine.stats.seconds)
    assert seconds == [1.0, 1.0, 1.25, 1.25], (
        "while clients are told the device is idle before a step that was not launched ahead"
    )
