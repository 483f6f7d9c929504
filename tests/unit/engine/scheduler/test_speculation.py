"""When speculation pays off, with how many draft tokens, and the scheduler's state after such a step."""

from __future__ import annotations

import random
from collections.abc import Sequence as Items

import pytest

from app.engine.scheduler.batch import ScheduledSpan, Sequence
from app.engine.scheduler.scheduler import EngineLimits
from app.engine.scheduler.speculation import MAX_PAUSE_STEPS, MAX_SPECULATIVE_ROWS, Speculation
from app.hardware.step_times import StepTimeTable
from app.messages import FIRST_VECTOR_ID, PromptVectors, SamplingParams
from app.metrics.steps import DEFAULT_STEP_TIMES, FORGOTTEN_AFTER, StepStats, StepTimeModel
from engine_simulation import FreeRows, Oracle, Simulation, drawn, fingerprints

COSTLY = StepTimeTable(((1, 1.0), (64, 64.0)), ((1, 1.0),))  # each row takes as long as the first


class Always:
    """Has as many ideas as are wanted."""

    def __init__(self, sequence: Sequence) -> None:
        pass

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        return (7,) * most


def decoding(number: int = 0, limit: int = 1000, **params: object) -> ScheduledSpan:
    sequence = Sequence(f"r{number}", 0, SamplingParams(**params), [1] * 20, 10, max_length=limit)  # type: ignore[arg-type]
    return ScheduledSpan(sequence, 19, 1, number, None, 0, True)


def told(speculation: Speculation, spans: list[ScheduledSpan], steps: int, chance: float, seed: int = 0) -> list[int]:
    """Extra rows of each step, where each guess is right with this chance."""
    dice, extra = random.Random(seed), []
    for _ in range(steps):
        guessed = speculation.add_draft_tokens(spans, 1000, lambda sequence, number: True)
        extra.append(sum(len(span.draft_ids) for span in guessed))
        for span in guessed:
            if span.draft_ids:
                right = 0
                while right < len(span.draft_ids) and dice.random() < chance:
                    right += 1
                speculation.observe_acceptance(span.sequence, len(span.draft_ids), right)
    return extra


def test_the_likelier_a_draft_token_is_right_the_more_are_drafted() -> None:
    few, some, many = (
        told(Speculation(Always, StepTimeModel()), [decoding()], 60, chance)[20:] for chance in (0.3, 0.6, 0.95)
    )
    assert 1.5 < sum(few) / len(few) < sum(some) / len(some) < sum(many) / len(many) <= 7


def test_where_draft_tokens_are_wrong_it_stops_and_tries_again_ever_more_seldom() -> None:
    extra = told(Speculation(Always, StepTimeModel()), [decoding()], 1000, 0.0)
    assert sum(extra[:20]) > 0
    assert 1000 / MAX_PAUSE_STEPS - 5 < sum(extra[20:]) < 1000 / MAX_PAUSE_STEPS + 10
    assert set(extra[20:]) == {0, 1}


def test_after_a_bad_time_it_comes_back() -> None:
    speculation, spans = Speculation(Always, StepTimeModel()), [decoding()]
    told(speculation, spans, 300, 0.0)
    assert sum(told(speculation, spans, 200, 0.9)[100:]) > 300


class Unasked:
    """Is not to be asked."""

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        raise AssertionError("asked in vain, and that costs")


def test_no_draft_token_where_rows_cost_what_they_may_bring() -> None:
    assert sum(told(Speculation(lambda sequence: Unasked(), StepTimeModel(COSTLY)), [decoding()], 200, 1.0)) == 0
    assert sum(told(Speculation(Always, StepTimeModel(COSTLY)), [decoding()], 200, 1.0)) == 0


def test_of_several_sequences_the_one_that_is_drafted_well_gets_the_rows() -> None:
    costs = StepTimeTable(((1, 1.0), (4, 1.02), (6, 1.2), (64, 30.0)), ((1, 1.0),))
    speculation, spans = Speculation(Always, StepTimeModel(costs), 3), [decoding(number) for number in range(2)]
    for _ in range(30):
        for span in speculation.add_draft_tokens(spans, 1000, lambda sequence, number: True):
            if span.draft_ids:
                speculation.observe_acceptance(
                    span.sequence, len(span.draft_ids), len(span.draft_ids) * (span.slot == 0)
                )
    good, bad = speculation.add_draft_tokens(spans, 1000, lambda sequence, number: True)
    assert len(good.draft_ids) > len(bad.draft_ids)


