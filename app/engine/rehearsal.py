"""Steps of a model that is not loaded: a few layers of the checkpoint's own shapes with made-up weights, run as serving would run them.

Nothing is read from the checkpoint and nothing is rounded: bytes are filled with a pattern whose codes and scales are finite and small.
What a step of all layers takes follows from what steps of few take and of fewer (kernels/calibrate.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.backends.base import Backend
from app.engine.batch import Batch, Span
from app.engine.build import KV_DTYPES, few_queries
from app.engine.kv_cache import KVCache, KVShape
from app.engine.replay import Replay
from app.engine.runner import Runner
from app.engine.sampler import Sampler
from app.engine.sequence import sequence_of
from app.hardware.plan import ServingPlan
from app.kernels.hybrid import HybridLinear, HybridPacking
from app.kernels.int_panels import IntPanels
from app.kernels.linear import Linear, LinearForm, Packing
from app.kernels.memory import weights_bytes
from app.kernels.panels import PanelLinear
from app.messages import Generate, SamplingParams
from app.models.config import ModelConfig
from app.models.layers import Embedding, RMSNorm
from app.models.registry import build_model
from app.models.shapes import products_of
from app.weights.choice import OUTPUT_SOURCES, Choice, KeptPacking
from app.weights.load import choice_of

PATTERN = 0x3C  # twice, it is 0.0115 in bf16; once, 60 in eight bits; half of it 12 or 3 in four
WEIGHT = 0.0115  # where a form packs whole weights
MOST_BYTES = 768 * 2**20  # of made-up layers: filled in a fraction of a second, and free again before the model comes
CONTEXT_TOKENS = 1024  # behind each of some sequences, to see what context costs
CONTEXT_ROWS = 8
CHUNK_TOKENS = 64  # of a prompt, behind so much of it
MOST_IDS = 4096  # different tokens in steps
_PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step: `decode` of so many sequences or `prefill` of so many tokens of a prompt, `context` behind each, through `layers` layers."""

    kind: str
    size: int
    layers: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class Extent:
    """How much of a model is made up.

    `cache_bytes`: of the machine's largest cache, which the weights of a step must exceed as those of the whole model do. At least one
    layer in `layers_share`: the less is made of each that is measured. `most_outputs`: of the output layer, whose rest counts as layers.
    """

    cache_bytes: int
    layers_share: int
    most_outputs: int | None = None


