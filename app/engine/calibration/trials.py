"""Times steps of a model that is not loaded, with synthetic weights and run as in serving: a few layers of its shapes.

The time of all layers is extrapolated from different numbers of layers (armature_kernels/timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from app.backends.base import HostBackend
from app.engine.calibration.synthetic_weights import (
    FILL_BYTE,
    MAX_TOKEN_IDS,
    SyntheticForms,
    SyntheticMemory,
    TrialScope,
    fill_table,
    fill_vectors,
    num_trial_layers,
    synthetic_form,
)
from app.engine.decoder.build import deterministic_query_limit
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.cuda_graphs import LARGEST_BUCKET
from app.engine.decoder.kv_cache import KvCache, KvShape, kv_dtype, kv_shape_of
from app.engine.encoder.batching import EncodeState, TextSpan
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.program import INPUT_ERRORS, cannot_run, load_served, max_step_rows, synthetic_inputs
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Batch, ScheduledSpan, make_sequence
from app.errors import StepFailed
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import TABLE_TEXT_TOKENS
from app.messages import Encode, Generate, SamplingParams, Text
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Decoder, Embedding, build_decoder_model
from app.models.decoders.shapes import active_weights
from app.models.encoders.config import EncoderConfig, encoder_products_of
from app.models.encoders.encoder import DistanceBias, Encoder, build_encoder_model
from app.models.encoders.heads import DenseLayer, LayerNorm
from app.weights.form_choice import form_choice
from app.weights.load import ProgramValues, read_flat
from app.weights.program import Archive, ProgramCheckpoint, StoredTensor, operations_per_row, read_bytes
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, HybridLinear
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import FormFactory, Linear, LinearForm
from armature_kernels.native.memory import allocate_weights
from armature_kernels.timing import MAX_ADJUSTMENT, extrapolate_by_size, monotone_table

CONTEXT_TOKENS = 1024  # context tokens of some sequences, to measure the cost of context
CONTEXT_ROWS = 8
CHUNK_TOKENS = 64  # tokens of a prompt that follow this context
OPTIONAL_ROWS = 32  # decode steps with more rows are timed last, if there is time
MAX_DECODE_ROWS = {"cpu": 64}  # sequences of a step; with more, products gain little on a CPU
_PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
DEFAULT_STEP_ROWS = 32  # a plan has smaller steps only if the user asked for them
MAX_STEP_ROWS = 256  # rows of a step
LARGE_BYTES = 4 * 2**20  # bytes of a tensor
FILLED_BYTES = 2**28  # a larger tensor is a table of which a step reads some rows: its pages stay untouched
MIN_STEP_TOKENS = 16  # tokens of one short text
MAX_STEP_TOKENS = 2048  # tokens of a step; products have reached their best rate long before
# a plan has smaller steps only if the user or the memory requires it: then larger ones are not timed
DEFAULT_STEP_TOKENS = 512
# up to this many tokens, reading weights may cost more than multiplying, so steps read as much as in the whole model
MEMORY_BOUND_TOKENS = 64
LONG_TEXT_TOKENS = 512  # tokens of the one text that shows the cost of attention
RunTexts = Callable[[Sequence[TextSpan]], object]
# (model, most tokens of a batch) -> a function that runs a batch to its end
TextRunnerFactory = Callable[[Encoder, int], RunTexts]
COARSE_LAYERS, FULL_LAYERS = 8, 4  # one layer in this many is built
COARSE_OUTPUTS = 2048
RunBatch = Callable[[Batch], object]


@dataclass(frozen=True, slots=True)
class TrialStep:
    """A step through `layers` layers: `size` decodes or `size` tokens of a prompt, after `context` tokens each.

    Kind `encode`: `size` tokens of texts that have `context` tokens each (0: as in the table).
    """

    kind: str
    size: int
    layers: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class TrialShape:
    """The steps of a trial: rows of decodes, tokens of a prompt and of texts (empty: all that matter)."""

    layers_share: int
    rows: tuple[int, ...] = ()
    tokens: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()
    most_outputs: int | None = None
    context: bool = False


FULL_TRIAL = TrialShape(FULL_LAYERS, context=True)


COARSE_TRIAL = TrialShape(COARSE_LAYERS, rows=(1, 8), tokens=(128,), texts=(16, 256), most_outputs=COARSE_OUTPUTS)


class ModelTrial(Protocol):
    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        """Return the steps to time, the fastest first, since time may run out."""

    def step(self, shape: TrialStep) -> Callable[[], object]: ...

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        """Return the result for the whole model, or None if steps are missing or fall by over `max_adjustment`."""


def doubling_sizes(first: int, most: int) -> list[int]:
    """Return first, 2 · first, 4 · first, … and finally `most` itself."""
    sizes = []
    while first < most:
        sizes.append(first)
        first *= 2
    return [*sizes, most]


class TrialStage(Protocol):
    """The KV memory for the models of a trial, which have few layers and share it."""

    bytes_per_token: int

    def runner(self, model: Decoder) -> RunBatch: ...

    def fill_context(self, slot: int, num_tokens: int) -> None:
        """Write keys and values at the beginning of a slot: memory never written is read from a single page."""


StageFactory = Callable[[ModelConfig, ServingPlan, KvShape], TrialStage]


class CpuTrialStage:
    """The stage on a CPU, built as `build_decoder_engine` does it."""

    def __init__(self, backend: HostBackend, config: ModelConfig, plan: ServingPlan, shape: KvShape) -> None:
        self._backend, self._config, self._plan = backend, config, plan
        self._kv_cache = KvCache(shape, kv_dtype(plan))
        self.bytes_per_token = self._kv_cache.bytes_per_token

    def runner(self, model: Decoder) -> RunBatch:
        off = "" if self._plan.steps.compile else self._plan.decisions["compile"].reason
        replay = DecoderReplay(model, off, record_after=0)
        sampler, few = Sampler(self._config.vocab_size), deterministic_query_limit(self._config, self._plan)
        return CpuDecoderRunner(replay, self._kv_cache, self._backend, sampler, few).run

    def fill_context(self, slot: int, num_tokens: int) -> None:
        """Write random keys and values for the first `num_tokens` tokens of a slot."""
        some = random_heads(self._kv_cache.shape, num_tokens)
        rows = torch.arange(num_tokens) + self._kv_cache.row(slot, 0)
        for layer in range(self._kv_cache.shape.num_layers):
            self._kv_cache.write(layer, rows, some, some)


def random_heads(shape: KvShape, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn((num_tokens, shape.num_kv_heads, shape.head_dim), generator=generator)


class DecoderTrial:
    """A few layers of a decoder under one plan. If the plan also holds eight bits, only they are used."""

    def __init__(
        self,
        config: ModelConfig,
        plan: ServingPlan,
        device: torch.device,
        make_stage: StageFactory,
        scope: TrialScope,
        memory: SyntheticMemory | None = None,
    ) -> None:
        self._whole = config
        self.config = replace(config, vocab_size=min(config.vocab_size, scope.most_outputs or config.vocab_size))
        self.plan = plan
        self._device = device
        self._forms = SyntheticForms(replace(form_choice(plan, config, device=device), most_few=0), memory)
        self._layer_bytes, self._whole_output_bytes = self._sizes(config)
        self._output_bytes = self._sizes(_truncated_config(self.config, 1))[1]  # fewer outputs, the same layers
        self.few_layers = num_trial_layers(
            self.config.num_layers, scope, self._layer_bytes, self._output_bytes, held=self._held_share(config)
        )
        whole = self.few_layers == self.decode_layers  # then nothing has to be extrapolated
        self.layer_counts = [self.few_layers] if whole else sorted({1, 2, self.few_layers})
        self.max_len = min(plan.memory.max_model_len, plan.memory.max_batch_tokens + CONTEXT_TOKENS + CHUNK_TOKENS)
        config = self.config
        self._num_ids = min(config.vocab_size, MAX_TOKEN_IDS)
        rows = max(CONTEXT_ROWS, max(self.decode_rows()))
        shape = kv_shape_of(_truncated_config(config, self.few_layers), rows, self.max_len)
        self._stage = make_stage(config, plan, shape)
        self._runners = {layers: self._runner(layers) for layers in self.layer_counts}
        self._has_context = False
        # attention learns here how much scratch memory it needs; no step is recorded before that
        for layers in self.layer_counts:
            self.step(TrialStep("decode", 1, layers))()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def decode_rows(self) -> list[int]:
        """Return the numbers of sequences in decode steps: 1, 2, 4, … and as many as may run."""
        return doubling_sizes(
            1, min(MAX_DECODE_ROWS.get(self.plan.placement.device, LARGEST_BUCKET), self.plan.memory.max_running_seqs)
        )

    def prefill_tokens(self) -> list[int]:
        most = min(self.plan.memory.max_batch_tokens, self.plan.memory.max_model_len)
        return doubling_sizes(min(32, most), most)

    @property
    def context(self) -> int:
        """Context tokens of sequences that have context, limited by the KV memory; 0 if the model allows too few."""
        fits = self.plan.memory.kv_cache_bytes // (CONTEXT_ROWS * self._stage.bytes_per_token)
        return max(0, min(CONTEXT_TOKENS, self.max_len - CHUNK_TOKENS - 1, fits))

    def step(self, shape: TrialStep) -> Callable[[], object]:
        if shape.context and not self._has_context:
            self._fill_context()
        run = self._runners[shape.layers]
        count, tokens = (shape.size, 1) if shape.kind == "decode" else (1, shape.size)
        batch = Batch(tuple(self._span(slot, shape.context, tokens) for slot in range(count)))
        return lambda: run(batch)

    def _fill_context(self) -> None:
        """Fill the slots of sequences that have context, which takes as long as some steps, so only where it is read."""
        for slot in range(CONTEXT_ROWS):
            self._stage.fill_context(slot, self.context)
        self._has_context = True

    def _span(self, slot: int, start: int, num_tokens: int) -> ScheduledSpan:
        token_ids = tuple(index % self._num_ids for index in range(start + num_tokens))
        sequence = make_sequence(Generate(f"rehearsal-{slot}", token_ids, _PARAMS, arrived_at=0.0), 0, frozenset())
        return ScheduledSpan(sequence, start, num_tokens, slot=slot, prefix_slot=None, prefix_tokens=0, samples=True)

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        two, around = self.layer_counts[:2], sorted({self.layer_counts[0], self.layer_counts[-1]})
        most_rows, most_tokens = max(self.decode_rows()), max(self.prefill_tokens())
        rows = sorted({min(size, most_rows) for size in trial_shape.rows or self.decode_rows()})
        tokens = sorted({min(size, most_tokens) for size in trial_shape.tokens or self.prefill_tokens()})
        shapes = [TrialStep("decode", size, layers) for size in rows if size <= OPTIONAL_ROWS for layers in around]
        if trial_shape.context and self.context:
            shapes.append(TrialStep("decode", CONTEXT_ROWS, around[-1], self.context))
        shapes += [TrialStep("prefill", size, layers) for size in tokens if size <= CHUNK_TOKENS for layers in two]
        if trial_shape.context and self.context:
            shapes.append(TrialStep("prefill", CHUNK_TOKENS, two[-1], self.context))
        shapes += [TrialStep("prefill", size, layers) for size in tokens if size > CHUNK_TOKENS for layers in two]
        return shapes + [
            TrialStep("decode", size, layers) for size in rows if size > OPTIONAL_ROWS for layers in around
        ]

    # ---- results for the whole model -------------------------------------------------------------------------------

    @property
    def _dtype(self) -> torch.dtype:
        return self._forms.choice.dtype

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a decode step of the whole model reads."""
        return round(self._whole.num_layers * self._layer_bytes + self._whole_output_bytes)

    @property
    def operations_per_token(self) -> float:
        return 2.0 * active_weights(self._whole)

    @property
    def decode_layers(self) -> float:
        """Number of layers in a decode step. The part of the output layer that is left out counts as layers too."""
        left_out = self._whole_output_bytes - self._output_bytes
        return self._whole.num_layers + left_out / self._layer_bytes

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        layers = self.config.num_layers
        decode, prefill = (
            monotone_table(
                extrapolate_by_size(
                    ((s.size, s.layers, took) for s, took in seconds.items() if s.kind == kind and not s.context), count
                ),
                max_adjustment,
            )
            for kind, count in (("decode", self.decode_layers), ("prefill", float(layers)))
        )
        if not decode or not prefill:
            return None
        return TrialTimes(
            precision=self.plan.weights.precision,
            threads=threads,
            decode_seconds=decode,
            prefill_seconds=prefill,
            context_token_seconds=_context_token_seconds(seconds, "decode", CONTEXT_ROWS, layers),
            pair_seconds=_context_token_seconds(seconds, "prefill", CHUNK_TOKENS, layers),
            read_bytes=self.read_bytes,
            operations_per_token=self.operations_per_token,
        )

    # ---- the model -------------------------------------------------------------------------------------------------

    def _sizes(self, config: ModelConfig) -> tuple[float, int]:
        """Return the bytes that the products of a layer read on average, and the bytes of the output layer."""
        model = build_decoder_model(config, self._dtype, 1, torch.device("cpu"))
        layers, output = self._forms.read_sizes(model.modules())
        return layers / config.num_layers, output

    def _held_share(self, config: ModelConfig) -> float:
        """Return how many times the weights that a token reads are held in a layer."""
        experts = config.experts
        return 1.0 if experts is None else experts.routing.num_experts / experts.routing.top_k

    def _runner(self, layers: int) -> RunBatch:
        device = self._device
        model = build_decoder_model(_truncated_config(self.config, layers), self._dtype, self.max_len, device)
        modules = list(model.modules())
        fill_vectors(model, device)
        for module in modules:
            if isinstance(module, Linear):
                module.form = self._forms.form(module)
        for module in modules:
            if isinstance(module, Embedding):
                self._embed(module)
        return self._stage.runner(model)

    def _embed(self, embedding: Embedding) -> None:
        tied = self._forms.tied_form(embedding.source, self.config.vocab_size)
        if isinstance(tied, Bf16PanelLinear | IntPanelLinear | HybridLinear | DeviceLinear):
            embedding.tie(tied)
        else:
            fill_table(embedding, self.config.vocab_size, self._device)


