"""With deterministic on, a request's log-probabilities are equal to the last bit, whatever runs next to it."""

from __future__ import annotations

import random
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.messages import Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import max_decode_queries
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, FixedOrderFactory
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from tiny_checkpoints import write_checkpoint

MAX_LEN, SLOTS = 400, 12
CASES = [
    ("LlamaForCausalLM", "int4"),
    ("Qwen3ForCausalLM", "int8"),
    ("LlamaForCausalLM", "bfloat16"),
    ("LlamaForCausalLM", "float32"),
    ("MistralForCausalLM", "int4"),
    ("Gemma2ForCausalLM", "int4"),
    ("Gemma3ForCausalLM", "int8"),
    ("MixtralForCausalLM", "int8"),
]
OVER = [
    *((*case, torch.float32 if case[1] == "float32" else torch.bfloat16) for case in CASES),
    ("LlamaForCausalLM", "int4", torch.int8),
    ("Gemma2ForCausalLM", "int4", torch.int8),
]
Said = dict[str, list[Any]]
pytestmark = pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def request_of(name: str, prompt: list[int], **params: Any) -> Generate:
    settings = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2, **params}
    return Generate(name, tuple(prompt), SamplingParams(**settings), arrived_at=0.0)


SHARED = prompt_of(70, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0),
    request_of("long", prompt_of(290, 2), temperature=0.0),
    request_of("seeded", SHARED + prompt_of(9, 3), seed=3),
    request_of("shaped", SHARED + prompt_of(33, 4), seed=4, temperature=1.3, top_k=40, top_p=0.95),
    request_of("few", SHARED[:50], seed=5, top_k=5),
    request_of("penalised", SHARED + prompt_of(19, 6), temperature=0.0, repetition_penalty=1.2),
    request_of("short", prompt_of(1, 7), seed=8, max_tokens=40),
]


def served(
    model: torch.nn.Module,
    requests: list[Generate],
    fixed: bool,
    seed: int,
    capacity: int,
    budget: int,
    kv: torch.dtype = torch.bfloat16,
) -> tuple[Said, int]:
    """Tokens and log-probabilities of each request, and how often one was preempted. `seed` says who comes when.

    Where memory is short all come at once."""
    config: Any = model.config
    cache = KvCache(KvShape(config.num_layers, SLOTS, MAX_LEN, config.cache_heads, config.cache_head_dim), kv)
    few = max_decode_queries(config.num_heads, config.num_kv_heads) if fixed else None
    replay = DecoderReplay(cast(Decoder, model), disabled_reason="" if seed % 2 == 0 else "for this test")
    backend = CpuBackend(torch.float32 if kv == torch.float32 else torch.bfloat16)
    runner = CpuDecoderRunner(replay, cache, backend, Sampler(config.vocab_size), few)
    limits = EngineLimits(MAX_LEN, SLOTS // 2, budget)
    engine = DecoderEngine(
        Scheduler(KvSlots(SLOTS, capacity), PrefillBudget(budget), limits, {1}), runner, clock=count().__next__
    )
    said: Said = {}
    dice, waiting, preempted = random.Random(seed), list(requests), 0
    dice.shuffle(waiting)
    rate = 1.0 if capacity < SLOTS * MAX_LEN else 0.2
    while waiting or engine.has_work:
        events = list(engine.add(waiting.pop())) if waiting and (dice.random() < rate or not engine.has_work) else []
        if engine.has_work:
            events += engine.step()
            preempted += 0 if engine.stats is None else engine.stats.preempted
        for event in events:
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, TokensReady | SequenceFinished):
                said.setdefault(event.request_id, []).append(event)
    return {name: told(events) for name, events in said.items()}, preempted


def told(events: list[TokensReady | SequenceFinished]) -> list[Any]:
    return [pair for event in events for pair in zip(event.token_ids, event.logprobs or (), strict=False)]


def model_of(directory: Path, architecture: str, precision: str, deterministic: bool = True) -> torch.nn.Module:
    return load(
        write_checkpoint(directory, architecture, seed=11),
        precision,
        max_model_len=MAX_LEN,
        deterministic=deterministic,
    )


@pytest.mark.cases(test=1, ci=5)
@pytest.mark.parametrize(("architecture", "precision", "kv"), OVER)
def test_neighbours_do_not_change_a_bit(architecture: str, precision: str, kv: torch.dtype, tmp_path: Path) -> None:
    model, room = model_of(tmp_path, architecture, precision), SLOTS * MAX_LEN
    alone: Said = {}
    for request in REQUESTS:
        alone |= served(model, [request], True, 1, room, MAX_LEN, kv)[0]
    assert all(len(said) == request.params.max_tokens for said, request in zip(alone.values(), REQUESTS, strict=True))
    evicted = 0
    for seed in range(2, 5):  # each budget of `roomy`, and steps with and without recording
        roomy, tight = (
            served(model, REQUESTS, True, seed, room, (7, 24, MAX_LEN)[seed % 3], kv),
            served(model, REQUESTS, True, seed, 480, 100, kv),
        )
        assert roomy[0] == alone
        together, preempted = tight
        assert together == alone
        evicted += preempted
    assert evicted > 0


def test_the_comparison_sees_the_last_bits(tmp_path: Path) -> None:
    """Log-probabilities are compared whole: a relative change of 2**-22 before the output layer is found.

    Whether results change without `deterministic` depends on the processor, so that is not asserted.
    """
    model, room = model_of(tmp_path, "LlamaForCausalLM", "float32"), SLOTS * MAX_LEN
    before, _ = served(model, REQUESTS[:1], True, 1, room, MAX_LEN, torch.float32)
    with torch.inference_mode():
        cast(Decoder, model).norm.weight.mul_(1 + 2**-22)
    after, _ = served(model, REQUESTS[:1], True, 1, room, MAX_LEN, torch.float32)
    assert after != before


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_BF16), reason="no products of bf16 here")
@pytest.mark.parametrize("inputs", [31, 64, 577, 2048])
def test_a_lone_row_of_bf16_is_summed_as_one_of_many(inputs: int) -> None:
    """The form that takes a shorter path for a lone row may differ by the order of its sums."""
    weight, x = torch.randn(96, inputs).bfloat16(), torch.randn(13, inputs).bfloat16()
    for form in (FixedOrderFactory().pack(weight, None), Bf16PanelLinear.pack(weight, None)):
        whole, alone = torch.zeros(13, 96), torch.zeros(13, 96)
        form.add_to(whole, x)
        for row in range(13):
            form.add_to(alone[row : row + 1], x[row : row + 1])
        assert torch.equal(whole, alone) or not form.fixed
        torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-4 * inputs**0.5)