class Rehearsal:
    """One way to serve, with few layers; where eight bits are held beside four, eight alone multiply in them.

    Memory is taken as long as this lives.
    """

    def __init__(self, config: ModelConfig, plan: ServingPlan, backend: Backend, extent: Extent) -> None:
        self._whole = config
        self.config = replace(config, vocab_size=min(config.vocab_size, extent.most_outputs or config.vocab_size))
        self.plan = plan
        self._choice = replace(choice_of(plan), most_few=0)
        self._forms: dict[tuple[str, ...], LinearForm] = {}
        self.few_layers = self._count_layers(extent)
        whole = self.few_layers == self.decode_layers  # then nothing has to be worked out from fewer
        self.layer_counts = [self.few_layers] if whole else sorted({1, 2, self.few_layers})
        rows = max(CONTEXT_ROWS, max(self.decode_rows()))
        self.max_len = min(plan.max_model_len.value, plan.max_batch_tokens.value + CONTEXT_TOKENS + CHUNK_TOKENS)
        config = self.config
        shape = KVShape(self.few_layers, rows, self.max_len, config.num_kv_heads, config.head_dim)
        self._num_ids = min(config.vocab_size, MOST_IDS)
        self._kv_cache = KVCache(shape, KV_DTYPES[plan.kv_precision.value])
        self._runners = {layers: self._runner(layers, backend) for layers in self.layer_counts}
        self._remember()
        for layers in self.layer_counts:  # attention learns how much room it wants: before, no step is recorded
            self.step(StepShape("decode", 1, layers))()

    # ---- which steps -------------------------------------------------------------------------------------------------

    def decode_rows(self) -> list[int]:
        """1, 2, 4, … sequences, and as many as may run."""
        return _doubling(1, min(64, self.plan.max_running_seqs.value))

    def prefill_tokens(self) -> list[int]:
        most = min(self.plan.max_batch_tokens.value, self.plan.max_model_len.value)
        return _doubling(min(32, most), most)

    @property
    def context(self) -> int:
        """Tokens behind a sequence that has context; 0 where the model is made for too few. No more memory than the plan gives them."""
        fits = self.plan.kv_cache_bytes.value // (CONTEXT_ROWS * self._kv_cache.bytes_per_token)
        return max(0, min(CONTEXT_TOKENS, self.max_len - CHUNK_TOKENS - 1, fits))

    def step(self, shape: StepShape) -> Callable[[], object]:
        """What runs that step, any number of times."""
        runner = self._runners[shape.layers]
        count, tokens = (shape.size, 1) if shape.kind == "decode" else (1, shape.size)
        batch = Batch(tuple(self._span(slot, shape.context, tokens) for slot in range(count)))
        return lambda: runner.run(batch)

    def _span(self, slot: int, start: int, num_tokens: int) -> Span:
        token_ids = tuple(index % self._num_ids for index in range(start + num_tokens))
        sequence = sequence_of(Generate(f"rehearsal-{slot}", token_ids, _PARAMS, arrived_at=0.0), 0, frozenset())
        return Span(sequence, start, num_tokens, slot=slot, prefix_slot=None, prefix_tokens=0, samples=True)

    # ---- what is said of the whole model -----------------------------------------------------------------------------

    @property
    def read_bytes(self) -> int:
        """Weights that a decode step of the whole model reads."""
        layer, output = self._sizes(self._whole)
        return self._whole.num_layers * layer + output

    @property
    def operations_per_token(self) -> float:
        """Multiply-adds of all layers for one token, times two."""
        return 2.0 * sum(rows * columns for (rows, columns), _ in products_of(self._whole))

    @property
    def decode_layers(self) -> float:
        """How many layers a decode step has, if what is left out of the output layer is made of layers too."""
        layer, output = self._sizes(self._whole)
        return self._whole.num_layers + (output - self._sizes(self.config)[1]) / layer

    # ---- the model ---------------------------------------------------------------------------------------------------

    def _sizes(self, config: ModelConfig) -> tuple[int, int]:
        """Bytes that a layer's products read, and the output layer's."""
        model = build_model(_with_layers(config, 1), self._choice.dtype, 1, torch.device("cpu"))
        linears = [module for module in model.modules() if isinstance(module, Linear)]
        output = sum(_read_bytes(self._choice, one) for one in linears if one.sources in OUTPUT_SOURCES)
        return sum(_read_bytes(self._choice, one) for one in linears) - output, output

    def _count_layers(self, extent: Extent) -> int:
        """So many that they and the output layer exceed the cache twice; at least two, so that one more can be told from one."""
        layer, output = self._sizes(self.config)
        wanted = max(
            2, math.ceil((2 * extent.cache_bytes - output) / layer), math.ceil(self.config.num_layers / extent.layers_share)
        )
        return min(self.config.num_layers, wanted, max(2, MOST_BYTES // layer))

    def _runner(self, layers: int, backend: Backend) -> Runner:
        model = build_model(_with_layers(self.config, layers), self._choice.dtype, self.max_len, backend.device)
        modules = list(model.modules())
        for module in modules:
            if isinstance(module, RMSNorm):
                module.adopt(torch.ones(module.weight.shape))
            elif isinstance(module, Linear):
                module.form = self._form(module)
        for module in modules:
            if isinstance(module, Embedding):
                self._embed(module)
        off = "" if self.plan.compile.value else self.plan.compile.reason
        replay = Replay(model, off, seen_before=0)
        return Runner(replay, self._kv_cache, backend, Sampler(self.config.vocab_size), few_queries(self.config, self.plan))

    def _form(self, linear: Linear) -> LinearForm:
        """The same weight for the same layer, whichever model asks."""
        if linear.sources not in self._forms:
            bias = torch.zeros(linear.out_features, dtype=self._choice.dtype) if linear.has_bias else None
            self._forms[linear.sources] = _made_up(self._choice.packing(linear), linear, bias, self._choice.dtype)
        return self._forms[linear.sources]

    def _embed(self, embedding: Embedding) -> None:
        """As loading does; of a table of its own only the rows that steps look up."""
        tied = self._forms.get((embedding.source,))
        if isinstance(tied, PanelLinear | IntPanels | HybridLinear):
            embedding.share(tied)
        else:
            embedding.adopt(torch.full((self._num_ids, self.config.hidden_size), WEIGHT, dtype=torch.bfloat16))

    def _remember(self) -> None:
        """Keys and values behind those that have context: pages that nobody wrote would be read from one page of zeros."""
        shape = (self.context, self.config.num_kv_heads, self.config.head_dim)
        generator = torch.Generator().manual_seed(0)
        some = torch.randn(shape, generator=generator).to(self._choice.dtype)
        for slot in range(CONTEXT_ROWS if self.context else 0):
            rows = torch.arange(self.context) + self._kv_cache.row(slot, 0)
            for layer in range(self.few_layers):
                self._kv_cache.write(layer, rows, some, some)


def _made_up(packing: Packing, linear: Linear, bias: Tensor | None, dtype: torch.dtype) -> LinearForm:
    outputs, inputs = linear.out_features, linear.in_features
    if isinstance(packing, KeptPacking):
        return packing.restored(outputs, inputs, bias, [_filled(nbytes) for nbytes in packing.part_bytes(outputs, inputs)])
    empty = packing.room(outputs, inputs, bias)
    if isinstance(empty, PanelLinear):
        empty.panels.fill_(PATTERN)
        return empty
    return packing.pack(torch.full((outputs, inputs), WEIGHT, dtype=dtype), bias)


def _filled(nbytes: int) -> Tensor:
    return weights_bytes(nbytes).fill_(PATTERN)


def _read_bytes(choice: Choice, linear: Linear) -> int:
    """What a product of few rows reads."""
    packing = choice.packing(linear)
    packing = packing.few if isinstance(packing, HybridPacking) else packing
    if isinstance(packing, KeptPacking):
        return sum(packing.part_bytes(linear.out_features, linear.in_features))
    return linear.out_features * linear.in_features * choice.dtype.itemsize


def _with_layers(config: ModelConfig, layers: int) -> ModelConfig:
    return replace(config, num_layers=layers, windows=config.windows[:layers], ropes=config.ropes[:layers])


def _doubling(first: int, most: int) -> list[int]:
    """first, 2 · first, … and `most` itself."""
    return [*_powers(first, most), most]


def _powers(first: int, most: int) -> Iterator[int]:
    while first < most:
        yield first
        first *= 2
