"""Checkpoints in FP8 on a device: their codes are kept, and results are bit for bit those of their values in BF16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import fp8_blocks
from app.weights.safetensors import ColumnsEntry, RearrangedEntry
from app.weights.shards import shard
from app.weights.tensor_reader import TensorReader
from armature_kernels.linear import device_fp8
from armature_kernels.linear.device_fp8 import DeviceFp8Linear
from armature_kernels.linear.linear import Linear
from device_engine import MAX_LEN, DeviceServed, prompt_of, request_of
from loaded_models import load_on
from quantized_files import quantized, write_values
from reference_attention import PlainAttend, context_of
from simulated_device import SimulatedDeviceBackend
from tiled_codes import fresh_scratch

PROMPT = list(range(5, 29))
EXPERTS = {"architecture": "Qwen3MoeForCausalLM", "moe_intermediate_size": 64}
LATENT = {"architecture": "DeepseekV3ForCausalLM", "q_lora_rank": 96, "kv_lora_rank": 96, "v_head_dim": 16} | {
    "moe_intermediate_size": 64,
    "head_dim": None,
}


@pytest.fixture(autouse=True)
def _own_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_fp8, "shared_scratch", fresh_scratch())


@torch.inference_mode()
def logits(model: Any, prompt: list[int] = PROMPT) -> torch.Tensor:
    found: torch.Tensor = model(context_of(prompt, PlainAttend()))
    return found.float()


def kept_blocks(model: torch.nn.Module) -> set[tuple[int, int]]:
    forms = [module.form for module in model.modules() if isinstance(module, Linear)]
    return {form.block for form in forms if isinstance(form, DeviceFp8Linear)}


@pytest.mark.parametrize(
    ("name", "sizes", "blocks"),
    [
        ("fp8 in blocks", {}, {(16, 48), (48, 48)}),
        (
            "fp8 in blocks of 128",
            {"hidden_size": 160, "intermediate_size": 320},
            {(32, 128), (64, 128), (128, 64), (128, 128)},
        ),
        ("float-quantized", EXPERTS, {(1, 64)}),
        ("fp8 in blocks", LATENT, None),
    ],
)
def test_kept_codes_give_the_logits_of_their_values(
    tmp_path: Path, name: str, sizes: dict[str, Any], blocks: set[tuple[int, int]] | None
) -> None:
    """Few rows and many: without Triton and products of E4M3 both are those of the dequantized weight."""
    directory, values = quantized(tmp_path, name, **sizes)
    kept, exact = load_on(directory, "fp8"), load_on(write_values(tmp_path, values, **sizes), "bfloat16")
    assert kept_blocks(kept) and kept_blocks(kept) == (blocks or kept_blocks(kept))
    for prompt in (PROMPT, PROMPT * 6):
        assert torch.equal(logits(kept, prompt), logits(exact, prompt))


def test_an_engine_says_what_it_says_with_the_values(tmp_path: Path) -> None:
    directory, values = quantized(tmp_path, "fp8 in blocks", max_position_embeddings=MAX_LEN)
    requests = [request_of(str(seed), prompt_of(20 + seed, seed), temperature=0.0) for seed in range(3)]
    said = [
        DeviceServed(load_on(one, kind), SimulatedDeviceBackend(torch.bfloat16)).add(*requests).finish()
        for one, kind in ((directory, "fp8"), (write_values(tmp_path, values), "bfloat16"))
    ]
    assert said[0].said == said[1].said and said[0].runner.graphs.num_replayed > 5


def test_a_rank_keeps_the_codes_of_its_part(tmp_path: Path) -> None:
    """Rows in another order, and columns of whole blocks; the values of others are held."""
    checkpoint = open_checkpoint(quantized(tmp_path, "fp8 in blocks", hidden_size=192, intermediate_size=192)[0])
    part = shard(checkpoint, 1, 2)
    reader = TensorReader(part.tensors)
    blocks = {"q_proj": (1, 48), "o_proj": None, "up_proj": (1, 48), "down_proj": (48, 48)}
    found = fp8_blocks(part.tensors)
    for end, block in blocks.items():
        source = next(name.removesuffix(".weight") for name in part.tensors if name.endswith(f"{end}.weight"))
        assert found.get(source) == block
        if block is not None:
            entry = part.tensors[f"{source}.weight"]
            assert isinstance(entry, RearrangedEntry | ColumnsEntry)
            codes, scales = reader.fp8_codes(entry, range(8, 24))
            values = codes.view(torch.float8_e4m3fn).float() * scales.repeat_interleave(48, 1)[:, : codes.shape[1]]
            assert torch.equal(values, reader.block(entry, range(8, 24)))


def test_layers_that_are_not_quantized_stay_exact_and_bytes_are_counted(tmp_path: Path) -> None:
    directory, values = quantized(tmp_path, "float-quantized")
    stored, name = load_file(directory / "model.safetensors"), "model.layers.0.self_attn.o_proj"
    del stored[f"{name}.weight_scale"]
    stored[f"{name}.weight"] = values[f"{name}.weight"]
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    kept = load_on(directory, "fp8")
    assert torch.equal(logits(kept), logits(load_on(write_values(tmp_path, values), "bfloat16")))
    needs = open_checkpoint(directory).needs()
    forms = [module.form for module in kept.modules() if isinstance(module, Linear)]
    scratch = next(form.scratch for form in forms if isinstance(form, DeviceFp8Linear)).nbytes
    others = sum(one.nbytes for one in kept.parameters() if not one.is_meta)
    assert sum(form.nbytes for form in forms) + others + scratch == needs.device_bytes_by_precision["fp8"]
    assert needs.keeps_fp8 and not needs.codes_precision


@pytest.mark.parametrize(("part", "value"), [("weight", float("nan")), ("weight_scale_inv", float("inf"))])
def test_a_value_that_is_not_finite_is_refused_by_name(tmp_path: Path, part: str, value: float) -> None:
    directory, _ = quantized(tmp_path, "fp8 in blocks")
    stored, name = load_file(directory / "model.safetensors"), "model.layers.1.mlp.up_proj"
    broken = stored[f"{name}.{part}"].float()
    broken[-1, -1] = value
    stored[f"{name}.{part}"] = broken.to(stored[f"{name}.{part}"].dtype)
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointInvalid, match=rf"{name}\.weight has a value that is NaN or infinite"):
        load_on(directory, "fp8")


def test_e5m2_is_quantized_again(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "float-quantized")
    stored = load_file(directory / "model.safetensors")
    narrow = {
        name: one.to(torch.float8_e5m2) if one.dtype == torch.float8_e4m3fn else one for name, one in stored.items()
    }
    save_file(narrow, directory / "model.safetensors", metadata={"format": "pt"})
    needs = open_checkpoint(directory).needs()
    assert needs.stored_quantization == "FP8 (E5M2)" and not needs.keeps_fp8
    assert kept_blocks(load_on(directory, "fp8")) and needs.device_bytes_by_precision["fp8"]
