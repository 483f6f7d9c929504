"""Decode with eager and recorded steps, in the plan's precision and in FP32, alternating in one run.

FP32 uses torch's own products, which cannot be recorded, so FP32 has only an eager row.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from app.bench.console import Advance, progress
from app.bench.driver import Driver
from app.bench.stats import Figure, Outcome, percentile
from app.bench.workload import Deck
from app.engine.build import build_engine
from app.engine.replay import Replay
from app.errors import NoRecipe, PlanImpossible
from app.hardware.facts import Facts
from app.hardware.plan import ServingPlan, make_plan
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.recipes import RECIPES

ROWS = (1, 8)
STEPS_PER_ROUND = 40
EAGER, RECORDED = "eager", "recorded"
SWITCHED_OFF = "switched off by this bench"


@dataclass(slots=True)
class Way:
    """One engine, and its mode: eager or recorded steps."""

    precision: str
    how: str
    driver: Driver
    replay: Replay
    seconds: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})

    def measure(self, rows: int) -> None:
        """Time one round of decode steps with `rows` sequences.

        The first steps of a round are not counted: they reload what another engine evicted from the processor
        caches.
        """
        self.replay.reason = SWITCHED_OFF if self.how == EAGER else ""
        self.driver.decode(rows, STEPS_PER_ROUND // 8)
        self.seconds[rows] += self.driver.decode(rows, STEPS_PER_ROUND)


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, settings: Settings, rounds: int) -> Outcome:
    """Build both engines as for serving and measure them. Ctrl-C keeps the measurements so far."""
    plans = {plan.precision.value: plan, **_in_fp32(checkpoint, facts, settings)}
    complete, ways = True, []
    with progress(rounds * len(ROWS), "loading") as advance, torch.inference_mode():
        for precision, own in plans.items():
            ways += _ways(precision, checkpoint, own)
        try:
            _rounds(rounds, ways, advance)
        except KeyboardInterrupt:
            complete = False
    details = {"machine": facts.to_json(), "plan": plan.to_json(), "torch": torch.__version__}
    subject = f"{checkpoint.name}, {plan.threads.value} threads"
    return Outcome("eager", subject, tuple(_figures(ways)), details, complete)


def _in_fp32(checkpoint: Checkpoint, facts: Facts, settings: Settings) -> dict[str, ServingPlan]:
    """Return the FP32 plan, or nothing if the machine lacks the memory for it."""
    changed = settings.model_copy(update={"precision": "fp32", "kv_precision": "auto", "int8_copy": "off"})
    try:
        return {"fp32": make_plan(facts, None, changed, checkpoint.needs(), RECIPES.keys())}
    except (NoRecipe, PlanImpossible):
        return {}


def _ways(precision: str, checkpoint: Checkpoint, plan: ServingPlan) -> list[Way]:
    built = build_engine(checkpoint, plan, (), lambda stage: None)
    built.engine.scheduler.speculation = None  # a step must produce exactly one token per row
    replay = built.runner.model
    assert isinstance(replay, Replay), "decoders are built with one"
    driver = Driver(built.engine, Deck(range(2, checkpoint.decoder.vocab_size)), plan.max_model_len.value)
    kinds = (EAGER,) if precision == "fp32" or replay.reason else (EAGER, RECORDED)
    return [Way(precision, how, driver, replay) for how in kinds]


def _rounds(rounds: int, ways: list[Way], advance: Advance) -> None:
    for _ in range(rounds):
        for rows in ROWS:
            for way in ways:
                way.measure(rows)
            advance(f"decode ×{rows}")


def _figures(ways: list[Way]) -> Iterator[Figure]:
    """Yield the figures; each is compared with the last engine, which is FP32 if it fits in memory."""
    for rows in ROWS:
        last = statistics.median(ways[-1].seconds[rows] or [0.0])
        for way in ways:
            if seconds := way.seconds[rows]:
                middle = statistics.median(seconds)
                yield Figure(
                    f"decode ×{rows}, {way.precision}, {way.how}",
                    middle * 1e3,
                    "ms",
                    p99=percentile(seconds, 0.99) * 1e3,
                    ratio=last / middle,
                    against=f"{ways[-1].precision}, {ways[-1].how}",
                    parts={"tok/s": rows / middle},
                )
