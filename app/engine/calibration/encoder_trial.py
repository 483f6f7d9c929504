"""Times steps of an encoder that is not loaded.

A few layers of its shapes get synthetic weights and run as in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from app.engine.calibration.stages import TrialScope, TrialShape, TrialStep, doubling_sizes
from app.engine.calibration.synthetic_weights import (
    MAX_TOKEN_IDS,
    SyntheticForms,
    SyntheticMemory,
    fill_table,
    fill_vectors,
    num_trial_layers,
)
from app.engine.encoder.batching import EncodeState, TextSpan
from app.engine.encoder.cpu_runner import EncoderRunner
from app.hardware.decision import TrialTimes
from app.hardware.plan.plan import ServingPlan
from app.hardware.step_times import TABLE_TEXT_TOKENS
from app.messages import Encode, Text
from app.models.decoders.decoder import Embedding
from app.models.encoders.config import EncoderConfig, encoder_products_of
from app.models.encoders.encoder import DistanceBias, Encoder
from app.models.encoders.heads import DenseLayer, LayerNorm
from app.models.registry import build_encoder_model
from app.weights.form_choice import form_choice
from armature_kernels.linear.linear import Linear
from armature_kernels.timing import MAX_ADJUSTMENT, extrapolate_by_size, monotone_table

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


def cpu_text_runner(plan: ServingPlan, recorded_tokens: int) -> TextRunnerFactory:
    """Run batches as `build_encoder_engine` does, recorded up to `recorded_tokens` tokens.

    `device_text_runner` does this for other devices.
    """
    off = "" if plan.steps.compile else plan.decisions["compile"].reason
    return lambda model, room: EncoderRunner(model, room, off, recorded_tokens).run


class EncoderTrial:
    """A few layers of an encoder under one plan, ready to be timed. The memory is released with the object."""

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
        """Return the numbers of tokens of the steps to time."""
        target = self.plan.memory.batch_target_tokens
        most = target if target < DEFAULT_STEP_TOKENS else max(target, MAX_STEP_TOKENS)
        return doubling_sizes(min(MIN_STEP_TOKENS, most), most)

    def trial_steps(self, trial_shape: TrialShape) -> list[TrialStep]:
        """Return the steps to time, the fastest first, since time may run out."""
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
        """Return a function that runs that step; it may be called any number of times."""
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
        """Return the result for the whole model, or None if steps are missing or their times are inconsistent."""
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
        """Bytes of product weights that a step of the whole model reads."""
        return self._product_bytes(self.config.num_layers)

    @property
    def operations_per_token(self) -> float:
        """Operations of all layers for one token: two for each multiply-add."""
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
    """Return the config with only its first `layers` layers."""
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
