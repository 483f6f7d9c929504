"""Loading into device memory: everything is there once, the host holds little, and results are the same.

The device is the CPU with reference forms, or torch's "meta", which has no memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from app.backends.base import BaseBackend
from app.errors import PlanImpossible
from app.models.decoders.decoder import Embedding, RotaryEmbedding
from app.models.encoders.encoder import DistanceBias
from app.weights.checkpoint import open_checkpoint
from app.weights.load import Packing, load_model
from armature_kernels.linear import device_int4
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.device_int4 import DeviceCodesLinear, DeviceInt4Linear
from armature_kernels.linear.linear import Linear
from loaded_models import load, load_on, plan_of
from reference_attention import PlainAttend, context_of
from run_encoder import encoded, random_texts
from tiled_codes import TiledCodes, fresh_scratch, tiled
from tiny_checkpoints import ARCHITECTURES, random_tensors, write_checkpoint, write_weights
from tiny_encoders import SUFFIX, write_encoder

__all__ = ["tiled"]  # a fixture
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}  # sizes that four bits can hold
ENCODERS = ("MPNetModel", "GteModel", f"ModernBert{SUFFIX}", "Qwen3Model")


@torch.inference_mode()
def logits(model: nn.Module) -> Tensor:
    result: Tensor = model(context_of(list(range(10, 30)), PlainAttend()))
    return result.float()


def forms_of(model: nn.Module) -> list[DeviceLinear | DeviceInt4Linear]:
    return [cast(DeviceLinear | DeviceInt4Linear, one.form) for one in model.modules() if isinstance(one, Linear)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_are_those_of_a_processors_forms(tmp_path: Path, architecture: str, tied: bool) -> None:
    directory = write_checkpoint(
        tmp_path, architecture, tie_word_embeddings=tied, dtype=torch.float32 if tied else torch.bfloat16
    )
    torch.testing.assert_close(logits(load(directory, device="cuda")), logits(load(directory)), rtol=1e-4, atol=1e-4)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma3ForCausalLM"])
def test_fewer_bits_are_near(tiled: TiledCodes, tmp_path: Path, architecture: str) -> None:
    """Four bits of random weights leave as much as in a processor's forms (test_quantized_models.py)."""
    directory = write_checkpoint(tmp_path, architecture, **WIDE)
    exact = logits(load(directory))
    for dtype, within, kind in (
        ("bfloat16", 0.03, "cuda"),
        ("float16", 0.004, "mps"),
        ("int8", 0.04, "cuda"),
        ("fp8", 0.12, "cuda"),
        ("int4", 0.5, "cuda"),
    ):
        assert (logits(load_on(directory, dtype, kind)) - exact).norm() <= within * exact.norm(), dtype
    assert tiled.multiplied and {type(form) for form in forms_of(load_on(directory, "int4"))} == {
        DeviceLinear,
        DeviceInt4Linear,
    }


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_says_the_same(tmp_path: Path, kind: str) -> None:
    directory, texts = write_encoder(tmp_path, kind), random_texts((5, 1, 30))
    said = [cast(Any, load(directory, device=device)) for device in ("cuda", "cpu")]
    name = said[0].config.outputs[0]
    results = [encoded(model, texts, (name,))[name] for model in said]
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)
    assert all(isinstance(form, DeviceLinear) for form in forms_of(said[0]))


# ---- where it lies -----------------------------------------------------------------------------------------------------


def held(model: nn.Module) -> Iterator[Tensor]:
    """All that a model computes with."""
    for module in model.modules():
        if isinstance(module, Embedding) and module.form is not None:
            continue
        yield from module.parameters(recurse=False)
        if isinstance(module, DistanceBias):
            yield module.by_distance
    for form in forms_of(model):
        yield from (one for one in (getattr(form, "weight", None), form.bias) if one is not None)
    for module in (part for every in model.modules() for part in vars(every).values()):
        yield from (one.frequencies for one in getattr(module, "rotaries", ()) if isinstance(one, RotaryEmbedding))


@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *ENCODERS])
def test_all_of_a_model_lies_on_the_device(tmp_path: Path, architecture: str) -> None:
    write = write_checkpoint if architecture in ARCHITECTURES else write_encoder
    model = load_on(write(tmp_path, architecture), "bfloat16", place="meta")
    places = [tensor.device.type for tensor in held(model)]
    assert len(places) > 10 and set(places) == {"meta"}
    assert all(form.nbytes > 0 for form in forms_of(model))


