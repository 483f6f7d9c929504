"""Times steps of a decoder that is not loaded: a few layers of its shapes with synthetic weights, run as in serving.

Nothing is read from the checkpoint (see `synthetic_weights.py`). The time of a step of all layers is extrapolated from
steps with different numbers of layers (armature_kernels/timing.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from app.engine.calibration.stages import RunBatch, TrialScope, TrialShape, TrialStage, TrialStep, doubling_sizes
from app.engine.calibration.synthetic_weights import (
    MAX_TOKEN_IDS,
    SyntheticForms,
    SyntheticMemory,
    fill_table,
    fill_vectors,
    num_trial_layers,
)
from app.engine.decoder.cuda_graphs import LARGEST_BUCKET
from app.engine.decoder.kv_cache import KvShape
from app.engine.scheduler.batch import Batch, ScheduledSpan, make_sequence
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.messages import Generate, SamplingParams
from app.models.decoders.config import ModelConfig
from app.models.decoders.decoder import Embedding
from app.models.decoders.shapes import active_weights
from app.models.registry import build_decoder_model
from app.weights.form_choice import form_choice
from armature_kernels.linear.bf16_panels import Bf16PanelLinear, HybridLinear
from armature_kernels.linear.device import DeviceLinear
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import Linear
from armature_kernels.timing import MAX_ADJUSTMENT, extrapolate_by_size, monotone_table

CONTEXT_TOKENS = 1024  # context tokens of some sequences, to measure the cost of context
CONTEXT_ROWS = 8
CHUNK_TOKENS = 64  # tokens of a prompt that follow this context
OPTIONAL_ROWS = 32  # decode steps with more rows are timed last, if there is time
MAX_DECODE_ROWS = {"cpu": 64}  # sequences of a step; with more, products gain little on a CPU
StageFactory = Callable[[ModelConfig, ServingPlan, KvShape], TrialStage]
_PARAMS = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)


class DecoderTrial:
    """A few layers of a decoder under one plan, ready to be timed. The memory is released with the object.

    If the plan holds eight bits in addition to four, only the eight-bit form is used.
    """

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
        shape = KvShape(self.few_layers, rows, self.max_len, config.cache_heads, config.head_dim)
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
        """Return the numbers of prompt tokens in prefill steps."""
        most = min(self.plan.memory.max_batch_tokens, self.plan.memory.max_model_len)
        return doubling_sizes(min(32, most), most)

    @property
    def context(self) -> int:
        """Number of context tokens in sequences that have context; 0 if the model allows too few.

        Limited by the KV memory of the plan.
        """
        fits = self.plan.memory.kv_cache_bytes // (CONTEXT_ROWS * self._stage.bytes_per_token)
        return max(0, min(CONTEXT_TOKENS, self.max_len - CHUNK_TOKENS - 1, fits))

    def step(self, shape: TrialStep) -> Callable[[], object]:
        """Return a function that runs that step; it may be called any number of times."""
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
        """Return the steps to time, the fastest first, since time may run out."""
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
        """Operations of all layers for one token: two for each multiply-add."""
        return 2.0 * active_weights(self._whole)

    @property
    def decode_layers(self) -> float:
        """Number of layers in a decode step. The part of the output layer that is left out counts as layers too."""
        left_out = self._whole_output_bytes - self._output_bytes
        return self._whole.num_layers + left_out / self._layer_bytes

    def summarize(
        self, threads: int, seconds: Mapping[TrialStep, float], max_adjustment: float = MAX_ADJUSTMENT
    ) -> TrialTimes | None:
        """Return the result for the whole model, or None if steps are missing or their times are inconsistent."""
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
        """Return the bytes that the products of a layer read on average, and those of the output layer.

        The modules are made for it, which takes a tenth of a second with many experts.
        """
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
        """Give an embedding its table, as loading does."""
        tied = self._forms.tied_form(embedding.source, self.config.vocab_size)
        if isinstance(tied, Bf16PanelLinear | IntPanelLinear | HybridLinear | DeviceLinear):
            embedding.tie(tied)
        else:
            fill_table(embedding, self.config.vocab_size, self._device)


def _truncated_config(config: ModelConfig, layers: int) -> ModelConfig:
    # Layers without experts come first, and most layers have experts.
    experts = None if config.experts is None else replace(config.experts, layers=config.experts.layers[-layers:])
    cut = {name: getattr(config, name)[:layers] for name in ("windows", "ropes", "inner_sizes", "gate_deviations")}
    convolution = config.convolution
    if convolution is not None:  # the first layers attend to nothing, so begin with one that does
        first = convolution.layers.index(False)
        order = (*convolution.layers[first:], *convolution.layers[:first])
        convolution = replace(convolution, layers=order[:layers])
    # Every layer has its own keys and values, so that few layers need not have one of each kind.
    return replace(config, num_layers=layers, experts=experts, convolution=convolution, shared_kv_layers=0, **cut)


def _context_token_seconds(own: Mapping[TrialStep, float], kind: str, size: int, num_layers: int) -> float:
    """Return the seconds that each context token adds for each token of the step, in all layers; 0 if not measured."""
    for shape, seconds in own.items():
        without = own.get(replace(shape, context=0))
        if shape.kind == kind and shape.size == size and shape.context and without is not None:
            return max(0.0, seconds - without) / (size * shape.context) * num_layers / shape.layers
    return 0.0
