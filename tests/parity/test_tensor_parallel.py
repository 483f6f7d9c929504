"""A model that is split among two ranks, each a process with a simulated device: the tokens of one device."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import pytest
import torch.distributed as dist

from app.errors import PlanImpossible
from app.weights.checkpoint import open_checkpoint
from app.weights.shards import check_shardable
from device_engine import MAX_LEN, DeviceServed, prompt_of, request_of
from loaded_models import load
from ranks import several
from served_families import SERVED, write_family
from tiny_checkpoints import write_checkpoint, write_tokenizer

SHARED = prompt_of(70, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0, max_tokens=40),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01),
    request_of("penalised", SHARED + prompt_of(19, 4), temperature=0.0, repetition_penalty=1.3),
    request_of("several", SHARED + prompt_of(3, 5), seed=6, n=3),
    request_of("beams", prompt_of(20, 6), beam_width=3, max_tokens=10),
    request_of("scored", prompt_of(9, 9), temperature=0.0, prompt_logprobs=1, logprobs=2),
]


# Fused products; biases; norms of heads; norms after the branches, windows and soft caps.
OTHERS = ["Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM", "Gemma3ForCausalLM"]


@pytest.mark.full
@pytest.mark.parametrize(
    "name",
    ["LlamaForCausalLM", "Phi3ForCausalLM", *(pytest.param(name, marks=pytest.mark.nightly) for name in OTHERS)],
)
def test_two_ranks_say_what_one_device_says(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, name, seed=11)
    alone = DeviceServed(load(tmp_path, max_model_len=MAX_LEN, device="cuda")).add(*REQUESTS).finish()
    ended = threading.Event()
    try:
        split = several(tmp_path, 2, ended.set)
        sizes = [split.runner.model.config.num_heads, alone.runner.model.config.num_heads]
        assert sizes[0] * 2 == sizes[1]
        split.add(*REQUESTS).finish()
        assert split.said == alone.said
        assert split.runner.graphs.num_replayed > 10 and split.num_ahead > 10
        assert not ended.is_set()
        for each in multiprocessing.active_children():
            each.kill()
        assert ended.wait(30), "nobody learned that a rank has ended"
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "ranks", "words"),
    [
        ("LlamaForCausalLM", 3, "4 heads, 2 heads of keys and MLPs of 48 cannot all be divided"),
        ("Qwen3MoeForCausalLM", 2, "its mixture of experts is not"),
        ("DeepseekV2ForCausalLM", 2, "is not split yet"),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(name: str, ranks: int, words: str, tmp_path: Path) -> None:
    if name == "LlamaForCausalLM":
        write_checkpoint(tmp_path, name, seed=11)
    else:
        write_family(tmp_path, name, SERVED[name])
        write_tokenizer(tmp_path)
    with pytest.raises(PlanImpossible, match=words):
        check_shardable(open_checkpoint(tmp_path), ranks)
