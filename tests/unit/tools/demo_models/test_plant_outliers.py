"""Planted outliers: a checkpoint that is the same function, with channels that are not alike."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from app.backends.cpu import CpuBackend
from app.engine.calibration.streaming import WindowScorer
from app.weights.checkpoint import open_checkpoint
from loaded_models import load
from tiny_checkpoints import write_checkpoint
from tools.demo_models.plant_outliers import KEY_PAIRS, write


def nats(directory: Path) -> float:
    window = torch.randint(2, 300, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    config = open_checkpoint(directory).model_config
    with torch.inference_mode():
        return WindowScorer(load(directory), config, torch.float32, CpuBackend(torch.float32)).score(window)[0]


def test_it_is_the_same_function_with_channels_that_stand_out(tmp_path):
    plain = write_checkpoint(tmp_path / "plain")
    write(plain, tmp_path / "planted", channels=4, seed=1)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("plain", "planted"))
    assert before.keys() == after.keys()
    assert abs(nats(plain) - nats(tmp_path / "planted")) < 1e-3
    for name in ("model.layers.0.input_layernorm.weight", "model.layers.1.post_attention_layernorm.weight"):
        grown = after[name] / before[name]
        assert int((grown > 29).sum()) == 4 and int((grown == 1).sum()) == grown.numel() - 4
    assert torch.equal(before["model.norm.weight"], after["model.norm.weight"])


def test_keys_that_stand_out_change_nothing_either(tmp_path):
    plain, planted = write_checkpoint(tmp_path / "plain"), tmp_path / "planted"
    write(plain, planted, channels=0, seed=1, keys=40.0)
    assert abs(nats(plain) - nats(planted)) < 1e-3
    before, after = (load_file(directory / "model.safetensors") for directory in (plain, planted))
    config = open_checkpoint(plain).model_config
    name = "model.layers.0.self_attn.k_proj.weight"
    grown = (after[name] / before[name]).view(config.num_kv_heads, config.head_dim, -1).mean(-1)
    assert (grown > 39).sum(-1).tolist() == [2 * KEY_PAIRS] * config.num_kv_heads
