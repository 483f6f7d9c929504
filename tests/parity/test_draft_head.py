"""A head of multi-token prediction drafts what the published structure says, and changes no token, whatever it drafts."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.backends.cpu import CpuBackend
from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.engine.decoder.draft_head import HeadDrafts, HeadRunner
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.speculation import ModelDrafting, NoDrafter, Speculation
from app.errors import SettingsInvalid
from app.models.decoders.draft_head import DraftHead
from app.server.prepare import prepare
from app.settings import Settings
from app.weights.checkpoint import open_checkpoint
from app.weights.draft_head import open_draft_head
from app.weights.load import load_model
from engine_simulation import FreeRows
from loaded_models import load, plan_of
from tests.parity.test_speculation_exact import MAX_LEN, REQUESTS, Engine, Said, prompt_of, request_of, tokens_of
from tiny_checkpoints import write_checkpoint


class FreeDrafts(HeadDrafts):
    """A head that takes no time, so that every draft pays. `proposed` are its drafts, by name and number of tokens before."""

    def step_seconds(self, num_sequences: int) -> float:
        return 1e-9

    def propose(self, sequences: list[Sequence], num_tokens: int) -> Any:
        found = super().propose(sequences, num_tokens)
        self.proposed |= {(one.request_id, len(one.token_ids)): ids for one, ids in found.items()}
        return found

    @property
    def proposed(self) -> dict[tuple[str, int], tuple[int, ...]]:
        kept: dict[tuple[str, int], tuple[int, ...]] = self.__dict__.setdefault("_proposed", {})
        return kept

    @proposed.setter
    def proposed(self, value: dict[tuple[str, int], tuple[int, ...]]) -> None:
        self.__dict__["_proposed"] = value


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a head, whose layer is like the one that attends, of other weights."""
    path = write_checkpoint(tmp_path_factory.mktemp("head"), "Qwen3_5ForCausalLM", seed=11)
    other = write_checkpoint(tmp_path_factory.mktemp("other"), "Qwen3_5ForCausalLM", seed=12)
    tensors, made = load_file(path / "model.safetensors"), torch.Generator().manual_seed(3)
    size = tensors["model.norm.weight"].numel()
    for name, tensor in load_file(other / "model.safetensors").items():
        if name.startswith("model.layers.1."):
            tensors[name.replace("model.layers.1.", "mtp.layers.0.")] = tensor
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        tensors[f"mtp.{name}.weight"] = torch.randn(size, generator=made) * 0.2
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=made) / (2 * size) ** 0.5
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.fixture(scope="module")
def model(folder: Path) -> torch.nn.Module:
    return load(folder, max_model_len=MAX_LEN)


@pytest.fixture(scope="module")
def plain(model: torch.nn.Module) -> Said:
    return Engine(model, torch.float32).generate(REQUESTS)


def drafts_of(folder: Path, engine: Engine, model: Any, dtype: str = "float32") -> FreeDrafts:
    checkpoint = open_draft_head(open_checkpoint(folder))
    assert checkpoint is not None
    backend = CpuBackend(getattr(torch, "float32" if dtype == "float32" else "bfloat16"))
    head = load_model(checkpoint, plan_of(dtype, MAX_LEN), backend)
    assert isinstance(head, DraftHead)
    head.attach(model)
    runner = HeadRunner(head, KvCache(kv_shape_of(head.config, 5, MAX_LEN), backend.dtype), backend)
    drafts = FreeDrafts(runner, 10_000)
    cast(Any, engine.engine.runner).show_hidden = drafts.observe
    return drafts


def speculation_of(drafts: HeadDrafts) -> Speculation:
    speculation = Speculation(lambda sequence: NoDrafter(), FreeRows(), 4)
    speculation.drafting = ModelDrafting(drafts, FreeRows(), 4)
    return speculation


def test_drafts_are_those_of_the_published_structure(folder: Path, model: torch.nn.Module) -> None:
    engine, request = Engine(model, torch.float32), request_of("one", prompt_of(30, 1), temperature=0.0)
    drafts = drafts_of(folder, engine, model)
    said = tokens_of(engine.generate([request], lambda: speculation_of(drafts)))["one", 0]
    reference, tokens = Reference(folder), [*request.token_ids, *said]
    assert len(drafts.proposed) >= 10
    for (_, length), ids in drafts.proposed.items():
        assert list(ids) == reference.drafts(tokens[:length], len(ids))


