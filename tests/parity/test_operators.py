"""Every operator that serving asks of a device has a kernel there, by torch's own table; and on an Apple GPU nothing is FP64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.base import DeviceBackend
from app.backends.mps import attention_function
from app.engine.decoder.device_inputs import (
    SamplingMode,
    StepSizes,
    block_size,
    block_views,
    sampling_size,
    sampling_views,
)
from app.engine.decoder.device_runner import DeviceForward, StepBounds, first_rows
from app.engine.decoder.kv_cache import kv_shape_of
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.encoder.device_runner import DeviceEncoderRunner, TextBatchShape
from armature_kernels.attention.attention import KvRows, QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.device_recurrence import RowRun
from armature_kernels.attention.paged import PackedTexts, PagedStep, attend_heads_torch, attend_texts_padded_torch
from fake_device import CUDA, fake_cuda
from loaded_models import load
from operator_table import Listening, has_kernel
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

MAX_LEN = 160
DECODERS = (
    *("LlamaForCausalLM", "Gemma2ForCausalLM", "Phi3ForCausalLM", "Qwen3ForCausalLM"),
    *("Qwen3_5ForCausalLM", "NemotronHForCausalLM"),
)
ENCODERS = (
    "BertModel",
    "MPNetModel",
    "ModernBertModel",
    "NomicBertModel",
    "Gemma3TextModel",
    "BertForSequenceClassification",
)


class AppleSimulatedDevice(SimulatedDeviceBackend):
    """Attends as the backend of an Apple GPU does."""

    can_sample = False

    def attention(
        self, heads: QkvHeads, kv: KvRows, written: torch.Tensor, step: PagedStep, spec: AttentionSpec
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return attend_heads_torch(heads, kv, written, step, spec, attention_function(spec))

    def encoder_attention(self, heads: QkvHeads, texts: PackedTexts, spec: AttentionSpec) -> torch.Tensor:
        return attend_texts_padded_torch(heads, texts, spec, attention_function(spec))


KINDS: dict[str, type[SimulatedDeviceBackend]] = {"CUDA": SimulatedDeviceBackend, "MPS": AppleSimulatedDevice}
kinds = pytest.mark.parametrize("kind", KINDS)


def held_to(kind: str, listening: Listening) -> None:
    assert len(listening.operators) > 20
    assert listening.missing(kind) == set()
    assert kind == "CUDA" or torch.float64 not in listening.dtypes


@pytest.mark.cases(test=1, ci=6)
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
    cache = PagedKvCache(kv_shape_of(config, 4, MAX_LEN), torch.float32, 9, CUDA)
    buffer = torch.zeros(4 + block_size(StepSizes(40, 4, 4)), dtype=torch.int64, device=CUDA)
    forward = DeviceForward(model, cache, backend, buffer)
    for sizes, bounds in (
        (StepSizes.of_bucket(4), StepBounds(4, 1, MAX_LEN, num_states=4)),
        (StepSizes(40, 3, 2), StepBounds(1, 37, 90, num_states=1, runs=[RowRun(1, 2, 8, 3), RowRun(3, 37, 4, 5)])),
    ):
        views = block_views(buffer[4:], sizes)
        logits = forward.logits(views, sizes, bounds)
        forward.sample(logits, None, SamplingMode.GREEDY)
        if backend.can_sample:
            parameters = sampling_views(torch.zeros(sampling_size(4), dtype=torch.int64, device=CUDA), 4)
            forward.sample(logits, first_rows(parameters, sizes.samples), SamplingMode.FILTERED)


@pytest.mark.cases(test=3)
@kinds
@pytest.mark.parametrize("architecture", ENCODERS)
def test_an_encoders_operators_are_there(kind: str, architecture: str, tmp_path: Path) -> None:
    model: Any = load(write_encoder(tmp_path / "model", architecture), device="cuda")
    runner, outputs = DeviceEncoderRunner(model, KINDS[kind](torch.float32), 80), model.config.outputs
    with fake_cuda() as device, torch.inference_mode(), Listening() as listening:
        device.move(model)
        runner._texts._buffer = device.tensor(runner._texts._buffer)
        runner._outputs(TextBatchShape(63, 4), 40, outputs)
    held_to(kind, listening)


def test_the_table_knows_what_is_missing() -> None:
    assert (
        has_kernel("index_copy_", "MPS")
        and has_kernel("add.Tensor", "MPS")
        and has_kernel("_weight_int4pack_mm", "MPS")
    )
    assert not has_kernel("_flash_attention_forward", "MPS")
    assert has_kernel("_flash_attention_forward", "CUDA") and has_kernel("_convert_weight_to_int4pack", "CUDA")
    assert not has_kernel("_dyn_quant_matmul_4bit", "CUDA"), "of processors alone"
