"""The scheduler step by step: order, budgets, shared prompts, choices, preemption, endings and refusals."""

from __future__ import annotations

import pytest

from app.engine.scheduler.batch import Batch, resolve_seed
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits
from app.errors import ContextLengthExceeded, InvalidRequest, StepFailed
from app.messages import Abort, Generate, PromptVectors, SamplingParams, TokensReady
from app.metrics.steps import StepStats
from engine_simulation import EOS, Simulation, drawn, fingerprints, plain_completion


def shape(batch: Batch | None) -> list[tuple[str, int]]:
    """A batch as request and number of tokens."""
    assert batch is not None
    return [(span.sequence.request_id, span.num_tokens) for span in batch.spans]


def seed_that(continues: bool, token_ids: list[int]) -> int:
    return next(seed for seed in range(1000) if (drawn(fingerprints(token_ids)[-1], seed) != EOS) == continues)


def limited(max_model_len: int = 200, running: int = 4, batch_tokens: int = 64) -> EngineLimits:
    return EngineLimits(max_model_len, running, batch_tokens)


def test_decodes_come_first_then_running_prefill_then_new_requests() -> None:
    sim = Simulation(limits=limited(batch_tokens=40))
    sim.add("a", [1] * 5, ignore_eos=True)
    sim.step()
    sim.add("b", [2] * 70, ignore_eos=True)
    assert shape(sim.step()) == [("a", 1), ("b", 39)]
    sim.add("c", [3] * 8)
    assert shape(sim.step()) == [("a", 1), ("b", 31), ("c", 8)]


def test_a_short_prompt_shares_the_steps_of_a_long_one() -> None:
    sim = Simulation(limits=limited(batch_tokens=20))
    sim.add("long", [1] * 150, max_tokens=1)
    sim.step()
    sim.add("longer", [2] * 160, max_tokens=1)
    sim.add("short", [3] * 14, max_tokens=2, ignore_eos=True)
    sim.add("shortest", [4] * 4, max_tokens=2, ignore_eos=True)
    assert shape(sim.step()) == [("short", 10), ("long", 10)]
    assert shape(sim.step()) == [("short", 4), ("shortest", 4), ("long", 12)]
    assert shape(sim.step()) == [("short", 1), ("shortest", 1), ("long", 18)]
    assert shape(sim.step()) == [("long", 20)], "one as long waits until the older one is computed"
    sim.finish()
    assert len(sim.endings) == 4


def test_a_block_is_computed_in_one_step() -> None:
    sim = Simulation(limits=limited(batch_tokens=20))

    def add(request_id: str, length: int, *blocks: tuple[int, int]) -> None:
        vectors = tuple(PromptVectors(start, end - start, b"", block=(start, end)) for start, end in blocks)
        sampling = SamplingParams(max_tokens=1)
        token_ids = (len(request_id),) * length
        sim.hear(sim.engine.add(Generate(request_id, token_ids, sampling, 0.0, vectors=vectors)))

    add("two", 70, (6, 16), (18, 50))
    assert shape(sim.step()) == [("two", 18)], "up to the second block"
    assert shape(sim.step()) == [("two", 32)], "all of it, although a step has 20 tokens"
    assert shape(sim.step()) == [("two", 20)]
    add("first", 30, (0, 30))
    add("second", 30, (2, 30))
    assert shape(sim.step()) == [("first", 30)]
    sim.finish()
    assert len(sim.endings) == 3


def test_a_long_prompt_advances_by_half_a_step_however_many_short_ones_come() -> None:
    sim = Simulation(limits=limited(batch_tokens=20, running=3))
    sim.add("long", [1] * 150, max_tokens=1)
    sim.step()
    for step in range(13):
        sim.add(f"short{step}", [2 + step % 5] * 9 + [step % 7], max_tokens=1)
        assert dict(shape(sim.step())).get("long", 0) >= (0 if ("long", 0) in sim.endings else 10)
    assert ("long", 0) in sim.endings
    sim.finish()
    assert not sim.failures


