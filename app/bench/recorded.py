"""What running steps again natively brings: decode eager and recorded, in the plan's precision and in FP32, by turns in one run.

FP32 is torch's own products, of which nothing can be recorded: it has no second row.
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
    """One engine, and how its steps are made."""

    precision: str
    how: str
    driver: Driver
    replay: Replay
    seconds: dict[int, list[float]] = field(default_factory=lambda: {rows: [] for rows in ROWS})

    def measure(self, rows: int) -> None:
        """The first steps of a round are not counted: what another engine pushed out of the caches comes back."""
        self.replay.reason = SWITCHED_OFF if self.how == EAGER else ""
        self.driver.decode(rows, STEPS_PER_ROUND // 8)
        self.seconds[rows] += self.driver.decode(rows, STEPS_PER_ROUND)


def measure(checkpoint: Checkpoint, plan: ServingPlan, facts: Facts, settings: Settings, rounds: int) -> Outcome:
    """Builds both engines as serving does. Ctrl-C keeps what is measured."""
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
    """Nothing where the machine has no room for it."""
    changed = settings.model_copy(update={"precision": "fp32", "kv_precision": "auto", "int8_copy": "off"})
    try:
        return {"fp32": make_plan(facts, None, changed, checkpoint.needs(), RECIPES.keys())}
    except (NoRecipe, PlanImpossible):
        return {}


def _ways(precision: str, checkpoint: Checkpoint, plan: ServingPlan) -> list[Way]:
    built = build_engine(checkpoint, plan, (), lambda stage: None)
    built.engine.scheduler.speculation = None  # a step of so many rows is to make so many tokens
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
    """Each is held against the last: FP32, where there is room for it."""
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
