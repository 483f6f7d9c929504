"""Drafting with a second model changes no token, whatever it drafts, and its keys and values follow what was accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.draft_model import DraftModel
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.model_drafting import ModelDrafting
from app.engine.scheduler.speculation import NgramDrafter, NoDrafter, Speculation
from app.models.decoders.decoder import Decoder
from engine_simulation import FreeRows
from loaded_models import load
from tests.parity.test_speculation_exact import MAX_LEN, REQUESTS, Engine, MakeSpeculation, tokens_of
from tiny_checkpoints import write_checkpoint


class FreeDrafts(DraftModel):
    """A draft model that takes no time, so that every draft pays."""

    def step_seconds(self, num_sequences: int) -> float:
        return 1e-9


def drafting(model: torch.nn.Module, lookup: bool = False, capacity: int = 10_000) -> MakeSpeculation:
    def make() -> Speculation:
        config: Any = model.config
        cache = KvCache(KvShape(config.num_layers, 5, MAX_LEN, config.num_kv_heads, config.head_dim), torch.float32)
        runner = CpuDecoderRunner(
            DecoderReplay(cast(Decoder, model)), cache, CpuBackend(torch.float32), Sampler(config.vocab_size)
        )
        speculation = Speculation(lambda sequence: NgramDrafter() if lookup else NoDrafter(), FreeRows(), 4)
        speculation.drafting = ModelDrafting(FreeDrafts(runner, capacity), FreeRows(), 4)
        return speculation

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return load(write_checkpoint(folder / "served", seed=11), max_model_len=MAX_LEN)


@pytest.mark.parametrize("lookup", [False, True])
@pytest.mark.parametrize("capacity", [0, 200])
def test_the_served_model_itself_drafts_right_and_a_stranger_wrong(
    model: torch.nn.Module, folder: Path, lookup: bool, capacity: int
) -> None:
    requests = [one for one in REQUESTS if not capacity or one.request_id != "several"]
    plain = tokens_of(Engine(model, torch.float32, capacity=capacity).generate(requests))
    other = load(write_checkpoint(folder / f"other{lookup}{capacity}", seed=5), max_model_len=MAX_LEN)
    for draft, accepts in ((model, True), (other, False)):
        engine = Engine(model, torch.float32, capacity=capacity)
        assert tokens_of(engine.generate(requests, drafting(draft, lookup))) == plain
        drafted, accepted = engine.guessed
        assert drafted > 20 and (accepted > 0.1 * drafted if accepts else accepted < 0.5 * drafted)


def test_its_keys_and_values_are_right_all_the_time(model: torch.nn.Module) -> None:
    """A model that drafts for itself, greedily, is always right."""
    requests = [one for one in REQUESTS if one.params.temperature == 0.0 and not one.params.has_penalties]
    engine = Engine(model, torch.float32)
    engine.generate(requests, drafting(model))
    drafted, accepted = engine.guessed
    assert drafted > 100 and accepted == drafted


def test_little_memory_for_drafts_is_kept_to(model: torch.nn.Module) -> None:
    plain = tokens_of(Engine(model, torch.float32).generate(REQUESTS))
    assert tokens_of(Engine(model, torch.float32).generate(REQUESTS, drafting(model, capacity=150))) == plain


@pytest.mark.parametrize("seed", range(6))
def test_drafts_that_are_partly_replaced_change_nothing(model: torch.nn.Module, seed: int) -> None:
    """The draft model's keys and values follow the tokens that were chosen for it, right or wrong."""
    dice = random.Random(seed)

    def choose(sequence: Sequence, position: int, token: int) -> int:
        return token if dice.random() < 0.7 else (token + 1) % 320

    def make() -> Speculation:
        speculation = drafting(model)()
        assert speculation.drafting is not None
        cast(Any, speculation.drafting.model).choose = choose
        return speculation

    plain = tokens_of(Engine(model, torch.float32).generate(REQUESTS))
    engine = Engine(model, torch.float32)
    assert tokens_of(engine.generate(REQUESTS, make)) == plain
    assert engine.guessed[1] > 20