def _truncated_config(config: ModelConfig, layers: int) -> ModelConfig:
    # Layers without experts come first, and most layers have experts.
    experts = None if config.experts is None else replace(config.experts, layers=config.experts.layers[-layers:])
    cut = {
        name: getattr(config, name)[:layers]
        for name in ("windows", "ropes", "inner_sizes", "gate_deviations", "mixers")
    }
    convolution = config.convolution
    if convolution is not None:  # the first layers attend to nothing, so begin with one that does
        first = convolution.layers.index(False)
        order = (*convolution.layers[first:], *convolution.layers[:first])
        convolution = replace(convolution, layers=order[:layers])
    recurrent = config.recurrent
    if recurrent is not None:  # the same
        first = 0 if config.mixers or all(recurrent.layers) else recurrent.layers.index(False)
        order = (*recurrent.layers[first:], *recurrent.layers[:first])
        recurrent = replace(recurrent, layers=order[:layers])
    # Every layer has its own keys and values, so that few layers need not have one of each kind.
    return replace(
        config,
        num_layers=layers,
        experts=experts,
        convolution=convolution,
        recurrent=recurrent,
        shared_kv_layers=0,
        **cut,
    )


def _context_token_seconds(own: Mapping[TrialStep, float], kind: str, size: int, num_layers: int) -> float:
    """Return the seconds that each context token adds for each token of the step, in all layers; 0 if not measured."""
    for shape, seconds in own.items():
        without = own.get(replace(shape, context=0))
        if shape.kind == kind and shape.size == size and shape.context and without is not None:
            return max(0.0, seconds - without) / (size * shape.context) * num_layers / shape.layers
    return 0.0