def test_no_short_prompt_takes_the_place_that_an_older_one_lacks() -> None:
    sim = Simulation(capacity=300, limits=limited(batch_tokens=20))
    sim.add("long", [1] * 150, max_tokens=1)
    sim.step()
    sim.add("older", [2] * 180, max_tokens=1)
    sim.add("short", [3] * 4, max_tokens=1)
    assert shape(sim.step()) == [("long", 20)]
    sim.finish()
    assert next(iter(sim.endings)) == ("long", 0) and len(sim.endings) == 3


@pytest.mark.parametrize(
    "params", [{}, {"n": 3}, {"beam_width": 2}, {"prompt_logprobs": 1}, {"max_tokens": 1}], ids=str
)
@pytest.mark.parametrize("at_once", [False, True])
def test_a_request_whose_logits_are_not_finite_fails_alone(params: dict[str, int], at_once: bool) -> None:
    sim = Simulation()
    sim.add("well", [1] * 20, max_tokens=12, ignore_eos=True, seed=1)
    if at_once:
        sim.runner.not_finite.add("bad")
    sim.add("bad", [2] * 20, **{"max_tokens": 12, "ignore_eos": True, **params})
    sim.step()
    sim.runner.not_finite.add("bad")
    sim.finish()
    assert sim.completions["well", 0] == plain_completion([1] * 20, resolve_seed(1, 0), 32, None)
    if params == {"max_tokens": 1} and not at_once:
        assert not sim.failures
        return
    assert isinstance(sim.failures["bad"].error, StepFailed) and len(sim.failures) == 1
    assert sim.pool.in_use_tokens() == 0 and not sim.engine.has_work
    sim.runner.not_finite.clear()
    sim.add("again", [2] * 20, max_tokens=1)
    assert sim.step() is not None and sim.runner.batches[-1].cached_tokens == 0, "what it computed is not kept"


def test_a_draft_that_is_not_finite_matters_only_if_its_turn_comes() -> None:
    for chance in (0.0, 1.0):
        sim = Simulation().with_guesses(chance)
        sim.add("well", [1] * 20, max_tokens=20, ignore_eos=True, seed=2)
        sim.add("bad", [2] * 20, max_tokens=20, ignore_eos=True)
        sim.step()
        sim.step()
        sim.runner.not_finite.add("bad")
        sim.finish()
        assert set(sim.failures) == {"bad"}
        assert sim.completions["well", 0] == plain_completion([1] * 20, resolve_seed(2, 0), 40, None)


def test_a_decode_comes_before_the_last_token_of_an_older_prompt() -> None:
    sim = Simulation(limits=limited(batch_tokens=12))
    sim.add("old", [1] * 9, n=2)
    sim.add("young", [2] * 4, ignore_eos=True)
    sim.hear(sim.scheduler.abort(Abort("old", choice=0)))
    sim.scheduler.queues.waiting.sort(
        key=lambda sequence: -sequence.arrival_order
    )  # as if the older had been held for longer
    sim.step()
    assert shape(sim.step()) == [("young", 1), ("old", 1)]


def test_the_budget_knows_how_many_prompts_wait_for_how_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[tuple[int, int]] = []
    sim = Simulation(limits=limited(batch_tokens=40))
    monkeypatch.setattr(
        sim.pace, "max_prefill_tokens", lambda rows, context, first, prompts: heard.append((rows, prompts)) or 8
    )
    sim.add("a", [1] * 4, ignore_eos=True)
    sim.step()
    for name in "bcd":
        sim.add(name, [2] * 20)
    sim.step()
    sim.step()
    assert heard == [(0, 1), (1, 3), (1, 3)], "the one that is being read waits too"


def test_prefill_beside_decodes_keeps_to_the_budget() -> None:
    sim = Simulation(limits=limited(batch_tokens=40), pace=PrefillBudget(40, itl_target_seconds=0.05))
    sim.add("a", [1] * 5, ignore_eos=True)
    sim.step()
    sim.pace.observe(StepStats(seconds=0.03, decode_tokens=1))
    sim.pace.observe(StepStats(seconds=0.04, prefill_tokens=40))
    sim.add("b", [2] * 100)
    assert shape(sim.step()) == [("a", 1), ("b", 16)]