@pytest.mark.full
def test_four_bits_are_made_on_the_device(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where channels are made alike, too: whatever mixes the host's rows in is refused by torch."""
    monkeypatch.setattr(device_int4, "shared_scratch", fresh_scratch())
    monkeypatch.setattr(device_int4, "find_code_order", lambda inputs, device: torch.empty(8 * inputs, device=device))
    model = load_on(write_checkpoint(tmp_path, **WIDE), "int4", place="meta")
    rounded = [form for form in forms_of(model) if isinstance(form, DeviceInt4Linear)]
    assert rounded and all(form.packed.is_meta and form.scales.is_meta and form.packed.numel() for form in rounded)
    assert {tensor.device.type for tensor in held(model)} == {"meta"}


def test_a_tied_embedding_is_the_output_layers_tensor(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, tie_word_embeddings=True), "bfloat16", device="cuda")
    embedding, output = cast(Embedding, model.embedding), cast(Linear, model.output)
    assert embedding.form is output.form and isinstance(output.form, DeviceLinear)
    assert embedding.weight.is_meta  # no table beside it


def test_what_is_on_the_device_is_not_the_mapped_file(tmp_path: Path) -> None:
    """The twin's memory is the host's: a table that still lay in the file would change with it."""
    directory = write_checkpoint(tmp_path)
    model = load(directory, device="cuda")
    before = [tensor.clone() for tensor in (*model.parameters(), *(form.weight for form in forms_of(model)))]  # type: ignore[union-attr]
    path = directory / "model.safetensors"
    with path.open("r+b") as file:
        begin = 8 + int.from_bytes(file.read(8), "little")
        file.seek(begin)
        file.write(b"\xff" * (path.stat().st_size - begin))
    after = [*model.parameters(), *(form.weight for form in forms_of(model))]  # type: ignore[union-attr]
    assert all(torch.equal(first, second) for first, second in zip(before, after, strict=True))


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("shape", [{}, WIDE], ids=["tiny", "wide"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_plan_counts_the_bytes_that_are_held(
    tiled: TiledCodes, tmp_path: Path, architecture: str, shape: dict[str, Any]
) -> None:
    directory = write_checkpoint(tmp_path, architecture, **shape)
    counted = open_checkpoint(directory).needs().device_bytes_by_precision
    assert set(counted) == {"fp32", "bf16", "fp16", "fp8", "int8", "int4"} and counted["fp16"] == counted["bf16"]
    for dtype, precision in (
        ("float32", "fp32"),
        ("bfloat16", "bf16"),
        ("int4", "int4"),
        ("int8", "int8"),
        ("fp8", "fp8"),
    ):  # they share scratch memory, which grows
        model = load_on(directory, dtype)
        rounded = [form for form in forms_of(model) if isinstance(form, DeviceCodesLinear)]
        assert bool(rounded) or not precision.startswith("int") or not shape
        assert held_bytes(model) + (rounded[0].scratch.nbytes if rounded else 0) == counted[precision], precision


def held_bytes(model: nn.Module) -> int:
    """Whole tables, of which RoBERTa's first positions are not looked at."""
    parameters = (one.untyped_storage().nbytes() for one in model.parameters() if not one.is_meta)
    return sum(form.nbytes for form in forms_of(model)) + sum(parameters)


@pytest.mark.parametrize("architecture", ["BertModel", *ENCODERS])
def test_the_plan_counts_an_encoders_bytes(tmp_path: Path, architecture: str) -> None:
    directory = write_encoder(tmp_path, architecture)
    assert (
        held_bytes(load_on(directory, "bfloat16"))
        == open_checkpoint(directory).needs().device_bytes_by_precision["bf16"]
    )


# ---- what it becomes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model.layers.1.self_attn.v_proj.weight", 7e4),
        ("model.layers.0.self_attn.k_proj.bias", -1e30),
        ("lm_head.weight", -7e4),
    ],
)
def test_what_fp16_cannot_hold_is_refused_by_name(tmp_path: Path, name: str, value: float) -> None:
    directory = write_checkpoint(tmp_path, "Qwen2ForCausalLM", dtype=torch.bfloat16)
    load_on(directory, "float16", "mps")
    tensors = random_tensors(open_checkpoint(directory).decoder, dtype=torch.bfloat16)
    tensors[name].view(-1)[-1] = value
    write_weights(directory, tensors)
    with pytest.raises(PlanImpossible, match=rf"^{name} holds .*65,504.*bf16"):
        load_on(directory, "float16", "mps")
    assert load_on(directory, "bfloat16", "mps") is not None


def test_nothing_is_kept_of_what_lies_on_a_device(tmp_path: Path) -> None:
    from app.weights.packs import PackFolder

    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model", **WIDE))
    backend = cast(BaseBackend, SimpleNamespace(device=torch.device("cpu")))
    load_model(
        checkpoint,
        plan_of("int4", 64, "cuda"),
        backend,
        packing=Packing(PackFolder(tmp_path / "kept", lambda done, total: None)),
    )
    assert not list(tmp_path.glob("kept/**/*.pack"))


def test_progress_is_reported_to_the_end(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, tie_word_embeddings=True)
    told: list[tuple[int, int]] = []
    load(directory, device="cuda", progress=lambda done, total: told.append((done, total)))
    whole = sum(entry.nbytes for entry in open_checkpoint(directory).tensors.values())
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1] == (whole, whole)
