"""LoRA adapters against transformers with merged weights, and mixed batches against each adapter alone."""

from __future__ import annotations

import shutil
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec import structs
from safetensors.torch import load_file, save_file
from torch import Tensor

from app.backends.cpu import CpuBackend
from app.engine.decoder.adapters import AdapterSlots
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import ScheduledSpan, make_sequence
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.messages import Generate, LoadedAdapter, RequestFailed, SamplingParams, SetAdapter, TokensReady
from app.models.decoders.decoder import Decoder
from app.models.decoders.stored import is_transposed, our_name
from app.weights.checkpoint import open_checkpoint
from app.weights.lora.adapter import adapted_layers, open_adapter
from armature_kernels.linear.lora import LoraSlots
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from device_engine import DeviceServed, request_of
from loaded_models import load
from reference_attention import PlainAttend, context_of
from reference_models import reference_logits
from served_families import SERVED, expected_logits, write_family
from tiny_adapters import merge_adapter, write_adapter
from tiny_checkpoints import ARCHITECTURES, write_checkpoint, write_tokenizer

PROMPT = torch.randint(4, 320, (24,), generator=torch.Generator().manual_seed(3)).tolist()
MAX_LEN, SLOTS = 120, 12


def slots_of(model: Decoder, base: Path, adapters: list[Path], dtype: torch.dtype = torch.float32) -> AdapterSlots:
    config = open_checkpoint(base).decoder
    slots = AdapterSlots(model, adapted_layers(config), LoraSlots(max(1, len(adapters)), 16, dtype))
    for slot, directory in enumerate(adapters):
        slots.set_weights(slot, slots.read(open_adapter(directory, config)))
    return slots


