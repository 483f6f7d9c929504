"""Gemma 4's draft heads read the model's keys and values: they draft what transformers drafts, and change no token."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.backends.cpu import CpuBackend
from app.engine.build import BuildRequest
from app.engine.decoder.build import build_decoder_engine
from app.engine.decoder.draft_head import AssistantDrafts, AssistantRunner
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.scheduler.batch import Sequence
from app.errors import CheckpointInvalid, SettingsInvalid
from app.models.decoders.draft_head import AssistantHead
from app.server.prepare import prepare
from app.settings import Settings
from app.weights.checkpoint import open_checkpoint
from app.weights.load import load_model
from loaded_models import load, plan_of
from served_families import SERVED, write_family
from tests.parity.test_draft_head import FreeDrafts, speculation_of
from tests.parity.test_speculation_exact import MAX_LEN, REQUESTS, Engine, prompt_of, request_of, tokens_of
from tiny_checkpoints import write_tokenizer

OWN = {
    **SERVED["Gemma4ForCausalLM"],
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 4,
    "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
    "use_double_wide_mlp": False,
    "vocab_size_per_layer_input": 0,
    "hidden_size_per_layer_input": 0,
}


@pytest.fixture(scope="module", autouse=True)
def heads_can_be_built() -> Iterator[None]:
    """transformers 5.23 looks for a layer before the first one that the layers of a head could share keys with."""
    from transformers import Gemma4TextConfig

    modes = Gemma4TextConfig.kv_sharing_modes.fget

    def own_modes(config: Any) -> list[str | None]:
        all_shared = config.num_kv_shared_layers == config.num_hidden_layers
        return ["reuse"] * config.num_hidden_layers if all_shared else modes(config)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", property(own_modes))
        yield


class FreeAssistant(AssistantDrafts, FreeDrafts):
    """A head that takes no time, so that every draft pays."""


def write_head(directory: Path, served: Path) -> Path:
    import transformers

    kind, size = transformers.Gemma4AssistantForCausalLM, SERVED["Gemma4ForCausalLM"]["hidden_size"]
    torch.manual_seed(5)
    clusters = {"use_ordered_embeddings": False, "num_centroids": 5}
    config = kind.config_class(text_config=OWN, backbone_hidden_size=size, tie_word_embeddings=True, **clusters)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            own = torch.randn_like(parameter)
            parameter.copy_(own / min(parameter.shape) ** 0.5 if parameter.dim() == 2 and "emb" not in name else own)
    model.save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    write_family(folder, "Gemma4ForCausalLM", SERVED["Gemma4ForCausalLM"])
    write_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory, served: Path) -> Path:
    return write_head(tmp_path_factory.mktemp("head"), served)


def drafts_of(head: Path, engine: Engine, model: Any, dtype: str) -> FreeAssistant:
    checkpoint, backend = open_checkpoint(head), CpuBackend(torch.float32 if dtype == "float32" else torch.bfloat16)
    config = checkpoint.decoder.reading(model.config)
    own = load_model(replace(checkpoint, model_config=config), plan_of(dtype, MAX_LEN), backend)
    assert isinstance(own, AssistantHead)
    own.attach(model)
    cache, runner = KvCache(kv_shape_of(config, 5, MAX_LEN), backend.dtype), cast(Any, engine.engine.runner)
    drafts = FreeAssistant(AssistantRunner(own, cache, backend, runner.kv_cache), 10_000)
    runner.show_hidden = drafts.observe
    return drafts


def transformers_drafts(served: Path, head: Path, tokens: list[int], count: int) -> list[int]:
    """What follows these tokens, of which the model has not computed the last one."""
    import transformers

    target = transformers.Gemma4ForCausalLM.from_pretrained(served, dtype=torch.float32, attn_implementation="eager")
    own = transformers.Gemma4AssistantForCausalLM.from_pretrained(
        head, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        known = target(torch.tensor([tokens[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        hidden, place, ids = known.hidden_states[-1][:, -1:], torch.tensor([[len(tokens) - 1]]), [tokens[-1]]
        for _ in range(count):
            embedded = target.get_input_embeddings()(torch.tensor([ids[-1:]]))
            said = own(
                inputs_embeds=torch.cat([embedded, hidden], -1),
                position_ids=place,
                shared_kv_states=known.shared_kv_states,
            )
            ids.append(int(said.logits.argmax()))
            hidden = said.last_hidden_state
    return ids[1:]


def test_drafts_are_those_of_transformers(served: Path, head: Path) -> None:
    """Longer than the window, whose layers see as far back as the model's."""
    model = load(served, max_model_len=MAX_LEN)
    engine, request = Engine(model, torch.float32), request_of("one", prompt_of(30, 1), temperature=0.0)
    drafts = drafts_of(head, engine, model, "float32")
    said = tokens_of(engine.generate([request], lambda: speculation_of(drafts)))["one", 0]
    tokens = [*request.token_ids, *said]
    assert len(drafts.proposed) >= 10
    for (_, length), ids in drafts.proposed.items():
        assert list(ids) == transformers_drafts(served, head, tokens[:length], len(ids))