@pytest.mark.parametrize(("most_rows", "expected"), [(1000, MAX_SPECULATIVE_ROWS), (40, 40), (9, 9)])
def test_a_step_has_so_many_rows_and_no_more(most_rows: int, expected: int) -> None:
    spans = [decoding(number) for number in range(9)]
    guessed = Speculation(Always, FreeRows(), 20).add_draft_tokens(spans, most_rows, lambda sequence, number: True)
    assert sum(span.num_tokens for span in guessed) == expected
    assert [span.known_end for span in guessed] == [span.end for span in spans]


def test_no_further_than_the_sequence_may_go() -> None:
    for limit, expected in ((21, 0), (22, 1), (24, 3)):
        (span,) = Speculation(Always, FreeRows()).add_draft_tokens(
            [decoding(limit=limit)], 1000, lambda sequence, number: True
        )
        assert len(span.draft_ids) == expected


def test_no_capacity_no_draft_token() -> None:
    spans = [decoding()]
    assert Speculation(Always, FreeRows()).add_draft_tokens(spans, 1000, lambda sequence, number: False) == spans


def test_beams_and_penalties_are_not_drafted_for() -> None:
    spans = [
        decoding(beam_width=2),
        decoding(1, presence_penalty=0.5),
        decoding(2, repetition_penalty=1.1),
        decoding(3),
    ]
    guessed = Speculation(Always, FreeRows()).add_draft_tokens(spans, 1000, lambda sequence, number: True)
    assert [bool(span.draft_ids) for span in guessed] == [False, False, False, True]


def test_what_is_not_measured_pays_for_few_rows_alone() -> None:
    assert DEFAULT_STEP_TIMES.decode(4) < 1.1 * DEFAULT_STEP_TIMES.decode(1) < DEFAULT_STEP_TIMES.decode(8) / 1.3


def steps(rows: int, seconds: float, count: int) -> list[StepStats]:
    return [StepStats(seconds, decode_tokens=rows, num_decode_sequences=1, draft_tokens=rows - 1) for _ in range(count)]


def test_what_steps_take_is_learned_from_them() -> None:
    """A table that was wrong, a few slow steps at first and one later: what is typical counts."""
    costs = StepTimeModel(DEFAULT_STEP_TIMES)
    for step in [*steps(1, 0.010, 9), *steps(4, 0.050, 3), *steps(4, 0.020, 6), *steps(4, 0.3, 1)]:
        costs.observe(step)
    assert costs.decode(1) == pytest.approx(0.010)
    assert costs.decode(4) == pytest.approx(0.020)
    dearer = 0.020 / DEFAULT_STEP_TIMES.decode(4)  # than the table says, at four rows; at one it is 0.010
    assert costs.decode(2) == pytest.approx((0.010 + (dearer - 0.010) / 3) * DEFAULT_STEP_TIMES.decode(2))
    assert costs.decode(8) == pytest.approx(dearer * DEFAULT_STEP_TIMES.decode(8))


def test_a_step_that_happened_to_be_quick_makes_no_wrong_draft_token_worth_it() -> None:
    model, spans = StepTimeModel(), [decoding()]
    speculation = Speculation(Always, model)
    told(speculation, spans, 100, 0.0)
    for step in [*steps(1, 0.020, 9), *steps(2, 0.010, 9)]:
        model.observe(step)
    assert sum(told(speculation, spans, 200, 0.0)) < 12


def test_a_bad_moment_is_forgotten() -> None:
    """Or rows that were slow once would never be tried again."""
    costs = StepTimeModel(DEFAULT_STEP_TIMES)
    for step in [*steps(1, 0.010, 9), *steps(4, 0.500, 9), *steps(1, 0.010, 2 * FORGOTTEN_AFTER)]:
        costs.observe(step)
    assert costs.decode(4) == pytest.approx(0.010 * DEFAULT_STEP_TIMES.decode(4))