def logits(model: Decoder, slots: AdapterSlots, slot: int | None) -> Tensor:
    """All logits of the prompt with the adapter of a slot."""
    adapter = None if slot is None else LoadedAdapter(slot, slot)
    sequence = make_sequence(Generate("one", tuple(PROMPT), SamplingParams(), 0.0, adapter=adapter))
    slots.begin([ScheduledSpan(sequence, 0, len(PROMPT), 0, None, 0, samples=True)])
    with torch.inference_mode():
        found = model(context_of(PROMPT, PlainAttend()))
    assert isinstance(found, Tensor)
    return found.float()


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("use_rslora", [False, True])
def test_logits_equal_those_of_merged_weights(architecture: str, use_rslora: bool, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", architecture, seed=7)
    adapter = write_adapter(tmp_path / "adapter", base, use_rslora=use_rslora)
    model = cast(Decoder, load(base))
    slots = slots_of(model, base, [adapter])
    expected = reference_logits(merge_adapter(base, adapter, tmp_path / "merged"), PROMPT)
    unchanged = reference_logits(base, PROMPT)
    torch.testing.assert_close(logits(model, slots, 0), expected, atol=3e-4, rtol=0)
    torch.testing.assert_close(logits(model, slots, None), unchanged, atol=1e-4, rtol=0)
    assert (expected - unchanged).abs().max() > 0.05


@pytest.mark.parametrize(
    "name",
    ["CohereForCausalLM"]
    + [
        pytest.param(f"{name}ForCausalLM", marks=pytest.mark.full)
        for name in (
            "Glm",
            "Glm4",
            "Ernie4_5",
            "Helium",
            "Granite",
            "Olmo2",
            "StableLm",
            "Nemotron",
            "Qwen3Moe",
            "MiniCPM3",
            "DeepseekV2",
        )
    ],
)
def test_families_that_store_rows_in_another_order_take_adapters(name: str, tmp_path: Path) -> None:
    write_family(tmp_path / "base", name, SERVED[name])
    write_tokenizer(base := tmp_path / "base")
    adapter = write_adapter(tmp_path / "adapter", base)
    model = cast(Decoder, load(base))
    expected = expected_logits(merge_adapter(base, adapter, tmp_path / "merged"), name, PROMPT)
    spread = float(expected.std())
    torch.testing.assert_close(logits(model, slots_of(model, base, [adapter]), 0), expected, atol=1e-3 * spread, rtol=0)
    assert (expected - expected_logits(base, name, PROMPT)).abs().max() > 0.05 * spread


@pytest.mark.parametrize(
    "name",
    [
        "GPT2LMHeadModel",
        *(pytest.param(one, marks=pytest.mark.full) for one in ("GPTNeoXForCausalLM", "OPTForCausalLM")),
    ],
)
def test_adapters_have_the_names_of_the_trained_model(name: str, tmp_path: Path) -> None:
    """As peft saves them: by transformers' names, with A and B the same way round for weights that are stored as [in, out]."""
    write_family(base := tmp_path / "base", name, SERVED[name])
    write_tokenizer(base)
    config = open_checkpoint(base).decoder
    weights, generator = load_file(base / "model.safetensors"), torch.Generator().manual_seed(4)
    layers, tensors = adapted_layers(config), dict[str, Tensor]()
    for stored, weight in weights.items():
        shape = layers.get(str(our_name(config, stored)).removesuffix(".weight"))
        if shape is None or not stored.endswith(".weight"):
            continue
        a, b = (torch.randn(size, generator=generator) / 4 for size in ((4, shape[1]), (shape[0], 4)))
        module = f"base_model.model.{stored.removesuffix('.weight')}"
        tensors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
        change = 1.5 * (b @ a)
        weights[stored] = weight + (
            change if weight.shape == change.shape and not is_transposed(config, f"{name}_proj.weight") else change.T
        )
    assert len(tensors) == 2 * len(layers) > 0
    is_conv = name == "GPT2LMHeadModel"
    adapter = write_adapter(
        tmp_path / "adapter", base, tensors=tensors, fan_in_fan_out=is_conv, target_modules="all-linear"
    )
    shutil.copytree(base, tmp_path / "merged")
    save_file(weights, tmp_path / "merged" / "model.safetensors", metadata={"format": "pt"})
    expected, unchanged = (expected_logits(tmp_path / one, name, PROMPT) for one in ("merged", "base"))
    model, spread = cast(Decoder, load(base)), float(expected.std())
    torch.testing.assert_close(logits(model, slots_of(model, base, [adapter]), 0), expected, atol=1e-3 * spread, rtol=0)
    assert (expected - unchanged).abs().max() > 0.05 * spread


def test_an_adapter_may_change_some_layers_and_have_several_ranks(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=7)
    adapter = write_adapter(tmp_path / "adapter", base, rank=7, adapts=lambda name: "v_proj" in name or "1.mlp" in name)
    model = cast(Decoder, load(base))
    expected = reference_logits(merge_adapter(base, adapter, tmp_path / "merged"), PROMPT)
    torch.testing.assert_close(logits(model, slots_of(model, base, [adapter]), 0), expected, atol=3e-4, rtol=0)


@pytest.mark.parametrize("precision", ["bfloat16", "int8"])
def test_quantized_models_change_by_the_same_amount(precision: str, tmp_path: Path) -> None:
    """Norms of quantized models are divided by scales; a change of the logits shows if the adapter is multiplied by them."""
    base = write_checkpoint(tmp_path / "base", seed=7, hidden_size=64, intermediate_size=128)
    adapter = write_adapter(tmp_path / "adapter", base, seed=2)
    model = cast(Decoder, load(base, precision))
    slots = slots_of(model, base, [adapter], torch.bfloat16)
    merged = reference_logits(merge_adapter(base, adapter, tmp_path / "merged"), PROMPT)
    expected = (merged - reference_logits(base, PROMPT)).flatten()
    found = (logits(model, slots, 0) - logits(model, slots, None)).flatten()
    assert torch.corrcoef(torch.stack([expected, found]))[0, 1] > 0.99
    assert ((found - expected).norm() / expected.norm()) < 0.15


Told = dict[str, list[int]]


def told(model: Decoder, slots: AdapterSlots | None, requests: list[tuple[str, int | None, int]]) -> Told:
    """The greedy tokens of requests (name, slot, length of the prompt) that join one after the other."""
    config = model.config
    cache = KvCache(
        KvShape(config.num_layers, SLOTS, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.float32
    )
    replay = DecoderReplay(model, record_after=0)
    runner = CpuDecoderRunner(replay, cache, CpuBackend(torch.float32), Sampler(config.vocab_size), adapters=slots)
    scheduler = Scheduler(KvSlots(SLOTS, SLOTS * MAX_LEN), PrefillBudget(24), EngineLimits(MAX_LEN, SLOTS // 2, 24))
    engine, said = DecoderEngine(scheduler, runner, clock=count().__next__), dict[str, list[int]]()
    engine.adapters = slots
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting:
            name, slot, length = waiting.pop(0)
            adapter = None if slot is None else LoadedAdapter(slot, slot)
            params = SamplingParams(max_tokens=16, temperature=0.0, ignore_eos=True)
            engine.add(Generate(name, tuple((PROMPT * 4)[:length]), params, 0.0, adapter=adapter))
        for event in engine.step() + engine.step():
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokensReady):
                said.setdefault(event.request_id, []).extend(event.token_ids)
    if has_kernel(OpCode.LORA):
        assert replay.reason == ""
        assert replay.num_replays > 5
    return said


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "MixtralForCausalLM"])
def test_a_mixed_batch_equals_each_merged_model_alone(architecture: str, tmp_path: Path) -> None:
    """Prompts have a common prefix, whose keys and values must not be shared by different adapters."""
    base = write_checkpoint(tmp_path / "base", architecture, seed=11)
    adapters = [write_adapter(tmp_path / f"a{seed}", base, rank=3 + seed, seed=seed) for seed in range(3)]
    mixed = [(f"{slot}/{length}", slot, length) for length in (40, 52) for slot in (0, 1, None, 2)]
    model = cast(Decoder, load(base, max_model_len=MAX_LEN))
    together = told(model, slots_of(model, base, adapters), mixed)
    for slot in (0, 1, 2, None):
        alone = base if slot is None else merge_adapter(base, adapters[slot], tmp_path / f"merged{slot}")
        own = [(name, None, length) for name, of, length in mixed if of == slot]
        merged = told(cast(Decoder, load(alone, max_model_len=MAX_LEN)), None, own)
        assert {name: together[name] for name, _, _ in own} == merged


def test_an_adapter_is_replaced_between_steps(tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", seed=11)
    first, second = (write_adapter(tmp_path / f"a{seed}", base, seed=seed) for seed in range(2))
    model = cast(Decoder, load(base))
    slots = slots_of(model, base, [first])
    before = logits(model, slots, 0)
    engine: Any = DecoderEngine(cast(Any, None), cast(Any, None))
    engine.adapters = slots
    slots.read_for(0, open_adapter(second, open_checkpoint(base).decoder))
    assert engine.add(SetAdapter(0, is_loaded=True)) == []
    assert not torch.allclose(logits(model, slots, 0), before)
    engine.add(SetAdapter(0, is_loaded=False))
    torch.testing.assert_close(logits(model, slots, 0), logits(model, slots, None), atol=0, rtol=0)


def test_a_device_serves_adapters_beside_each_other_as_merged_weights(tmp_path: Path) -> None:
    """In steps that are captured once, also for an adapter that comes later."""
    base = write_checkpoint(tmp_path / "base", seed=7)
    adapters = [write_adapter(tmp_path / name, base, rank, seed) for name, rank, seed in (("a", 4, 1), ("b", 7, 2))]
    params = {"temperature": 0.0, "max_tokens": 12}
    requests = [request_of(str(slot), PROMPT[slot + 1 :], **params) for slot in range(3)]
    merged = [merge_adapter(base, one, tmp_path / f"merged-{at}") for at, one in enumerate(adapters)]
    expected = {}
    for request, directory in zip(requests, (*merged, base), strict=True):
        expected |= DeviceServed(load(directory, max_model_len=MAX_LEN, device="cuda")).add(request).finish().said
    model = cast(Decoder, load(base, max_model_len=MAX_LEN, device="cuda"))
    config, device = open_checkpoint(base).decoder, torch.device("cpu")
    slots = AdapterSlots(model, adapted_layers(config), LoraSlots(2, 8, torch.float32), device)
    slots.set_weights(0, slots.read(open_adapter(adapters[0], config)))
    served = DeviceServed(model)
    served.engine.adapters = slots
    served.runner.use_adapters(slots)
    served.add(requests[2]).finish()
    slots.read_for(1, open_adapter(adapters[1], config))
    served.engine.add(SetAdapter(1, is_loaded=True))
    with_adapters = [structs.replace(one, adapter=LoadedAdapter(at, at)) for at, one in enumerate(requests[:2])]
    served.said.clear()
    again = structs.replace(requests[2], cache_salt="again")
    assert served.add(*with_adapters, again).finish().said == expected
    assert served.runner.graphs.num_replayed >= 0.9 * len(served.stats) and len(set(map(tuple, expected.values()))) == 3
