"""The draft model of a start: what can draft for what, with which vocabulary, and in how much memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid, PlanImpossible, SettingsInvalid
from app.hardware.facts import CudaDevice
from app.hardware.plan.memory_budget import DRAFT_SEQS, MemoryDemand, kv_bytes_per_token, memory_budget
from app.server.model_source import MAX_MISSING_TOKENS, check_vocabulary
from app.server.prepare import prepare
from app.settings import DEMO_DIRECTORY, Settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint, open_checkpoint
from planned_machines import GIB, ON_GPUS, machine, plan
from tiny_checkpoints import write_checkpoint

ENCODER = DEMO_DIRECTORY.parent / "bert"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("served") / "served")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("small") / "small", num_hidden_layers=1)


def with_vocabulary(directory: Path, change: Any) -> Checkpoint:
    file = write_checkpoint(directory, num_hidden_layers=1) / "tokenizer.json"
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))
    return open_checkpoint(directory)


def test_without_the_setting_nothing_is_opened(served: Path) -> None:
    prepared = prepare(Settings(model=served))
    assert (prepared.draft, prepared.needs.draft, prepared.plan.steps.draft_model) == (None, None, None)


def test_a_draft_model_is_opened_and_planned(served: Path, small: Path) -> None:
    prepared = prepare(Settings(model=served, draft_model=small, precision="fp32"))
    assert prepared.draft is not None
    assert prepared.draft.directory == small
    assert prepared.plan.steps.draft_model == str(small)
    assert f"{prepared.draft.needs().num_parameters:,} parameters" in prepared.plan.decisions["draft_model"].reason
    assert "draft model" in prepared.plan.decisions["speculation"].reason
    draft = MemoryDemand(prepared.needs, "fp32", "fp32").draft_bytes()
    needs = prepared.draft.needs()
    assert draft == needs.bytes_by_precision["fp32"] + DRAFT_SEQS * 256 * kv_bytes_per_token(needs, "fp32")


def test_its_memory_is_not_given_to_keys_and_values(served: Path, small: Path) -> None:
    needs = prepare(Settings(model=served, draft_model=small)).needs
    assert needs.draft is not None
    small_needs = needs.draft
    needs = replace(needs, max_model_len=8192, draft=replace(needs.draft, max_model_len=8192))
    demand = MemoryDemand(needs, "int8", "bf16")
    alone = replace(demand, needs=replace(needs, draft=None))
    for facts in (machine(), machine(commit_left_bytes=GIB)):
        reserved = demand.draft_bytes(reserved=facts.commit_left_bytes is not None)
        assert memory_budget(facts, demand, 64, 4).size == memory_budget(facts, alone, 64, 4).size - reserved
    assert demand.draft_bytes(reserved=True) > demand.draft_bytes() > 0
    large = 400 * 2**20  # of a draft model's weights; the machine has no such memory left
    heavy = replace(needs, draft=replace(small_needs, bytes_by_precision={"int8": large}))
    with pytest.raises(PlanImpossible, match=r"activations and the draft model \(4\d\d MiB\)"):
        plan(machine(memory=GIB // 2), heavy, precision="int8", draft_model=small)


@pytest.mark.parametrize(
    ("model", "draft", "message"),
    [
        ("small", "served", "parameters, more than small with"),
        ("served", "encoder", "does not generate text, and only a decoder can draft"),
        ("encoder", "small", "does not generate text, so nothing can be drafted for it"),
        ("served", "/none/such", "none/such"),
    ],
)
def test_models_that_cannot_draft_are_refused(model: str, draft: str, message: str, served: Path, small: Path) -> None:
    paths = {"served": served, "small": small, "encoder": ENCODER}
    with pytest.raises((SettingsInvalid, CheckpointInvalid)) as refused:
        prepare(Settings(model=paths[model], draft_model=paths.get(draft, Path(draft))))
    assert message in refused.value.message


def test_it_needs_speculation_and_a_processor(served: Path, small: Path) -> None:
    with pytest.raises(PlanImpossible, match="speculation is off"):
        prepare(Settings(model=served, draft_model=small, speculation="off"))
    gpu = machine(cuda=(CudaDevice(0, "NVIDIA L4", (8, 9), 24 * GIB, 23 * GIB, "GPU-1"),))
    with pytest.raises(PlanImpossible, match="the device is cuda"):
        plan(gpu, open_checkpoint(served).needs(), ON_GPUS, device="cuda", draft_model=small)


def test_the_same_vocabulary_is_accepted(served: Path, small: Path) -> None:
    check_vocabulary(Tokenizer(served), open_checkpoint(small))


def test_the_first_difference_is_named(served: Path, tmp_path: Path) -> None:
    def swap(values: dict[str, Any]) -> None:
        vocab = values["model"]["vocab"]
        vocab["A"], vocab["B"] = vocab["B"], vocab["A"]

    draft, tokenizer = with_vocabulary(tmp_path / "other", swap), Tokenizer(served)
    first = tokenizer.token_id("A")
    with pytest.raises(CheckpointInvalid, match=rf"its token {first} is 'B', and the model's is 'A'"):
        check_vocabulary(tokenizer, draft)


@pytest.mark.parametrize("extra", [MAX_MISSING_TOKENS, MAX_MISSING_TOKENS + 1])
def test_a_few_tokens_may_be_missing(served: Path, tmp_path: Path, extra: int) -> None:
    def extend(values: dict[str, Any]) -> None:
        vocab = values["model"]["vocab"]
        vocab.update({f"more{number}": len(vocab) + number for number in range(extra)})

    draft, tokenizer = with_vocabulary(tmp_path / "longer", extend), Tokenizer(served)
    if extra <= MAX_MISSING_TOKENS:
        check_vocabulary(tokenizer, draft)
        return
    with pytest.raises(CheckpointInvalid, match="and the model's is missing"):
        check_vocabulary(tokenizer, draft)
