"""Tensors of a batch, the order of memory moves, and the sampled rows, with a fake model and sampler."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from app.backends.cpu import AttentionRow, CpuBackend, Segment, context_segments, reference_attention
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.scheduler.batch import Batch, KvCopy, LogitRow, SampledTokens, ScheduledSpan, Sequence
from app.messages import SamplingParams
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext

SHAPE = KvShape(num_layers=2, num_slots=4, max_len=64, num_kv_heads=2, head_dim=4)
SPEC = AttentionSpec(0.5)


class Watched(nn.Module):
    """A model that keeps what it was given, and lets a test look at the step from inside."""

    def __init__(self, inside: Callable[[StepContext], None] = lambda context: None) -> None:
        super().__init__()
        self.inside = inside
        self.contexts: list[StepContext] = []

    def forward(self, context: StepContext) -> Tensor:
        self.contexts.append(context)
        assert torch.is_inference_mode_enabled()
        self.inside(context)
        rows = context.token_ids if context.logit_rows is None else context.token_ids[context.logit_rows]
        return rows.unsqueeze(1).expand(-1, 10).float()


class Echo:
    """Picks the first logit, which the model above makes the last token's id."""

    vocab_size = 320

    def sample(self, logits: Tensor, rows: list[LogitRow], masks: object = None) -> list[SampledTokens]:
        assert len(logits) == len(rows)
        return [SampledTokens((int(row[0]),)) for row in logits]


def runner_with(model: nn.Module, cache: KvCache | None = None) -> CpuDecoderRunner:
    return CpuDecoderRunner(model, cache or KvCache(SHAPE, torch.float32), CpuBackend(torch.float32), Echo())  # type: ignore[arg-type]


def span_of(
    token_ids: list[int], start: int, num_tokens: int, slot: int, samples: bool = True, prefix: tuple[int, int] = (0, 0)
) -> ScheduledSpan:
    sequence = Sequence(f"r{slot}", 0, SamplingParams(), token_ids, len(token_ids))
    return ScheduledSpan(sequence, start, num_tokens, slot, prefix[0] if prefix[1] else None, prefix[1], samples)


def test_a_batch_becomes_flat_tensors_and_one_sample_for_each_span_that_samples() -> None:
    model = Watched()
    spans = (
        span_of([1, 2, 3, 4], 3, 1, slot=0),
        span_of([5, 6, 7, 8, 9], 1, 3, slot=1, samples=False),
        span_of([3, 2, 1], 0, 3, slot=2),
    )
    picked = runner_with(model).run(Batch(spans))
    (context,) = model.contexts
    assert context.token_ids.tolist() == [4, 6, 7, 8, 3, 2, 1]
    assert context.positions.tolist() == [3, 1, 2, 3, 0, 1, 2]
    assert context.logit_rows is not None and context.logit_rows.tolist() == [0, 6]
    assert {tensor.dtype for tensor in (context.token_ids, context.positions, context.logit_rows)} == {torch.int64}
    assert picked == [SampledTokens((4,)), SampledTokens((1,))]


def test_a_step_of_chunks_alone_writes_the_cache_and_samples_nothing() -> None:
    model = Watched()
    assert runner_with(model).run(Batch((span_of([1, 2, 3], 0, 2, slot=0, samples=False),))) == []
    assert model.contexts[0].logit_rows is not None and model.contexts[0].logit_rows.tolist() == []


def test_copies_come_first_then_releases_then_the_step() -> None:
    """The copy's source is released in the same batch, and the step writes behind the copy."""
    cache = KvCache(SHAPE, torch.float32)
    key, value = torch.randn(2, 64, 2, 4).unbind(0)
    for layer in range(2):
        cache.write(layer, torch.arange(64) + cache.row(1, 0), key, value)
    seen: list[Tensor] = []

    def inside(context: StepContext) -> None:
        (segment,) = context_segments(cache.kv_segments(span_of([0] * 41, 0, 41, slot=3)), cache.layers[0])
        seen.append(segment.key.clone())
        (source,) = context_segments(cache.kv_segments(span_of([0] * 64, 0, 64, slot=1)), cache.layers[0])
        seen.append(source.key.clone())

    batch = Batch((span_of([0] * 41, 40, 1, slot=3),), (KvCopy(1, 3, 0, 40),), ((1, 0, 64),))
    runner_with(Watched(inside), cache).run(batch)
    torch.testing.assert_close(seen[0][:40], key[:40])
    assert not bool(seen[1].any()), "the released pages read as zeros"


def test_attention_writes_this_steps_keys_and_sees_the_prefix_and_the_tail() -> None:
    """Two sequences share slot 0's first 5 tokens; both layers are written before they are read."""
    cache, generator = KvCache(SHAPE, torch.float32), torch.Generator().manual_seed(3)
    shared = torch.randn((2, 2, 5, 2, 4), generator=generator)  # layer, key or value, ...
    for layer in range(2):
        cache.write(layer, torch.arange(5), *shared[layer].unbind(0))
    query = torch.randn((5, 4, 4), generator=generator)
    fresh = torch.randn((2, 2, 5, 2, 4), generator=generator)
    heads = [QkvHeads(torch.cat((query, *fresh[layer].unbind(0)), 1).flatten(1), 4, 2, 4) for layer in range(2)]
    results: list[Tensor] = []

    def inside(context: StepContext) -> None:
        results.extend(context.attend(layer, heads[layer], SPEC).view(5, 4, 4) for layer in range(2))

    spans = (span_of([0] * 7, 5, 2, slot=1, prefix=(0, 5)), span_of([0] * 6, 3, 3, slot=2, prefix=(0, 3)))
    runner_with(Watched(inside), cache).run(Batch(spans))
    for layer in range(2):
        rows = []
        for first, start, length, prefix in ((0, 5, 2, 5), (2, 3, 3, 3)):
            context = [
                torch.cat([shared[layer, part, :prefix], fresh[layer, part, first : first + length]]) for part in (0, 1)
            ]
            rows.append(AttentionRow(first, length, start, (Segment(*context, 0),)))
        torch.testing.assert_close(results[layer], reference_attention(query, rows, SPEC))