def test_nobody_overtakes_the_oldest_waiting() -> None:
    sim = Simulation(capacity=100, limits=limited(running=4))
    sim.add("a", [1] * 50, ignore_eos=True, max_tokens=20)
    sim.step()
    sim.add("long", [2] * 60, ignore_eos=True, max_tokens=2)
    sim.add("short", [3] * 5, max_tokens=1)
    for _ in range(20):
        sim.step()
        assert ("short", 0) not in sim.endings
        if ("a", 0) in sim.endings:
            break
    sim.finish()
    assert set(sim.endings) == {("a", 0), ("long", 0), ("short", 0)}


def test_running_sequences_are_bounded() -> None:
    sim = Simulation(limits=limited(running=2))
    for name in "abc":
        sim.add(name, [1, 2], max_tokens=3, ignore_eos=True)
    assert len(shape(sim.step())) == 2
    snapshot = sim.scheduler.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.queue) == (2, 1, (2,))


def test_a_shared_prompt_is_not_prefilled_again() -> None:
    sim = Simulation()
    sim.add("a", [1] * 50 + [2], max_tokens=4)
    sim.finish()
    sim.runner.computed_tokens = 0
    sim.add("b", [1] * 50 + [3], max_tokens=1)
    assert shape(sim.step()) == [("b", 1)]
    assert sim.runner.batches[-1].cached_tokens == 50
    assert sim.endings["b", 0].timings.cached_tokens == 50


def test_a_running_prompt_is_shared_without_a_copy() -> None:
    sim = Simulation()
    sim.add("a", [1] * 50 + [2], ignore_eos=True)
    sim.step()
    sim.add("b", [1] * 50 + [3], ignore_eos=True)
    sim.step()
    batch = sim.runner.batches[-1]
    span = next(span for span in batch.spans if span.sequence.request_id == "b")
    assert (span.start, span.prefix_tokens, span.num_tokens, batch.copies) == (50, 50, 1, ())


def test_choices_share_one_prefill_and_differ_by_seed() -> None:
    prompt = [1, 2, 3, 4, 5]
    sim = Simulation()
    sim.add("a", prompt, n=3, seed=11, max_tokens=6, ignore_eos=True)
    assert shape(sim.step()) == [("a", 5)]
    assert shape(sim.step()) == [("a", 1)] * 3
    sim.finish()
    said = {choice: sim.completions["a", choice] for choice in range(3)}
    assert said == {choice: plain_completion(prompt, resolve_seed(11, choice), 11, eos=None) for choice in range(3)}
    assert len({tuple(words) for words in said.values()}) > 1


def test_when_the_first_choice_leaves_the_next_prefills_for_the_others() -> None:
    sim = Simulation(limits=limited(batch_tokens=4))
    sim.add("a", [1] * 10, n=3, max_tokens=2, ignore_eos=True)
    sim.step()
    sim.hear(sim.scheduler.abort(Abort("a", choice=0)))
    sim.finish()
    assert [sim.endings["a", choice].reason for choice in range(3)] == ["aborted", "length", "length"]
    # What the first had computed is too short to be kept; the second computes the prompt, the third finds it.
    assert sim.runner.computed_tokens == 4 + (10 + 1) + (1 + 1)


def test_the_youngest_loses_its_memory_and_says_the_same() -> None:
    sim = Simulation(capacity=60, limits=limited(max_model_len=60))
    sim.add("old", [1] * 20, max_tokens=25, ignore_eos=True, seed=1)
    sim.add("young", [2] * 20, max_tokens=25, ignore_eos=True, seed=2)
    sim.finish()
    assert sum(batch.preempted for batch in sim.runner.batches) >= 1
    assert sim.endings["old", 0].timings.decode_seconds < sim.endings["young", 0].timings.decode_seconds
    for name, token, seed in (("old", 1, 1), ("young", 2, 2)):
        assert sim.completions[name, 0] == plain_completion([token] * 20, seed, 45, eos=None)


def test_a_preempted_sequence_goes_on_from_what_is_left_of_it() -> None:
    sim = Simulation(capacity=64, page=4, limits=limited(max_model_len=64))
    sim.add("old", [1] * 20, max_tokens=14, ignore_eos=True)
    sim.add("young", [2] * 20, max_tokens=14, ignore_eos=True)
    sim.finish()
    assert sum(batch.preempted for batch in sim.runner.batches) == 1
    assert sim.runner.computed_tokens < 2 * 33 + 20, "not all of it was computed twice"