class ProgramTrial:
    def __init__(self, checkpoint: ProgramCheckpoint, plan: ServingPlan) -> None:
        """Build the program. Raises `CheckpointInvalid` if it calls an operator that is not served."""
        self.checkpoint, self.plan = checkpoint, plan
        self._served = load_served(
            checkpoint, plan, lambda done, total: None, ProgramValues(_synthetic_tensor, _synthetic_product)
        )

    def step_sizes(self) -> list[int]:
        asked = self.plan.memory.batch_target_tokens
        most = max_step_rows(self.checkpoint, asked if asked < DEFAULT_STEP_ROWS else max(asked, MAX_STEP_ROWS))
        return doubling_sizes(min(self.checkpoint.min_rows, most), most)

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        sizes = self.step_sizes()
        wanted = {min(max(rows, sizes[0]), sizes[-1]) for rows in trial_shape.rows or sizes}
        return [TrialStep("encode", rows, layers=1) for rows in sorted(wanted)]

    def step(self, shape: TrialStep) -> Callable[[], object]:
        """Return a function that runs that step any number of times; `StepFailed` if the program cannot be run."""
        inputs = synthetic_inputs(self.checkpoint.signature, shape.size)

        def run() -> object:
            try:
                return self._served.run(inputs)
            except INPUT_ERRORS as error:
                raise StepFailed(cannot_run(error).message) from error

        return run

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        encode = monotone_table({shape.size: took for shape, took in seconds.items()}, max_adjustment)
        if not encode:
            return None
        precision = self.plan.weights.precision
        return TrialTimes(
            precision=precision,
            threads=threads,
            decode_seconds={},
            prefill_seconds={},
            encode_seconds=encode,
            read_bytes=read_bytes(self.checkpoint, precision),
            operations_per_token=operations_per_row(self.checkpoint, 1),
        )


