"""A request whose values are not finite fails alone, in models that compute: by a token whose row of the embedding is not
finite, or by an adapter. A checkpoint that cannot compute at all is refused with the name of the tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from app.engine.build import BuildRequest, BuiltEngine, build
from app.engine.decoder.adapters import AdapterSlots
from app.engine.decoder.build import build_decoder_engine
from app.engine.encoder.batching import BatchingDelay
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.encoder.engine import EncoderEngine, EncoderLimits
from app.errors import CheckpointInvalid, StepFailed
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.messages import (
    ArraysReady,
    Encode,
    Event,
    Generate,
    LoadedAdapter,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    Text,
    TokensReady,
)
from app.models.encoders.encoder import Encoder
from app.settings import load_settings
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES
from app.weights.lora.adapter import adapted_layers, open_adapter
from armature_kernels.linear.lora import LoraSlots
from device_engine import DeviceServed
from loaded_models import load
from tiny_adapters import adapter_tensors, write_adapter
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

BAD = 7  # the token whose row is not finite
EMBEDDING = "model.embed_tokens.weight"
WELL = [(9, 8, 30, 31, 5, 6), tuple(range(40, 100)), (11, 12)]
Texts = dict[str, list[int]]


def change_tensor(directory: Path, name: str, value: float, *place: int) -> Path:
    tensors = load_file(directory / "model.safetensors")
    tensors[name][place] = value
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def built_of(directory: Path, precision: str, **settings: Any) -> BuiltEngine[Any, Any, Any]:
    """The engine as the server builds it."""
    checkpoint = open_checkpoint(directory)
    given = {"threads": "1", "precision": precision, "kv_cache_bytes": "1MiB", "max_running_seqs": "4", **settings}
    plan = make_plan(probe(), None, load_settings(**given)[0], checkpoint.needs(), RECIPES.keys())
    threads = torch.get_num_threads()
    built = build_decoder_engine(BuildRequest(checkpoint, plan, lambda stage: None, eos_token_ids=()))
    torch.set_num_threads(threads)
    return built


def order(name: str, prompt: tuple[int, ...], adapter: LoadedAdapter | None = None, **params: Any) -> Generate:
    chosen = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, **params})
    return Generate(name, prompt, chosen, 0.0, adapter=adapter)


def served(engine: Any, orders: list[Generate]) -> tuple[Texts, dict[str, RequestFailed]]:
    """The tokens and the failures of requests that come together."""
    events: list[Event] = [event for one in orders for event in engine.add(one)]
    while engine.has_work:
        events += engine.step()
    texts: Texts = {}
    failed: dict[str, RequestFailed] = {}
    for event in events:
        if isinstance(event, RequestFailed):
            failed[event.request_id] = event
        elif isinstance(event, TokensReady | SequenceFinished):
            texts.setdefault(event.request_id, []).extend(event.token_ids)
    return texts, failed


def check_failing_alone(engine: Any, bad: list[Generate], well: list[Generate]) -> None:
    """Serve the good requests without the bad ones, beside them, and in the memory that those left."""
    alone, failed = served(engine, well)
    assert not failed and len(alone) == len(well)
    beside, failed = served(engine, [bad[0], *well, *bad[1:]])
    assert set(failed) == {one.request_id for one in bad}
    assert all(isinstance(one.error, StepFailed) and "not finite" in str(one.error) for one in failed.values())
    assert {name: tokens for name, tokens in beside.items() if name not in failed} == alone
    for number in range(3):
        _, failed = served(engine, [replace(one, request_id=f"{one.request_id}{number}") for one in bad])
        assert len(failed) == len(bad)
    again, failed = served(engine, well)
    assert not failed and again == alone


KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"temperature": 0.8, "top_k": 5, "seed": 4},
    {"logprobs": 2},
    {"repetition_penalty": 1.2},
    {"n": 2, "temperature": 1.0, "seed": 6},
    {"beam_width": 2},
    {"prompt_logprobs": 1},
    {"allowed_token_ids": (4, 5, 6)},
]


def orders(kinds: list[dict[str, Any]]) -> tuple[list[Generate], list[Generate]]:
    bad = [order(f"bad{place}", (20, 21, BAD, 22, 23), **kind) for place, kind in enumerate(kinds)]
    return bad, [order(f"well{place}", prompt) for place, prompt in enumerate(WELL)]


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_token_whose_embedding_is_not_finite_ends_its_own_request(
    precision: str, value: float, tmp_path: Path
) -> None:
    built = built_of(
        change_tensor(write_checkpoint(tmp_path / "tiny"), EMBEDDING, value, BAD), precision, deterministic="on"
    )
    check_failing_alone(built.engine, *orders(KINDS))


def test_recorded_steps_and_drafts_go_on_beside_it(tmp_path: Path) -> None:
    built = built_of(change_tensor(write_checkpoint(tmp_path / "tiny"), EMBEDDING, float("nan"), BAD), "fp32")
    bad, well = orders(KINDS[:3])
    well.append(order("copying", (30, 31, 32, 33) * 5, max_tokens=20))
    check_failing_alone(built.engine, bad, well)


@pytest.mark.parametrize("kinds", [KINDS[:1], KINDS[1:2], KINDS], ids=["greedy", "random", "all"])
def test_it_ends_alone_on_a_device_too(kinds: list[dict[str, Any]], tmp_path: Path) -> None:
    directory = change_tensor(write_checkpoint(tmp_path / "tiny"), EMBEDDING, float("nan"), BAD)
    device = DeviceServed(load(directory, max_model_len=160, device="cuda"))
    check_failing_alone(device.engine, *orders(kinds))


def test_an_adapter_that_overflows_ends_its_own_requests(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "tiny")
    huge = {name: tensor * 1e19 for name, tensor in adapter_tensors(base).items()}
    adapter = write_adapter(tmp_path / "adapter", base, tensors=huge)
    built = built_of(base, "fp32", deterministic="on")
    config = open_checkpoint(base).decoder
    slots = AdapterSlots(built.model, adapted_layers(config), LoraSlots(1, 16, torch.float32))
    slots.set_weights(0, slots.read(open_adapter(adapter, config)))
    built.runner._adapters = built.engine.adapters = slots
    bad, well = orders(KINDS[:3])
    bad = [replace(one, token_ids=(20, 21, 22), adapter=LoadedAdapter(0, 1)) for one in bad]
    check_failing_alone(built.engine, bad, well)


@pytest.mark.parametrize("architecture", ["BertModel", "BertForSequenceClassification", "ModernBertModel"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_a_text_that_is_not_finite_ends_its_own_request(architecture: str, precision: str, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "model", architecture)
    (embedding,) = (
        name
        for name in load_file(directory / "model.safetensors")
        if name.endswith(("word_embeddings.weight", "tok_embeddings.weight"))
    )
    model = cast(Encoder, load(change_tensor(directory, embedding, float("nan"), BAD), precision))
    output = model.config.outputs[0]
    engine = EncoderEngine(EncoderRunner(model, 64), EncoderLimits(64, 16, model.config.outputs), BatchingDelay(48))
    told: list[dict[str, Any]] = []
    for with_bad in (False, True, False):
        texts = {f"well{at}": tuple(range(10 + at, 13 + 5 * at)) for at in range(1, 4)}
        texts |= {"bad": (20, BAD, 21)} if with_bad else {}
        for name, token_ids in texts.items():
            engine.add(Encode(name, (Text(token_ids), Text((5, 6))), (output,), 0.0))
        events: list[Event] = []
        while engine.has_work:
            events += engine.step()
        failed = [event for event in events if isinstance(event, RequestFailed)]
        assert [one.request_id for one in failed] == (["bad"] if with_bad else [])
        assert all(isinstance(one.error, StepFailed) and "not finite" in str(one.error) for one in failed)
        told.append({event.request_id: event.arrays for event in events if isinstance(event, ArraysReady)})
    assert told[0].keys() == told[1].keys() and told[0] == told[2]


# ---- checkpoints that cannot compute -------------------------------------------------------------------------------


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight", "lm_head.weight"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8", "int4"])
def test_a_weight_that_is_not_finite_is_named(name: str, value: float, precision: str, tmp_path: Path) -> None:
    directory = change_tensor(write_checkpoint(tmp_path / "tiny"), name, value, 5)
    with pytest.raises(CheckpointInvalid, match=f"The tensor {name} has a value that is NaN or infinite"):
        built_of(directory, precision)


@pytest.mark.parametrize(
    "values", [{"rope_theta": 1e-300}, {"rms_norm_eps": 1e300}, {"rms_norm_eps": float("nan")}], ids=str
)
def test_numbers_that_a_model_cannot_compute_with_are_refused(values: dict[str, float], tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | values))
    with pytest.raises(CheckpointInvalid, match=next(iter(values))):
        built_of(directory, "fp32")


@pytest.mark.parametrize("name", ["encoder.layer.0.output.dense.weight", "embeddings.LayerNorm.weight"])
def test_a_weight_of_an_encoder_that_is_not_finite_is_named(name: str, tmp_path: Path) -> None:
    directory = change_tensor(write_encoder(tmp_path / "model"), name, float("nan"), 3)
    checkpoint = open_checkpoint(directory)
    plan = make_plan(probe(), None, load_settings(threads="1")[0], checkpoint.needs(), RECIPES.keys())
    threads = torch.get_num_threads()
    with pytest.raises(CheckpointInvalid, match=r"The tensor .* has a value that is NaN or infinite"):
        build(BuildRequest(checkpoint, plan, lambda stage: None))
    torch.set_num_threads(threads)
