"""A step on fake GPU tensors: nothing is on the CPU, nothing waits for the device, and shapes are right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.decoder.device_inputs import (
    SamplingMode,
    StepSizes,
    block_size,
    block_views,
    sampling_size,
    sampling_views,
)
from app.engine.decoder.device_runner import DeviceForward, StepBounds, first_rows
from app.engine.decoder.kv_cache import KvShape
from app.engine.decoder.paged_kv_cache import PagedKvCache
from fake_device import CUDA, fake_cuda
from loaded_models import load
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import write_checkpoint

MAX_LEN = 160


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma3ForCausalLM", "Phi3ForCausalLM"])
def test_nothing_of_a_step_is_here_and_nothing_waits(architecture: str, tmp_path: Path) -> None:
    model: Any = load(write_checkpoint(tmp_path, architecture), max_model_len=MAX_LEN, device="cuda")
    config, backend = model.config, SimulatedDeviceBackend(torch.float32)
    with fake_cuda() as device, torch.inference_mode():
        device.move(model)
        cache = PagedKvCache(
            KvShape(config.num_layers, 4, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.float32, 9, CUDA
        )
        buffer = torch.zeros(4 + block_size(StepSizes(40, 4, 4)), dtype=torch.int64, device=CUDA)
        forward = DeviceForward(model, cache, backend, buffer)
        for sizes, bounds in (
            (StepSizes.of_bucket(4), StepBounds(4, 1, MAX_LEN)),
            (StepSizes(40, 3, 2), StepBounds(1, 37, 90)),
        ):
            views = block_views(buffer[4:], sizes)
            logits = forward.logits(views, sizes, bounds)
            assert logits.shape == (sizes.samples, config.vocab_size) and logits.device == CUDA
            parameters = sampling_views(torch.zeros(sampling_size(4), dtype=torch.int64, device=CUDA), 4)
            mode = SamplingMode.GREEDY if sizes.tokens > 4 else SamplingMode.FILTERED
            forward.sample(logits, first_rows(parameters, sizes.samples), mode)
