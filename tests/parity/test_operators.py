"""Every operator that serving asks of a device has a kernel there, by torch's own table; and on an Apple GPU nothing is FP64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.base import DeviceBackend
from app.backends.mps import road
from app.backends.twin import TwinBackend
from app.engine.device_forward import Bounds, DeviceForward
from app.engine.device_step import Sizes, Way, num_words, views_of
from app.engine.encode_device import DeviceEncodeRunner
from app.engine.encode_device_shapes import TextShape
from app.engine.kv_cache import KVShape
from app.engine.paged_kv import PagedKVCache
from app.kernels.kv_rows import KVRows
from app.kernels.paged import PackedTexts, PagedStep
from app.kernels.paged_torch import packed_texts_torch, paged_attention_torch
from app.kernels.turn import Heads
from app.models.context import AttentionSpec
from fake_device import CUDA, fake_cuda
from loaded_models import load
from operator_table import Listening, has_kernel
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

MAX_LEN = 160
DECODERS = ("LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM")
ENCODERS = ("BertModel", "MPNetModel", "ModernBertModel", "NomicBertModel", "Gemma3TextModel", "BertForSequenceClassification")


class AppleTwin(TwinBackend):
    """Attends as the backend of an Apple GPU does."""

    draws = False

    def attention(self, query: torch.Tensor, kv: KVRows, step: PagedStep, spec: AttentionSpec) -> torch.Tensor:
        return paged_attention_torch(query, kv, step, spec, road(spec))

    def attend_texts(self, heads: Heads, texts: PackedTexts, spec: AttentionSpec) -> torch.Tensor:
        return packed_texts_torch(heads, texts, spec, road(spec))


KINDS: dict[str, type[TwinBackend]] = {"CUDA": TwinBackend, "MPS": AppleTwin}
kinds = pytest.mark.parametrize("kind", KINDS)


def held_to(kind: str, listening: Listening) -> None:
    assert len(listening.operators) > 20
    assert listening.missing(kind) == set()
    assert kind == "CUDA" or torch.float64 not in listening.dtypes


@kinds
@pytest.mark.parametrize("architecture", DECODERS)
def test_a_decoders_operators_are_there(kind: str, architecture: str, tmp_path: Path) -> None:
    model: Any = load(write_checkpoint(tmp_path, architecture), max_model_len=MAX_LEN, device="cuda")
    config, backend = model.config, KINDS[kind](torch.float32)
    with fake_cuda() as device, torch.inference_mode(), Listening() as listening:
        device.move(model)
        decode(model, config, backend)
    held_to(kind, listening)


def decode(model: Any, config: Any, backend: DeviceBackend) -> None:
    """A step of decodes, and one with prompts of which some was read before."""
    cache = PagedKVCache(KVShape(config.num_layers, 4, MAX_LEN, config.num_kv_heads, config.head_dim), torch.float32, 9, CUDA)
    buffer = torch.zeros(4 + num_words(Sizes(40, 4, 4)), dtype=torch.int64, device=CUDA)
    forward = DeviceForward(model, cache, backend, buffer)
    for sizes, bounds in ((Sizes.of_bucket(4), Bounds(4, 1, MAX_LEN)), (Sizes(40, 3, 2), Bounds(1, 37, 90))):
        views = views_of(buffer[4:], sizes, backend.draws)
        logits = forward.logits(views, sizes, bounds)
        forward.pick(logits, views, Way.GREEDY)
        if backend.draws:
            forward.pick(logits, views, Way.FILTERED)


@kinds
@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoders_operators_are_there(kind: str, architecture: str, tmp_path: Path) -> None:
    model: Any = load(write_encoder(tmp_path / "model", architecture), device="cuda")
    runner, outputs = DeviceEncodeRunner(model, KINDS[kind](torch.float32), 80), model.config.outputs
    with fake_cuda() as device, torch.inference_mode(), Listening() as listening:
        device.move(model)
        runner._texts._words = device.tensor(runner._texts._words)
        runner._outputs(TextShape(63, 4), 40, outputs)
    held_to(kind, listening)


def test_the_table_knows_what_is_missing() -> None:
    assert has_kernel("index_copy_", "MPS") and has_kernel("add.Tensor", "MPS") and has_kernel("_weight_int4pack_mm", "MPS")
    assert not has_kernel("_flash_attention_forward", "MPS")
    assert has_kernel("_flash_attention_forward", "CUDA") and has_kernel("_convert_weight_to_int4pack", "CUDA")
    assert not has_kernel("_dyn_quant_matmul_4bit", "CUDA"), "of processors alone"