@pytest.mark.parametrize(
    ("params", "expected"),
    [({}, ("stop", EOS)), ({"ignore_eos": True, "max_tokens": 1}, ("length", None))],
)
def test_a_stop_token_ends_it_and_is_not_text(params: dict[str, object], expected: tuple[str, int | None]) -> None:
    sim = Simulation()
    sim.add("a", [1, 2], seed=seed_that(False, [1, 2]), **params)
    sim.finish()
    ending = sim.endings["a", 0]
    assert (ending.reason, ending.stop_token_id) == expected
    assert sim.completions.get(("a", 0), []) == ([] if expected[1] == EOS else [EOS])
    assert ending.num_completion_tokens == 1


def test_stop_token_ids_end_it_too() -> None:
    sim = Simulation()
    seed = seed_that(True, [1, 2])
    token = drawn(fingerprints([1, 2])[-1], seed)
    sim.add("a", [1, 2], seed=seed, stop_token_ids=(token,), ignore_eos=True)
    sim.finish()
    assert sim.endings["a", 0].stop_token_id == token


def test_the_context_ends_it() -> None:
    sim = Simulation(limits=limited(max_model_len=12))
    sim.add("a", [1] * 10, ignore_eos=True)
    sim.finish()
    assert len(sim.completions["a", 0]) == 2 and sim.endings["a", 0].reason == "length"


@pytest.mark.parametrize(
    ("prompt", "params", "error", "words"),
    [
        ([], {}, InvalidRequest, "no tokens"),
        ([1] * 50, {}, ContextLengthExceeded, "50 tokens"),
        ([1], {"beam_width": 5}, InvalidRequest, "at most 4"),
        ([1] * 49, {"beam_width": 2}, ContextLengthExceeded, "does not fit the KV cache"),
    ],
)
def test_what_can_never_be_served_is_refused_at_once(
    prompt: list[int], params: dict[str, object], error: type[InvalidRequest], words: str
) -> None:
    sim = Simulation(capacity=50, limits=limited(max_model_len=80))
    sim.add("a", prompt, **params)
    assert isinstance(sim.failures["a"].error, error) and words in sim.failures["a"].error.message
    assert not sim.engine.has_work


def test_an_abort_ends_one_choice_or_all_and_unknown_ids_are_ignored() -> None:
    sim = Simulation()
    sim.add("a", [1] * 20, n=2, ignore_eos=True)
    sim.step()
    sim.step()
    sim.hear(sim.scheduler.abort(Abort("a", "stop", choice=1)))
    assert sim.endings["a", 1].reason == "stop" and sim.engine.has_work
    sim.hear(sim.scheduler.abort(Abort("a", "timeout")))
    assert sim.endings["a", 0].reason == "timeout" and not sim.engine.has_work
    assert sim.scheduler.abort(Abort("a")) == sim.scheduler.abort(Abort("nobody")) == []


def test_an_aborted_prefill_stays_cached() -> None:
    sim = Simulation(limits=limited(batch_tokens=32))
    sim.add("a", [1] * 60)
    sim.step()
    sim.hear(sim.scheduler.abort(Abort("a")))
    sim.add("b", [1] * 60)
    batch = sim.step()
    assert batch is not None and batch.cached_tokens == 32


def test_times_are_split_where_they_belong_and_come_with_the_first_token() -> None:
    sim = Simulation()
    sim.add("a", [1] * 5, max_tokens=2, ignore_eos=True)
    first = sim.scheduler.update(batch := sim.scheduler.schedule(), sim.runner.run(batch))  # type: ignore[arg-type]
    assert isinstance(first[0], TokensReady) and first[0].timings is not None
    second = sim.scheduler.update(batch := sim.scheduler.schedule(), sim.runner.run(batch))  # type: ignore[arg-type]
    assert isinstance(second[0], TokensReady) and second[0].timings is None
    # The clock ticks by one whenever it is read: at the first schedule, and at each update.
    assert second[1].timings.prefill_seconds == first[0].timings.prefill_seconds == 1.0  # type: ignore[union-attr]
    assert second[1].timings.decode_seconds == 1.0  # type: ignore[union-attr]
