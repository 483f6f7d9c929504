"""Batches made by hand, through the runner, the KV cache and the processor's attention, against a plain loop over one sequence.

Tolerance 1e-4 absolute on FP32 logits of standard deviation about 1: the order of sums differs, nothing else does.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_shape_of
from app.engine.scheduler.batch import Batch, KvCopy, LogitRow, SampledTokens, ScheduledSpan, Sequence, StateCopy
from app.messages import SamplingParams
from loaded_models import load
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import ARCHITECTURES, OTHERS, RECURRENT, write_checkpoint

LENGTHS = (37, 5, 21, 1, 60, 12)
MAX_LEN = 128


class KeepLogits:
    """A sampler's face that keeps what it would have picked from."""

    vocab_size = 320

    def __init__(self) -> None:
        self.logits: list[Tensor] = []

    def sample(self, logits: Tensor, rows: list[LogitRow], masks: object = None) -> list[SampledTokens]:
        self.logits.append(logits.float().clone())
        return [SampledTokens((0,))] * len(rows)


class Bench:
    """One model with a fresh KV cache, and what a plain loop says of the same tokens."""

    def __init__(self, directory: Path) -> None:
        self.model = load(directory, max_model_len=MAX_LEN)
        config = self.model.config
        shape = kv_shape_of(config, 12, MAX_LEN)
        self.calibration_file = KeepLogits()
        self.runner = CpuDecoderRunner(
            self.model, KvCache(shape, torch.float32), CpuBackend(torch.float32), self.calibration_file
        )  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(1)
        self.prompts = [torch.randint(4, 320, (length,), generator=generator).tolist() for length in LENGTHS]

    @torch.inference_mode()
    def plain(self, token_ids: list[int]) -> Tensor:
        """Logits [tokens, vocab] of one sequence."""
        logits: Tensor = self.model(context_of(token_ids, PlainAttend()))
        return logits

    def run(
        self,
        *spans: ScheduledSpan,
        copies: tuple[KvCopy, ...] = (),
        released: tuple[tuple[int, int, int], ...] = (),
        states: tuple[StateCopy, ...] = (),
    ) -> Tensor:
        """Logits of the spans that sample."""
        self.calibration_file.logits.clear()
        self.runner.run(Batch(spans, copies, released, state_copies=states))
        return self.calibration_file.logits[0] if self.calibration_file.logits else torch.empty(0, 320)


def part(token_ids: list[int], start: int, end: int, slot: int, prefix: tuple[int, int] | None = None) -> ScheduledSpan:
    """Positions [start, end), sampled where that is all of them; `prefix` is (slot, tokens)."""
    sequence = Sequence(f"r{slot}", 0, SamplingParams(), token_ids, len(token_ids))
    prefix_slot, prefix_tokens = prefix or (None, 0)
    return ScheduledSpan(sequence, start, end - start, slot, prefix_slot, prefix_tokens, samples=end == len(token_ids))


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, atol=1e-4, rtol=0.0)


@pytest.fixture(params=(*ARCHITECTURES, *OTHERS, *RECURRENT))
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Bench:
    return Bench(write_checkpoint(tmp_path, request.param, seed=5))


def test_a_ragged_batch_equals_batches_of_one(bench: Bench) -> None:
    logits = bench.run(*(part(prompt, 0, len(prompt), slot) for slot, prompt in enumerate(bench.prompts)))
    close(logits, torch.stack([bench.plain(prompt)[-1] for prompt in bench.prompts]))


@pytest.mark.cases(test=7)
@pytest.mark.parametrize("chunk", [1, 7, 16])
def test_a_chunked_prefill_equals_a_whole_one(bench: Bench, chunk: int) -> None:
    """Two prompts in chunks side by side, in slots that are not neighbours."""
    long, short = bench.prompts[0], bench.prompts[2]
    for start in range(0, len(long), chunk):
        both = [(prompt, slot) for prompt, slot in ((long, 9), (short, 2)) if start < len(prompt)]
        logits = bench.run(*(part(prompt, start, min(start + chunk, len(prompt)), slot) for prompt, slot in both))
        ending = [prompt for prompt, _ in both if start + chunk >= len(prompt)]
        close(logits, torch.stack([bench.plain(prompt)[-1] for prompt in ending]) if ending else torch.empty(0, 320))


@pytest.mark.cases(test=7)
def test_decoding_beside_a_prefill_equals_the_whole_text(bench: Bench) -> None:
    """Every step: one decode token each for two sequences, and the next chunk of a third."""
    first, second, third = bench.prompts[4], bench.prompts[0], bench.prompts[2]
    bench.run(part(first, 0, 40, 0), part(second, 0, 20, 1))
    expected = [bench.plain(first), bench.plain(second)]
    for step in range(10):
        ends = (41 + step, 21 + step)
        spans = [
            part(text[:end], end - 1, end, slot)
            for slot, (text, end) in enumerate(zip((first, second), ends, strict=True))
        ]
        logits = bench.run(*spans, part(third, 2 * step, 2 * step + 2, 2))
        close(logits[:2], torch.stack([logits[end - 1] for logits, end in zip(expected, ends, strict=True)]))


