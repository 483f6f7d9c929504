"""Driver that adds requests to an engine and times its steps, and lower bounds of a step.

The lower bounds are counted from the loaded layers: bytes that a step must read, and operations to perform. A served
engine is driven by its worker instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle

import torch

from app.engine.decoder.engine import DecoderEngine
from app.hardware.facts import Facts
from app.hardware.step_times import MIN_PREFILL_TOKENS
from app.messages import Abort, Generate, LoadedAdapter, RequestFailed, SamplingParams
from app.models.decoders.layers import MixtureOfExperts
from armature_bench.console import MeasurementFailed
from armature_bench.http.workload import TokenPrompts
from armature_kernels.ceilings import cache_bytes
from armature_kernels.linear.bf16_panels import HybridLinear
from armature_kernels.linear.linear import Linear, LinearForm

PROMPT_TOKENS = 128
SEGMENT_STEPS = 100  # more steps would measure the growing context instead of the step
MAX_STEPS = 10_000  # limit until all sequences of a workload decode together


class DecoderDriver:
    """Submits prompts to an engine and steps it on this thread.

    Prompts never repeat, so the prefix cache never matches. Decode measurements start with new sequences every
    `segment_steps` steps. `after_step` is called with the seconds of each step, and its numbers of prefilled and
    decoded tokens.
    """

    def __init__(self, engine: DecoderEngine, prompts: TokenPrompts, max_model_len: int) -> None:
        self._engine = engine
        self._prompts = prompts
        self._max_tokens = max_model_len - PROMPT_TOKENS
        self._names = count()
        self._adapters: Iterator[LoadedAdapter | None] = cycle((None,))
        self.after_step: Callable[[float, tuple[int, int]], None] = lambda seconds, tokens: None
        self.segment_steps = min(SEGMENT_STEPS, max(1, self._max_tokens // 2))

    def use_adapters(self, adapters: Sequence[LoadedAdapter | None]) -> None:
        """Give each following request the next of these adapters, in turns."""
        self._adapters = cycle(adapters)

    def decode(self, rows: int, steps: int, context: int = PROMPT_TOKENS) -> list[float]:
        """Return the seconds of `steps` steps, each of which only decodes `rows` sequences after `context` tokens."""
        seconds: list[float] = []
        while len(seconds) < steps:
            seconds += self._decode_segment(rows, min(self.segment_steps, steps - len(seconds)), context)
        return seconds

    def _decode_segment(self, rows: int, steps: int, context: int) -> list[float]:
        # Prompts are prefilled in chunks while earlier sequences already decode.
        # The earlier sequences must not end before the last one has started.
        waiting = rows * context // MIN_PREFILL_TOKENS
        max_tokens = min(steps + 2 * waiting, self._max_tokens + PROMPT_TOKENS - context)
        names = [self._add(context, max_tokens) for _ in range(rows)]
        self._until_decoding(rows)
        seconds: list[float] = []
        while len(seconds) < steps:
            if not self._engine.has_work:
                raise MeasurementFailed("the sequences ended before enough steps were measured: is speculation on?")
            elapsed, tokens = self._step()
            if tokens == (0, rows):
                seconds.append(elapsed)
        for name in names:
            self._engine.abort(Abort(name))
        return seconds

    def beam_search(self, width: int, steps: int) -> list[float]:
        """Return the seconds of `steps` steps of one beam search, each of which decodes all `width` beams."""
        seconds: list[float] = []
        while len(seconds) < steps:
            name = self._add(PROMPT_TOKENS, self._max_tokens, width)
            self._until_decoding(width)
            for _ in range(min(self.segment_steps, steps - len(seconds))):
                elapsed, _ = self._step()
                seconds.append(elapsed)
            self._engine.abort(Abort(name))
        return seconds

    def prefill(self, tokens: int, prompts: int = 1) -> float:
        """Return the seconds from an idle engine to the first token of all `prompts`, submitted together."""
        for _ in range(prompts):
            self._add(tokens, max_tokens=1)
        seconds = 0.0
        while self._engine.has_work:
            seconds += self._step()[0]
        return seconds

    def _until_decoding(self, rows: int) -> None:
        for _ in range(MAX_STEPS):
            if self._step()[1] == (0, rows):
                return
        raise MeasurementFailed(
            f"{rows} sequences never decoded together: the plan runs fewer, or the KV cache is too small"
        )

    def _add(self, num_tokens: int, max_tokens: int, beam_width: int = 1) -> str:
        name = f"bench-{next(self._names)}"
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, beam_width=beam_width)
        prompt, adapter = tuple(self._prompts.prompt(num_tokens)), next(self._adapters)
        refused = self._engine.add(Generate(name, prompt, params, time.monotonic(), adapter=adapter))
        for event in refused:
            if isinstance(event, RequestFailed):
                raise MeasurementFailed(event.error.message)
        return name

    def _step(self) -> tuple[float, tuple[int, int]]:
        """Run one step; return its seconds, and its numbers of prefilled and decoded tokens."""
        start = time.perf_counter()
        self._engine.step()
        elapsed = time.perf_counter() - start
        stats = self._engine.stats
        assert stats is not None, "an engine with work has run a step"
        tokens = stats.prefill_tokens, stats.decode_tokens
        self.after_step(elapsed, tokens)
        return elapsed, tokens


@dataclass(frozen=True, slots=True)
class ProductCosts:
    """Cost of all matrix products of a model.

    `num_bytes` is the size of the weights that every token reads, `expert_bytes` of all experts, of which a token reads
    the share `expert_use`. Operations are multiply-adds times two: per token for the inner layers, and per row of
    logits for the output layer.
    """

    num_bytes: int
    operations_per_token: float
    operations_per_logit_row: float
    cache_bytes: int = 0  # the machine's largest cache
    expert_bytes: int = 0
    expert_use: float = 0.0

    def read_bytes(self, tokens: int) -> int:
        """Return the weight bytes that a step of `tokens` reads from memory; 0 if half of all weights fit in the cache.

        Tokens are expected to choose their experts at random and independently.
        """
        if self.num_bytes + self.expert_bytes <= 2 * self.cache_bytes:
            return 0
        return self.num_bytes + round(self.expert_bytes * (1.0 - (1.0 - self.expert_use) ** tokens))

    def operations(self, tokens: int, logit_rows: int) -> float:
        return tokens * self.operations_per_token + logit_rows * self.operations_per_logit_row


def product_costs(model: torch.nn.Module, vocab_size: int, cache_bytes: int) -> ProductCosts:
    """Count the products of a model for one token, which passes some experts of a mixture.

    The output layer is recognised by `vocab_size`; -1 if there is none. `cache_bytes` is the machine's largest cache.
    """
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    experts = {id(layer) for mixture in mixtures for layer in mixture.experts.modules()}
    use = mixtures[0].routing.top_k / mixtures[0].routing.num_experts if mixtures else 0.0
    output = [layer for layer in layers if layer.out_features == vocab_size]
    inner = [layer for layer in layers if layer.out_features != vocab_size]
    num_bytes = {
        is_expert: sum(
            {id(one.form): _few_rows_bytes(one.form) for one in layers if (id(one) in experts) is is_expert}.values()
        )
        for is_expert in (False, True)
    }
    return ProductCosts(
        num_bytes=num_bytes[False],
        operations_per_token=2.0
        * sum((use if id(layer) in experts else 1.0) * layer.in_features * layer.out_features for layer in inner),
        operations_per_logit_row=2.0 * sum(layer.in_features * layer.out_features for layer in output),
        cache_bytes=cache_bytes,
        expert_bytes=num_bytes[True],
        expert_use=use,
    )


def largest_cache_bytes(facts: Facts, device: torch.device) -> int:
    """Return the bytes of the largest cache of the device that holds the weights."""
    return cache_bytes(device) if device.type != "cpu" else max((cache.size_bytes for cache in facts.caches), default=0)


def _few_rows_bytes(form: LinearForm) -> int:
    """Return the bytes that a product of a few rows reads; a weight in two forms counts once."""
    return form.few.nbytes if isinstance(form, HybridLinear) else form.nbytes
