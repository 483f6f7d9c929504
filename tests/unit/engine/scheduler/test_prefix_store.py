"""Prefixes that are read from a store in place of being computed: contents, completions and counts stay right."""

from __future__ import annotations

import random

import pytest

from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits
from app.messages import Abort
from engine_simulation import Simulation, plain_completion
from hypothesis_examples import examples
from kept_prefixes import BLOCK, KeptPrefixes

FAMILIES = [[1, 2, 3, 4] * 20, [1, 2, 3, 4] * 6 + [5] * 60, [6] * 80]


def with_store(chance: float = 0.0, capacity: int = 400, num_slots: int = 9) -> tuple[Simulation, KeptPrefixes]:
    limits = EngineLimits(max_model_len=90, max_running_seqs=4, max_batch_tokens=16)
    sim = Simulation(num_slots, capacity, 1, limits, PrefillBudget(16))
    store = KeptPrefixes(sim.runner, chance)
    sim.scheduler.prefix_store = store
    read = store.read

    def read_after_moves(sequence: Sequence, max_seconds: float) -> tuple[int, bool]:
        """A slot that is read into may be the source of a copy that was planned before, or have pages to give back."""
        assert not sim.scheduler._allocator._copies and not sim.pool._shrunk
        return read(sequence, max_seconds)

    store.read = read_after_moves  # type: ignore[method-assign]
    return sim, store


def forget_memory(sim: Simulation) -> None:
    """Evict everything that is cached."""
    sim.pool._evict(sim.pool.capacity_tokens)
    assert not any(slot.num_tokens for slot in sim.pool.slots)


def test_what_memory_no_longer_has_is_read() -> None:
    sim, store = with_store()
    sim.add("first", FAMILIES[0][:50], max_tokens=2, seed=1)
    sim.finish()
    sim.engine.save_prefixes(lambda: False)
    forget_memory(sim)
    computed = sim.runner.computed_tokens
    sim.add("again", FAMILIES[0][:50], max_tokens=2, seed=1)
    sim.finish()
    assert store.num_read == 48 and sim.runner.computed_tokens - computed < 50 - 48 + 3
    assert sim.endings["again", 0].timings.cached_tokens == 48
    assert sim.completions.get(("again", 0)) == sim.completions.get(("first", 0))


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_read_that_takes_several_steps_counts_once_and_entirely(chance: float) -> None:
    sim, store = with_store(chance)
    sim.add("first", FAMILIES[0][:64], max_tokens=1, seed=1)
    sim.finish()
    sim.engine.save_prefixes(lambda: False)
    forget_memory(sim)
    sim.add("again", FAMILIES[0][:64], max_tokens=1, seed=1)
    steps = cached = 0
    while sim.engine.has_work:
        sim.step()
        assert sim.engine.stats is not None
        steps, cached = steps + 1, cached + sim.engine.stats.cached_tokens
    assert cached == sim.endings["again", 0].timings.cached_tokens == store.num_read
    assert (steps, cached) == ((1, 63) if chance == 0.0 else (8, 64 - 8))  # each step computes one token


@pytest.mark.parametrize("seed", range(examples(80)))
def test_any_run_with_a_store_says_what_the_plain_loop_says(seed: int) -> None:
    dice = random.Random(seed)
    sim, store = with_store(dice.choice([0.0, 0.5]), dice.choice([100, 150, 400]), dice.choice([4, 6, 9]))
    asked: dict[str, tuple[list[int], int]] = {}
    for number in range(40):
        prompt = dice.choice(FAMILIES)[: dice.randint(1, 60)] + [dice.randint(1, 6) for _ in range(dice.randint(0, 9))]
        name = f"r{number}"
        asked[name] = prompt, dice.randint(0, 3)
        sim.add(name, prompt, max_tokens=12, seed=asked[name][1])
        for _ in range(dice.randint(0, 8)):
            sim.step()
        if dice.random() < 0.1:
            sim.hear(sim.engine.abort(Abort(name)))
        if dice.random() < 0.4:
            sim.engine.save_prefixes(lambda: False)
    sim.finish()
    assert not sim.failures and store.num_read > BLOCK
    for name, (prompt, own_seed) in asked.items():
        expected = plain_completion(prompt, own_seed, len(prompt) + 12)
        said = sim.completions.get((name, 0), [])
        assert said == expected or (sim.endings[name, 0].reason == "aborted" and said == expected[: len(said)])