@pytest.mark.cases(test=8)
@pytest.mark.parametrize("shared", [1, 6, 30])
def test_a_shared_prefix_equals_an_unshared_one(bench: Bench, shared: int) -> None:
    """Two tails lean on the first tokens of another slot: prefilled in a chunk and token by token, both beside the owner's decode."""
    owner = bench.prompts[4]
    tails = [owner[:shared] + bench.prompts[0], owner[:shared] + bench.prompts[2]]
    bench.run(part(owner[:50], 0, shared, 3))
    if bench.model.config.state_sizes:
        bench.run(states=((3, 6, shared), (3, 7, shared)))
    bench.run(part(owner[:50], shared, 50, 3))
    whole, stepwise = (bench.plain(tail) for tail in tails)
    for end in range(shared + 1, len(tails[1]) + 1):
        logits = bench.run(
            part(tails[1][:end], end - 1, end, 7, (3, shared)),
            part(owner[: 51 + end % 9], 50 + end % 9, 51 + end % 9, 3),
        )
        close(logits[0], stepwise[end - 1])
    half = (shared + len(tails[0])) // 2
    bench.run(part(tails[0], shared, half, 6, (3, shared)))
    close(bench.run(part(tails[0], half, len(tails[0]), 6, (3, shared)))[0], whole[-1])


def test_a_fork_goes_on_from_its_copy_and_the_source_may_be_released(bench: Bench) -> None:
    """The child leans on the prompt, gets the parent's tail by copy, and the parent's pages go back in the same batch."""
    prompt, tail = bench.prompts[0], bench.prompts[2]
    bench.run(part(prompt, 0, len(prompt), 0))
    parent = prompt + tail[:8]
    if bench.model.config.state_sizes:  # the parent is itself a fork, and its child too
        bench.run(states=((0, 1, len(prompt)),))
    bench.run(part(parent, len(prompt), len(parent), 1, (0, len(prompt))))
    child = parent + tail[8:10]
    fork = KvCopy(1, 2, len(prompt), len(parent))
    logits = bench.run(
        part(child, len(parent), len(child), 2, (0, len(prompt))),
        copies=(fork,),
        released=((1, 0, MAX_LEN),),
        states=((1, 2, len(parent)),) if bench.model.config.state_sizes else (),
    )
    close(logits[0], bench.plain(child)[-1])


def test_a_recomputed_sequence_equals_one_that_was_never_preempted(bench: Bench) -> None:
    """Its pages are given back, another sequence uses the slot, and it is computed again elsewhere, completion and all."""
    text, other = bench.prompts[4], bench.prompts[0]
    bench.run(part(text[:30], 0, 30, 5))
    for end in range(31, 40):
        bench.run(part(text[:end], end - 1, end, 5))
    bench.run(part(other, 0, len(other), 5), released=((5, 0, MAX_LEN),))
    bench.run(part(text[:40], 0, 11, 8))
    close(bench.run(part(text[:40], 11, 40, 8))[0], bench.plain(text[:40])[-1])
    close(bench.run(part([*other, 9], len(other), len(other) + 1, 5))[0], bench.plain([*other, 9])[-1])


@pytest.mark.parametrize("architecture", RECURRENT)
def test_a_prompt_cut_anywhere_says_what_it_says_whole(architecture: str, tmp_path: Path) -> None:
    """In a slot in which another sequence has left its state, beside one that decodes."""
    bench = Bench(write_checkpoint(tmp_path, architecture, seed=7))
    prompt, other = bench.prompts[0][:13], bench.prompts[4]
    expected, beside = bench.plain(prompt)[-1], bench.plain(other)
    bench.run(part(other[:20], 0, 20, 2))
    for cut in range(1, len(prompt)):
        bench.run(part(prompt, 0, cut, 4))
        decoded, found = bench.run(part(other[: 20 + cut], 19 + cut, 20 + cut, 2), part(prompt, cut, len(prompt), 4))
        close(found, expected)
        close(decoded, beside[19 + cut])


def test_bfloat16_stays_near_float32(tmp_path: Path) -> None:
    """Logits of standard deviation about 1; bfloat16 keeps 8 bits, and each of two layers rounds a handful of times: 0.02 was measured."""
    directory = write_checkpoint(tmp_path, "LlamaForCausalLM", seed=5, dtype=torch.bfloat16)
    exact, rough = Bench(directory), load(directory, "bfloat16", MAX_LEN)
    config = rough.config
    cache = KvCache(KvShape(config.num_layers, 8, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.bfloat16)
    kept = KeepLogits()
    runner = CpuDecoderRunner(rough, cache, CpuBackend(torch.bfloat16), kept)  # type: ignore[arg-type]
    runner.run(Batch(tuple(part(prompt, 0, len(prompt), slot) for slot, prompt in enumerate(exact.prompts))))
    expected = torch.stack([exact.plain(prompt)[-1] for prompt in exact.prompts])
    torch.testing.assert_close(kept.logits[0], expected, atol=0.04, rtol=0.0)
