"""Drafting with a second model changes no token, whatever it drafts, and its keys and values follow what was accepted."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.draft_model import DraftModel
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.speculation import ModelDrafting, NgramDrafter, NoDrafter, Speculation
from app.messages import GrammarSource
from app.models.decoders.decoder import Decoder
from app.text.grammar import GrammarCompiler
from app.text.tokenizer import Tokenizer
from engine_simulation import FreeRows
from loaded_models import load
from tests.parity.test_speculation_exact import (
    MAX_LEN,
    REQUESTS,
    Engine,
    MakeSpeculation,
    prompt_of,
    request_of,
    tokens_of,
)
from tiny_checkpoints import write_checkpoint


class FreeDrafts(DraftModel):
    """A draft model that takes no time, so that every draft pays."""

    def step_seconds(self, num_sequences: int) -> float:
        return 1e-9


def drafting(
    model: torch.nn.Module, lookup: bool = False, capacity: int = 10_000, served_rows: int | None = None
) -> MakeSpeculation:
    def make() -> Speculation:
        config: Any = model.config
        cache = KvCache(kv_shape_of(config, 5, MAX_LEN, 5 if config.state_sizes else 0), torch.float32)
        runner = CpuDecoderRunner(
            DecoderReplay(cast(Decoder, model)), cache, CpuBackend(torch.float32), Sampler(config.vocab_size)
        )
        speculation = Speculation(lambda sequence: NgramDrafter() if lookup else NoDrafter(), FreeRows(), 4)
        speculation.drafting = ModelDrafting(FreeDrafts(runner, capacity, served_rows), FreeRows(), 4)
        return speculation

    return make


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return load(write_checkpoint(folder / "served", seed=11), max_model_len=MAX_LEN)


@pytest.mark.cases(test=1)
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


def test_a_state_goes_back_to_what_was_accepted(folder: Path) -> None:
    """A model with recurrent layers drafts for itself: always right, or partly replaced."""
    model = load(write_checkpoint(folder / "recurrent", "Qwen3_5ForCausalLM", seed=11), max_model_len=MAX_LEN)
    requests = [one for one in REQUESTS if one.params.temperature == 0.0 and not one.params.has_penalties]
    engine, dice = Engine(model, torch.float32), random.Random(2)
    plain = tokens_of(engine.generate(requests, drafting(model)))
    assert engine.guessed[0] == engine.guessed[1] > 100

    def make() -> Speculation:
        speculation = drafting(model)()
        assert speculation.drafting is not None
        cast(Any, speculation.drafting.model).choose = lambda _, place, token: (token + (dice.random() < 0.3)) % 320
        return speculation

    again = Engine(model, torch.float32)
    assert (
        tokens_of(again.generate(requests, make)) == plain == tokens_of(Engine(model, torch.float32).generate(requests))
    )
    assert 0.3 * again.guessed[0] < again.guessed[1] < 0.8 * again.guessed[0]


def test_little_memory_for_drafts_is_kept_to(model: torch.nn.Module) -> None:
    plain = tokens_of(Engine(model, torch.float32).generate(REQUESTS))
    assert tokens_of(Engine(model, torch.float32).generate(REQUESTS, drafting(model, capacity=150))) == plain


@pytest.mark.cases(test=1)
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


def test_an_embedding_of_another_size_is_never_exceeded(model: torch.nn.Module, folder: Path) -> None:
    """A draft model with fewer rows computes another token in their place; of one with more, drafts are cut."""
    plain = tokens_of(Engine(model, torch.float32).generate(REQUESTS))
    for vocab_size in (200, 400):
        path = write_checkpoint(folder / f"rows{vocab_size}", seed=5, vocab_size=vocab_size)
        draft = load(path, max_model_len=MAX_LEN)
        engine = Engine(model, torch.float32)
        assert tokens_of(engine.generate(REQUESTS, drafting(draft, served_rows=320))) == plain
        assert engine.guessed[0] > 20


def test_drafts_keep_to_grammars_and_masks(model: torch.nn.Module, folder: Path) -> None:
    compiler = GrammarCompiler(Tokenizer(folder / "served"), 320)
    digits = GrammarSource("regex", "([0-9]{3}(-[a-z]{2,5}){2} ){9}", "f")
    compiler.compile(digits)
    settings: list[dict[str, Any]] = [
        {"temperature": 0.0}, {"seed": 2}, {"seed": 3, "top_k": 9}, {"seed": 4, "n": 3, "top_p": 0.8},
    ]  # fmt: skip
    requests = [
        replace(request_of(f"grammar {index}", prompt_of(10, index), max_tokens=60, **more), grammar=digits)
        for index, more in enumerate(settings)
    ] + [
        request_of("allowed", prompt_of(20, 7), allowed_token_ids=tuple(range(60, 90)), temperature=0.0),
        request_of(
            "longer",
            prompt_of(20, 8),
            max_tokens=40,
            min_tokens=30,
            stop_token_ids=tuple(range(4, 300)),
            seed=5,
            top_k=30,
        ),
    ]
    plain = tokens_of(Engine(model, torch.float32, grammars=compiler).generate(requests))
    engine = Engine(model, torch.float32, grammars=compiler)
    assert tokens_of(engine.generate(requests, drafting(model))) == plain
    assert engine.guessed[1] > 10


def test_slots_are_free_when_all_have_ended(model: torch.nn.Module) -> None:
    made: list[Speculation] = []

    def make() -> Speculation:
        made.append(drafting(model)())
        return made[-1]

    Engine(model, torch.float32, capacity=200).generate([one for one in REQUESTS if one.request_id != "several"], make)
    drafting_of = made[0].drafting
    assert drafting_of is not None
    draft = cast(Any, drafting_of.model)
    assert sorted(draft._free) == list(range(5))
    assert not draft._drafted
    assert not cast(Any, drafting_of)._histories


def test_each_method_is_counted(model: torch.nn.Module) -> None:
    made: list[Speculation] = []

    def make() -> Speculation:
        made.append(drafting(model, lookup=True)())
        return made[-1]

    engine = Engine(model, torch.float32)
    engine.generate(REQUESTS, make)
    counts = made[0].to_json()
    assert counts["draft_model"]["draft_tokens"] > 0
    assert sum(one["draft_tokens"] for one in counts.values()) == engine.guessed[0]
    assert sum(one["accepted_tokens"] for one in counts.values()) == engine.guessed[1]