def _synthetic_tensor(archive: Archive, stored: StoredTensor) -> Tensor:
    """Return all elements of a stored tensor. A large floating-point tensor is synthetic and is not read."""
    dtype = getattr(torch, stored.dtype)
    nbytes = archive.size(stored.member) if stored.min_member_elements else 0
    if not dtype.is_floating_point or nbytes < LARGE_BYTES:
        return read_flat(archive, stored)
    memory = allocate_weights(nbytes // dtype.itemsize * dtype.itemsize)
    return (memory.fill_(FILL_BYTE) if nbytes <= FILLED_BYTES else memory).view(dtype)


def _synthetic_product(packing: FormFactory, weight: Tensor, bias: Tensor | None) -> LinearForm:
    outputs, inputs = weight.shape
    return synthetic_form(packing, Linear(("program",), inputs, outputs, bias is not None), bias, weight.dtype)


def cpu_text_runner(plan: ServingPlan, recorded_tokens: int) -> TextRunnerFactory:
    """Run batches as `build_encoder_engine` does, recorded up to `recorded_tokens` tokens."""
    off = "" if plan.steps.compile else plan.decisions["compile"].reason
    return lambda model, room: EncoderRunner(model, room, off, recorded_tokens).run


class EncoderTrial:
    def __init__(
        self,
        config: EncoderConfig,
        plan: ServingPlan,
        scope: TrialScope,
        device: torch.device | None = None,
        make_runner: TextRunnerFactory | None = None,
        memory: SyntheticMemory | None = None,
    ) -> None:
        """Build the layers. `device` holds the model, `make_runner` runs its batches; None for both: the CPU."""
        self.config, self.plan = config, plan
        self._device = device or torch.device("cpu")
        self._make_runner = make_runner or cpu_text_runner(plan, max(self.step_sizes()))
        self._forms = SyntheticForms(form_choice(plan, None, device=self._device), memory)
        layer = (self._product_bytes(2) - self._product_bytes(1)) if config.num_layers > 1 else self._product_bytes(1)
        self.few_layers = num_trial_layers(config.num_layers, scope, layer, 0)
        whole = self.few_layers == config.num_layers  # then nothing has to be extrapolated
        self.layer_counts = [self.few_layers] if whole else sorted({1, 2, self.few_layers})
        self._runners = {layers: self._runner(layers) for layers in self.layer_counts}
        for layers in self.layer_counts:  # the first run records and is not a sample
            self.step(TrialStep("encode", self.step_sizes()[0], layers))()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def step_sizes(self) -> list[int]:
        target = self.plan.memory.batch_target_tokens
        most = target if target < DEFAULT_STEP_TOKENS else max(target, MAX_STEP_TOKENS)
        return doubling_sizes(min(MIN_STEP_TOKENS, most), most)

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        two, around = self.layer_counts[:2], sorted({self.layer_counts[0], self.layer_counts[-1]})
        most = max(self.step_sizes())
        sizes = sorted({min(size, most) for size in trial_shape.texts or self.step_sizes()})
        shapes = [
            TrialStep("encode", size, layers)
            for size in sizes
            for layers in (around if size <= MEMORY_BOUND_TOKENS else two)
        ]
        long = min(LONG_TEXT_TOKENS, self.plan.memory.max_model_len)
        if trial_shape.context and long in sizes and long > TABLE_TEXT_TOKENS:
            alone = TrialStep("encode", long, two[-1], context=long)
            shapes.insert(1 + max(at for at, shape in enumerate(shapes) if shape.size == long), alone)
        return shapes

    def step(self, shape: TrialStep) -> Callable[[], object]:
        run = self._runners[shape.layers]
        spans = self._spans(shape.size, shape.context or min(TABLE_TEXT_TOKENS, self.plan.memory.max_model_len))
        return lambda: run(spans)

    def _spans(self, tokens: int, each: int) -> list[TextSpan]:
        lengths = [each] * (tokens // each) + ([tokens % each] if tokens % each else [])
        ids = tuple(index % self._num_ids for index in range(max(lengths)))
        texts = tuple(Text(ids[:length]) for length in lengths)
        return EncodeState.from_message(Encode("rehearsal", texts, self.config.outputs[:1], arrived_at=0.0)).spans()

    # ---- results for the whole model -------------------------------------------------------------------------------

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        layers = self.config.num_layers
        usual = ((shape.size, shape.layers, took) for shape, took in seconds.items() if not shape.context)
        encode = monotone_table(extrapolate_by_size(usual, float(layers)), max_adjustment)
        if not encode:
            return None
        return TrialTimes(
            precision=self.plan.weights.precision,
            threads=threads,
            decode_seconds={},
            prefill_seconds={},
            encode_seconds=encode,
            pair_seconds=_pair_seconds(seconds, layers),
            read_bytes=self.read_bytes,
            operations_per_token=self.operations_per_token,
        )

    @property
    def read_bytes(self) -> int:
        return self._product_bytes(self.config.num_layers)

    @property
    def operations_per_token(self) -> float:
        return 2.0 * sum(rows * columns for (rows, columns), _ in encoder_products_of(self.config))

    # ---- the model -------------------------------------------------------------------------------------------------

    @property
    def _num_ids(self) -> int:
        return min(self.config.vocab_size, MAX_TOKEN_IDS)

    def _product_bytes(self, layers: int) -> int:
        return self._forms.read_sizes(self._model(layers, torch.device("cpu")).modules())[0]

    def _model(self, layers: int, device: torch.device) -> Encoder:
        return build_encoder_model(
            truncated_encoder_config(self.config, layers),
            self._forms.choice.dtype,
            self.plan.memory.max_model_len,
            device,
        )

    def _runner(self, layers: int) -> RunTexts:
        device = self._device
        model = self._model(layers, device)
        fill_vectors(model, device)
        for module in list(model.modules()):
            if isinstance(module, Linear):
                module.form = self._forms.form(module)
            elif isinstance(module, Embedding):
                fill_table(module, self.config.vocab_size, device)
            elif isinstance(module, LayerNorm | DenseLayer | DistanceBias):
                bias = torch.zeros(module.weight.shape[0], device=device) if module.has_bias else None
                module.set_weight(torch.full(module.weight.shape, 0.01, device=device), bias)
        return self._make_runner(model, max(max(self.step_sizes()), LONG_TEXT_TOKENS))


def truncated_encoder_config(config: EncoderConfig, layers: int) -> EncoderConfig:
    cut = replace(config, num_layers=layers, windows=config.windows[:layers], ropes=config.ropes[:layers])
    if config.decoder is None:
        return cut
    decoder = config.decoder
    few = replace(decoder, num_layers=layers, windows=decoder.windows[:layers], ropes=decoder.ropes[:layers])
    return replace(cut, decoder=few)


def _pair_seconds(seconds: Mapping[TrialStep, float], num_layers: int) -> float:
    """Return the seconds that each pair of tokens of one text costs in all layers, or 0 if this was not measured."""
    for shape, took in seconds.items():
        without = seconds.get(replace(shape, context=0))
        if shape.context and without is not None:
            more = shape.size * (shape.context - TABLE_TEXT_TOKENS)
            return max(0.0, took - without) / more * num_layers / shape.layers
    return 0.0