@pytest.mark.cases(test=1, ci=3)
@pytest.mark.parametrize(("capacity", "dtype"), [(0, "float32"), (200, "float32"), (0, "int8"), (0, "int4")])
def test_a_head_changes_no_token(folder: Path, model: Any, plain: Said, capacity: int, dtype: str) -> None:
    """Prefixes, preemption, several choices, penalties, grammars' masks: requests of all kinds at once."""
    served, expected = model, tokens_of(plain)
    if dtype != "float32":
        served = load(folder, dtype, max_model_len=MAX_LEN)
        expected = tokens_of(Engine(served, torch.bfloat16, fixed=True).generate(REQUESTS))
    engine = Engine(
        served, torch.float32 if dtype == "float32" else torch.bfloat16, dtype != "float32", capacity=capacity
    )
    requests = [one for one in REQUESTS if not capacity or one.request_id != "several"]
    drafts = drafts_of(folder, engine, served, dtype)
    said = tokens_of(engine.generate(requests, lambda: speculation_of(drafts)))
    assert said == {key: told for key, told in expected.items() if key in said} and len(said) >= len(requests)
    assert engine.guessed[0] > 20 and not drafts._known
    assert not capacity or sum(step.preempted for step in engine.stats) > 0


@pytest.mark.cases(test=1, ci=3)
@pytest.mark.parametrize("chance", [0.0, 0.5, 1.0])
def test_wrong_and_right_drafts_change_no_token(folder: Path, model: Any, plain: Said, chance: float) -> None:
    """The states go back to the accepted length, and the head goes on from the model's hidden states."""
    engine, dice = Engine(model, torch.float32), random.Random(1)
    drafts = drafts_of(folder, engine, model)

    def choose(sequence: Sequence, position: int, token: int) -> int:
        begin = drafts._known[sequence].base + 1 + position - sequence.num_prompt_tokens
        said = [one.token_id for one in plain[sequence.request_id, sequence.choice]]
        return said[begin] if dice.random() < chance and begin < len(said) else (token + 1) % 320

    drafts.choose = choose
    assert tokens_of(engine.generate(REQUESTS, lambda: speculation_of(drafts))) == tokens_of(plain)
    drafted, accepted = engine.guessed
    assert drafted > 20 and (accepted < 0.1 * drafted if chance == 0.0 else accepted > 0.3 * chance * drafted)


class Reference:
    """The head around a layer of transformers."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.whole = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        stored = load_file(folder / "model.safetensors")
        self.own = {name.removeprefix("mtp."): one for name, one in stored.items() if name.startswith("mtp.")}
        self.layer = copy.deepcopy(self.whole.model.layers[1])
        self.layer.load_state_dict(
            {name.removeprefix("layers.0."): one for name, one in self.own.items() if name.startswith("layers.0.")}
        )

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        eps = self.whole.config.rms_norm_eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (1 + self.own[f"{name}.weight"])

    @torch.inference_mode()
    def drafts(self, tokens: list[int], count: int) -> list[int]:
        """What follows these tokens: the model's last one has no hidden state yet."""
        given = self.whole.model(torch.tensor([tokens[:-1]])).last_hidden_state
        ids = list(tokens)
        for _ in range(count):
            embedded = self.whole.model.embed_tokens(torch.tensor([ids[1:]]))
            parts = self._norm(embedded, "pre_fc_norm_embedding"), self._norm(given, "pre_fc_norm_hidden")
            x = torch.cat(parts, -1) @ self.own["fc.weight"].T
            places = torch.arange(x.shape[1])[None]
            mask = torch.full((x.shape[1],) * 2, float("-inf")).triu(1)[None, None]
            angles = self.whole.model.rotary_emb(x, places)
            after = self._norm(self.layer(x, position_embeddings=angles, attention_mask=mask), "norm")[:, -1:]
            ids.append(int(self.whole.lm_head(after).argmax()))
            given = torch.cat((given, after), 1)
        return ids[len(tokens) :]


def test_a_server_drafts_by_the_head_of_its_model(folder: Path, model: Any) -> None:
    prepared = prepare(Settings(model=folder, precision="fp32", max_running_seqs=2))
    assert prepared.plan.steps.draft_model == "mtp" and prepared.needs.draft is not None
    built = build_decoder_engine(BuildRequest(prepared.checkpoint, prepared.plan, draft=prepared.draft))
    speculation = built.engine.scheduler.speculation
    assert speculation is not None and speculation.drafting is not None
    built.engine.add(request_of("one", prompt_of(9, 1), temperature=0.0))
    while built.engine.has_work:
        built.engine.step()
    assert speculation.to_json()["draft_model"]["draft_tokens"] > 0
    assert prepare(Settings(model=folder, speculation="off")).draft is None


def test_a_model_without_a_head_is_refused_where_one_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(SettingsInvalid, match="has no draft head of one layer"):
        prepare(Settings(model=write_checkpoint(tmp_path, "Qwen3_5ForCausalLM"), speculation="mtp"))
