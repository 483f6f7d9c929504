"""Whole models with int8 KV: close to bf16, equal codes however a prompt is chunked, and equal text when steps are
replayed or preempted, or next to others with deterministic on.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.scheduler.batch import Batch, LogitRow, SampledTokens, ScheduledSpan, Sequence
from app.messages import SamplingParams
from armature_kernels.attention.attention import max_decode_queries
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from native_levels import at_level, levels
from tiny_checkpoints import write_checkpoint

MAX_LEN = 400
LEVELS = levels()
pytestmark = pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")
PROMPTS = [
    torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(length)).tolist()
    for length in (330, 41, 9, 1)
]


class KeepLogits:
    """A sampler's face that keeps what it would have picked from."""

    vocab_size = 320

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, rows: list[LogitRow], masks: object = None) -> list[SampledTokens]:
        self.logits.append(logits.float().clone())
        return [SampledTokens((0,))] * len(rows)


class Bench:
    """A model over a fresh cache of this dtype; with `fixed`, no result depends on what is beside it."""

    def __init__(self, model: Any, dtype: torch.dtype, fixed: bool = False) -> None:
        config = model.config
        self.cache = KvCache(KvShape(config.num_layers, 6, MAX_LEN, config.cache_heads, config.cache_head_dim), dtype)
        self.calibration_file = KeepLogits()
        few = max_decode_queries(config.num_heads, config.num_kv_heads) if fixed else None
        self.runner = CpuDecoderRunner(model, self.cache, CpuBackend(torch.bfloat16), self.calibration_file, few)  # type: ignore[arg-type]

    def run(self, *spans: ScheduledSpan, released: tuple[tuple[int, int, int], ...] = ()) -> Tensor:
        """Logits of the spans that sample."""
        self.calibration_file.logits.clear()
        self.runner.run(Batch(spans, (), released))
        return self.calibration_file.logits[0] if self.calibration_file.logits else torch.empty(0, 320)

    def rows(self, slot: int, num_tokens: int) -> list[Tensor]:
        """All that the cache holds of a slot's first tokens, layer by layer: codes and scales."""
        first = self.cache.row(slot, 0)
        parts = ((kv.keys, kv.values, kv.key_scales, kv.value_scales) for kv in self.cache.layers)
        return [part.narrow(0, first, num_tokens).clone() for layer in parts for part in layer if part is not None]


def part(token_ids: list[int], start: int, end: int, slot: int) -> ScheduledSpan:
    """Positions [start, end), sampled where that is all of them."""
    sequence = Sequence(f"r{slot}", 0, SamplingParams(temperature=1.0), token_ids, len(token_ids))
    return ScheduledSpan(sequence, start, end - start, slot, None, 0, samples=end == len(token_ids))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
def test_it_stays_near_bf16(level: str, architecture: str, tmp_path: Path) -> None:
    """Prompts side by side, then tokens one by one. Logits of standard deviation about 1, in 8-bit products."""
    with at_level(level):
        model = load(write_checkpoint(tmp_path, architecture, seed=11), "int8", max_model_len=MAX_LEN)
        wide, narrow = Bench(model, torch.bfloat16), Bench(model, torch.int8)
        starts = [0] * len(PROMPTS)
        for ahead in (4, 2, 1, 0):
            ends = [max(1, len(prompt) - ahead) for prompt in PROMPTS]
            spans = [
                part(prompt[:end], start, end, slot)
                for slot, (prompt, start, end) in enumerate(zip(PROMPTS, starts, ends, strict=True))
                if start < end
            ]
            expected, found = wide.run(*spans), narrow.run(*spans)
            torch.testing.assert_close(found, expected, atol=0.12, rtol=0.0)
            assert not torch.equal(found, expected)  # it is int8 that attends
            starts = ends


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Gemma2ForCausalLM"])
@pytest.mark.parametrize("chunk", [7, 64, 150])
def test_a_prompt_in_chunks_leaves_the_codes_of_a_whole_one(architecture: str, chunk: int, tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, architecture, seed=11), "int4", max_model_len=MAX_LEN, deterministic=True)
    bench, prompt = Bench(model, torch.int8, fixed=True), PROMPTS[0]
    whole = bench.run(part(prompt, 0, len(prompt), 0))
    for start in range(0, len(prompt), chunk):
        end = min(start + chunk, len(prompt))
        logits = bench.run(part(prompt, start, end, 1), part(PROMPTS[1], start % 9, start % 9 + 1, 2))
    assert torch.equal(logits, whole)
    for first, second in zip(bench.rows(0, len(prompt)), bench.rows(1, len(prompt)), strict=True):
        assert torch.equal(first, second)


def test_computed_again_it_is_as_if_it_had_never_been_preempted(tmp_path: Path) -> None:
    """Its pages go back, another takes the slot, and it is computed again elsewhere: the same codes, the same logits."""
    model = load(
        write_checkpoint(tmp_path, "LlamaForCausalLM", seed=11), "int4", max_model_len=MAX_LEN, deterministic=True
    )
    bench, text = Bench(model, torch.int8, fixed=True), PROMPTS[0]
    bench.run(part(text[:200], 0, 200, 3))
    for end in range(201, 220):
        expected = bench.run(part(text[:end], end - 1, end, 3))
    before = bench.rows(3, 219)
    bench.run(part(PROMPTS[1], 0, 41, 3), released=((3, 0, MAX_LEN),))
    bench.run(part(text[:219], 0, 100, 5))
    assert torch.equal(bench.run(part(text[:219], 100, 219, 5)), expected)
    for first, second in zip(before, bench.rows(5, 219), strict=True):
        assert torch.equal(first, second)