def test_guessing_stops_where_steps_show_that_it_does_not_pay() -> None:
    model, spans = StepTimeModel(), [decoding()]
    speculation = Speculation(Always, model)
    assert sum(told(speculation, spans, 20, 0.5)) > 20
    for rows in range(1, 9):
        for step in steps(rows, 0.001 * rows, 9):
            model.observe(step)
    assert sum(told(speculation, spans, 100, 0.5)) == 0


# ---- in the scheduler ----------------------------------------------------------------------------------------------


def steps_until_done(sim: Simulation, **params: object) -> int:
    sim.add("a", [1, 2, 3], max_tokens=40, ignore_eos=True, seed=3, **params)
    sim.finish()
    return len(sim.runner.batches)


def test_right_draft_tokens_save_steps_and_are_counted() -> None:
    assert steps_until_done(Simulation()) == 40
    sim = Simulation().with_guesses(1.0)
    assert steps_until_done(sim) == 9  # a prompt, then five tokens a step, the last ones within max_tokens
    sim = Simulation().with_guesses(0.5)
    sim.add("a", [1, 2, 3], max_tokens=40, ignore_eos=True, seed=3)
    drafted = accepted = made = 0
    while sim.engine.has_work:
        sim.step()
        stats = sim.engine.stats
        assert stats is not None
        drafted, accepted, made = (
            drafted + stats.draft_tokens,
            accepted + stats.accepted_tokens,
            made + stats.decode_tokens,
        )
        assert stats.prefill_tokens in (0, 3)
    assert 0 < accepted < drafted and made == 39  # the prompt's step made the first


@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_nobody_is_preempted_for_a_draft_token(chance: float) -> None:
    """Two sequences fill the memory to its last page at their very end."""
    sim = Simulation(capacity=40, page=4).with_guesses(chance)
    for name in ("a", "b"):
        sim.add(name, [ord(name)] * 4, max_tokens=16, ignore_eos=True)
    while sim.engine.has_work:
        batch = sim.step()
        assert batch is not None and batch.preempted == 0
    assert all(len(said) == 16 for said in sim.completions.values())


def test_a_stop_token_among_the_draft_tokens_ends_the_sequence_there() -> None:
    def until_stop(sim: Simulation) -> tuple[Items[int], int | None, int]:
        sim.add("a", [1, 2, 3], max_tokens=60, seed=11)
        sim.finish()
        ending = sim.endings["a", 0]
        return sim.completions.get(("a", 0), []), ending.stop_token_id, ending.num_completion_tokens

    plain, guessed = until_stop(Simulation()), until_stop(Simulation().with_guesses(1.0))
    assert plain == guessed and plain[1] is not None and plain[2] == len(plain[0]) + 1


def test_no_draft_tokens_beside_a_prompt_that_is_being_read() -> None:
    sim = Simulation(limits=EngineLimits(max_model_len=200, max_running_seqs=4, max_batch_tokens=16)).with_guesses(1.0)
    sim.add("a", [1, 2, 3], max_tokens=30, ignore_eos=True)
    sim.step()
    sim.add("b", [5] * 100, max_tokens=2, ignore_eos=True)
    while sim.engine.has_work:
        batch = sim.step()
        assert batch is not None and batch.num_tokens <= 16
        reads = any(not span.is_decode for span in batch.spans)
        assert not (reads and any(span.draft_ids for span in batch.spans))


def test_the_oracle_knows() -> None:
    """Or nothing above would mean anything."""
    sequence = Sequence("a", 0, SamplingParams(), [1, 2, 3], 3, seed=5)
    first, *_ = Oracle(sequence, random.Random(0), 1.0).propose([1, 2, 3], 3)
    assert first == drawn(fingerprints([1, 2, 3])[-1], 5)


def test_a_token_of_a_picture_is_never_drafted() -> None:
    class Repeats(Always):
        def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
            return (FIRST_VECTOR_ID + 5,) * most

    plain, pictured = decoding(0), decoding(1)
    pictured.sequence.vectors = (PromptVectors(2, 1, b""),)
    found: dict[int, set[int]] = {0: set(), 1: set()}
    speculation = Speculation(Repeats, StepTimeModel())
    for _ in range(5):
        for span in speculation.add_draft_tokens([plain, pictured], 1000, lambda sequence, number: True):
            found[span.slot] |= set(span.draft_ids)
    assert found == {0: {FIRST_VECTOR_ID + 5}, 1: set()}