@pytest.mark.cases(test=1, ci=3)
@pytest.mark.parametrize(("capacity", "dtype"), [(0, "float32"), (200, "float32"), (0, "int8"), (0, "int4")])
def test_a_head_changes_no_token(served: Path, head: Path, capacity: int, dtype: str) -> None:
    """Prefixes, preemption, several choices, and drafts half of which are right."""
    model, exact = load(served, dtype, max_model_len=MAX_LEN), dtype == "float32"
    number = torch.float32 if exact else torch.bfloat16
    plain = tokens_of(Engine(model, number, fixed=not exact).generate(REQUESTS))
    engine = Engine(model, number, fixed=not exact, capacity=capacity)
    drafts = drafts_of(head, engine, model, dtype)

    def choose(sequence: Sequence, position: int, token: int) -> int:
        said, begin = plain[sequence.request_id, sequence.choice], position - sequence.num_prompt_tokens
        return said[begin] if position % 2 and begin < len(said) else token

    drafts.choose = choose
    requests = [one for one in REQUESTS if not capacity or one.request_id != "several"]
    said = tokens_of(engine.generate(requests, lambda: speculation_of(drafts)))
    assert said == {key: told for key, told in plain.items() if key in said} and len(said) >= len(requests)
    drafted, accepted = engine.guessed
    assert drafted > 20 and accepted > 5 and not drafts._known and not drafts._drafted
    assert not capacity or sum(step.preempted for step in engine.stats) > 0


def test_a_server_drafts_by_the_head_that_is_given(served: Path, head: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"precision": "fp32", "max_running_seqs": 2}
    prepared = prepare(Settings(model=served, draft_model=head, speculation="mtp", **settings))
    built = build_decoder_engine(BuildRequest(prepared.checkpoint, prepared.plan, draft=prepared.draft))
    built.engine.add(request_of("one", prompt_of(9, 1), temperature=0.0))
    while built.engine.has_work:
        built.engine.step()
    speculation = built.engine.scheduler.speculation
    assert speculation is not None and speculation.to_json()["draft_model"]["draft_tokens"] > 0
    with pytest.raises(SettingsInvalid, match="drafts for another model: serve that one"):
        prepare(Settings(model=head))
    config = json.loads((head / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "backbone_hidden_size": 40}))
    stored = load_file(head / "model.safetensors")
    wider = {
        name: torch.zeros(shape)
        for name, shape in (("pre_projection.weight", (24, 80)), ("post_projection.weight", (40, 24)))
    }
    save_file({**stored, **wider}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointInvalid, match=r"hidden states of 40.*give the head of this model"):
        prepare(Settings(model=served, draft_model=tmp_path))
