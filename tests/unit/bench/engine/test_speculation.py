"""The speculation bench on a tiny checkpoint: the planted acceptance is measured, and the text does not change."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.engine.decoder.draft_model import DraftModel
from app.hardware.facts import Core, Cpu, Facts
from app.hardware.plan.plan import ServingPlan, make_plan
from app.hardware.probe.probe import probe
from app.hardware.step_times import StepTimeTable
from app.metrics.steps import StepTimeModel
from app.settings import load_settings
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from armature_bench.console import MeasurementFailed
from armature_bench.engine import speculation
from armature_bench.engine.speculation import (
    DRAFT_MODEL_TARGETS,
    SPEEDUP_TARGETS,
    AnswerDriver,
    PlantedDrafter,
    measure_speculation,
)
from tiny_checkpoints import write_checkpoint

FACTS = Facts("linux", "x86_64", Cpu("", ""), (Core((0,)),), 2**34, 2**34, (0,))
# Eager: with recordings, a new number of drafts costs so much more than a tiny step that few are tried.
FLAGS = {"max_running_seqs": "4", "kv_cache_bytes": "64MiB", "threads": "1", "precision": "fp32", "compile": "off"}
FREE = StepTimeTable(((1, 1.0), (64, 1.0)), ((1, 1.0),))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Checkpoint, ServingPlan]:
    checkpoint = open_checkpoint(
        write_checkpoint(tmp_path_factory.mktemp("bench") / "tiny", max_position_embeddings=1024)
    )
    return checkpoint, make_plan(probe(), None, load_settings(**FLAGS)[0], checkpoint.needs(), RECIPES.keys())


@pytest.fixture(autouse=True)
def _draft_tokens_stay_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a busy machine's step times decide whether any are verified."""
    monkeypatch.setattr(StepTimeModel, "observe", lambda self, step: None)


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def test_each_probability_is_held_against_none(
    prepared: tuple[Checkpoint, ServingPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "TOKENS_PER_ANSWER", 60)
    outcome = measure_speculation(*prepared, FACTS, FREE, 2)
    figures = {figure.name: figure for figure in outcome.figures}
    assert outcome.complete and figures["without speculation"].value > 0
    for chance, target in SPEEDUP_TARGETS.items():
        figure = figures[f"right {chance:.0%} of the time"]
        assert figure.target == target and figure.ratio is not None and figure.ratio > 0
    assert figures["right 0% of the time, measured"].value == 0
    assert figures["right 90% of the time, measured"].value > 75
    assert figures["right 90% of the time, draft tokens"].value > figures["right 0% of the time, draft tokens"].value
    assert "Planted" in outcome.notes[0]


@pytest.mark.full
def test_a_draft_model_is_measured_too(
    prepared: tuple[Checkpoint, ServingPlan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "TOKENS_PER_ANSWER", 60)
    draft = open_checkpoint(
        write_checkpoint(tmp_path / "draft", seed=3, num_hidden_layers=1, max_position_embeddings=1024)
    )
    monkeypatch.setattr(DraftModel, "step_seconds", lambda self, rows: 1e-6)
    outcome = measure_speculation(*prepared, FACTS, FREE, 1, draft)
    figures = {figure.name: figure for figure in outcome.figures}
    for chance, target in DRAFT_MODEL_TARGETS.items():
        figure = figures[f"draft model right {chance:.0%} of the time"]
        assert figure.target == target and figure.ratio is not None and figure.ratio > 0
    assert figures["draft model right 0% of the time, measured"].value == 0
    assert figures["draft model right 80% of the time, measured"].value > 60
    assert len([name for name in figures if name == "without speculation"]) == 1
    assert outcome.subject.endswith("draft model draft")


def test_what_is_said_with_draft_tokens_is_what_was_said(prepared: tuple[Checkpoint, ServingPlan]) -> None:
    engine = build_decoder_engine(BuildRequest(*prepared, step_time_model=StepTimeModel(FREE))).engine
    guessing = engine.scheduler.speculation
    assert guessing is not None
    teller, prompt = AnswerDriver(engine, 50), [5, 9, 13] * 10
    first = teller.generate(prompt, None)
    text = [*prompt, *first.token_ids]
    again = teller.generate(
        prompt, guessing.with_drafter(lambda sequence: PlantedDrafter(text, 0.7, random.Random(0))), text
    )
    assert again.token_ids == first.token_ids and len(first.token_ids) == 50
    assert len(again.step_seconds) < len(first.step_seconds) == first.made == again.made == 49
    assert 0 < again.accepted <= again.judged <= again.num_drafted and first.num_drafted == 0
    assert (teller.forced_runner.num_forced, teller.forced_runner.num_checked) == (0, len(again.step_seconds) + 1)


def test_a_plan_without_draft_tokens_cannot_be_measured(prepared: tuple[Checkpoint, ServingPlan]) -> None:
    checkpoint, plan = prepared
    with pytest.raises(MeasurementFailed, match="this plan does not use speculation"):
        measure_speculation(checkpoint, plan.changed(speculation=False), FACTS, None, 1)
