"""Times steps of an encoder that is not loaded.

A few layers of its shapes get synthetic weights and run as in serving.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from app.engine.encode_runner import EncodeRunner
from app.engine.looks import Extent, Look, StepShape, doubling
from app.engine.made_up import MOST_IDS, Forms, few_layers, table_of
from app.engine.texts import Encoding, TextSpan
from app.hardware.decision import Trial
from app.hardware.plan import ServingPlan
from app.hardware.step_seconds import TABLE_TEXT_TOKENS
from app.kernels.calibrate import by_size, table
from app.kernels.linear import Linear
from app.messages import Encode, Text
from app.models.distances import DistanceBias
from app.models.encoder import Encoder
from app.models.encoder_config import EncoderConfig
from app.models.encoder_shapes import encoder_products_of
from app.models.heads import Dense
from app.models.layer_norm import LayerNorm
from app.models.layers import Embedding, RMSNorm
from app.models.registry import build_encoder
from app.weights.load import choice_of

LEAST_TOKENS = 16  # tokens of one short text
MOST_TOKENS = 2048  # tokens of a step; products have reached their best rate long before
# a plan has smaller steps only if the user or the memory requires it: then larger ones are not timed
USUAL_TOKENS = 512
# up to this many tokens, reading weights may cost more than multiplying, so steps read as much as in the whole model
FEW_TOKENS = 64
LONG_TOKENS = 512  # tokens of the one text that shows the cost of attention


RunTexts = Callable[[Sequence[TextSpan]], object]
# (model, most tokens of a batch) -> a function that runs a batch to its end
MakeRun = Callable[[Encoder, int], RunTexts]


def on_processor(plan: ServingPlan, usual: int) -> MakeRun:
    """Run batches as `build_encoder` does, recorded up to `usual` tokens.

    `device_stage.texts_on` does this for other devices.
    """
    off = "" if plan.compile.value else plan.compile.reason
    return lambda model, room: EncodeRunner(model, room, off, usual).run


class EncodeRehearsal:
    """A few layers of an encoder under one plan, ready to be timed. The memory is released with the object."""

    def __init__(
        self,
        config: EncoderConfig,
        plan: ServingPlan,
        extent: Extent,
        device: torch.device | None = None,
        make: MakeRun | None = None,
    ) -> None:
        """Build the layers. `device` holds the model and `make` runs its batches; None for both selects the CPU."""
        self.config, self.plan = config, plan
        self._device = device or torch.device("cpu")
        self._make = make or on_processor(plan, max(self.sizes()))
        self._forms = Forms(choice_of(plan, texts=True, device=self._device))
        layer = (self._product_bytes(2) - self._product_bytes(1)) if config.num_layers > 1 else self._product_bytes(1)
        self.few_layers = few_layers(config.num_layers, extent, layer, 0)
        whole = self.few_layers == config.num_layers  # then nothing has to be extrapolated
        self.layer_counts = [self.few_layers] if whole else sorted({1, 2, self.few_layers})
        self._runners = {layers: self._runner(layers) for layers in self.layer_counts}
        for layers in self.layer_counts:  # the first run records and is not a sample
            self.step(StepShape("encode", self.sizes()[0], layers))()

    # ---- steps -----------------------------------------------------------------------------------------------------

    def sizes(self) -> list[int]:
        """Return the numbers of tokens of the steps to time."""
        target = self.plan.batch_target_tokens.value
        most = target if target < USUAL_TOKENS else max(target, MOST_TOKENS)
        return doubling(min(LEAST_TOKENS, most), most)

    def shapes(self, look: Look) -> list[StepShape]:
        """Return the steps to time, the fastest first, since time may run out."""
        two, around = self.layer_counts[:2], sorted({self.layer_counts[0], self.layer_counts[-1]})
        most = max(self.sizes())
        sizes = sorted({min(size, most) for size in look.texts or self.sizes()})
        shapes = [StepShape("encode", size, layers) for size in sizes for layers in (around if size <= FEW_TOKENS else two)]
        long = min(LONG_TOKENS, self.plan.max_model_len.value)
        if look.context and long in sizes and long > TABLE_TEXT_TOKENS:
            alone = StepShape("encode", long, two[-1], context=long)
            shapes.insert(1 + max(at for at, shape in enumerate(shapes) if shape.size == long), alone)
        return shapes

    def step(self, shape: StepShape) -> Callable[[], object]:
        """Return a function that runs that step; it may be called any number of times."""
        run = self._runners[shape.layers]
        spans = self._spans(shape.size, shape.context or min(TABLE_TEXT_TOKENS, self.plan.max_model_len.value))
        return lambda: run(spans)

    def _spans(self, tokens: int, each: int) -> list[TextSpan]:
        lengths = [each] * (tokens // each) + ([tokens % each] if tokens % each else [])
        ids = tuple(index % self._num_ids for index in range(max(lengths)))
        texts = tuple(Text(ids[:length]) for length in lengths)
        return Encoding.of(Encode("rehearsal", texts, self.config.outputs[:1], arrived_at=0.0)).spans()

    # ---- results for the whole model -------------------------------------------------------------------------------

    def trial(self, threads: int, seconds: Mapping[StepShape, float]) -> Trial | None:
        """Return the result for the whole model, or None if steps are missing or their times are inconsistent."""
        layers = self.config.num_layers
        usual = ((shape.size, shape.layers, took) for shape, took in seconds.items() if not shape.context)
        encode = table(by_size(usual, float(layers)))
        if not encode:
            return None
        return Trial(
            precision=self.plan.precision.value,
            threads=threads,
            decode_seconds={},
            prefill_seconds={},
            encode_seconds=encode,
            pair_seconds=_of_pairs(seconds, layers),
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
        return min(self.config.vocab_size, MOST_IDS)

    def _product_bytes(self, layers: int) -> int:
        return self._forms.sizes(self._model(layers, torch.device("cpu")).modules())[0]

    def _model(self, layers: int, device: torch.device) -> Encoder:
        return build_encoder(with_layers(self.config, layers), self._forms.choice.dtype, self.plan.max_model_len.value, device)

    def _runner(self, layers: int) -> RunTexts:
        device = self._device
        model = self._model(layers, device)
        for module in list(model.modules()):
            if isinstance(module, Linear):
                module.form = self._forms.of(module)
            elif isinstance(module, Embedding):
                words = len(module.weight) == self.config.vocab_size
                rows = self._num_ids if words else len(module.weight) + module.first
                module.adopt(table_of(rows, module.weight.shape[1], device))
            elif isinstance(module, RMSNorm):
                module.adopt(torch.ones(module.weight.shape, device=device))
            elif isinstance(module, LayerNorm | Dense | DistanceBias):
                bias = torch.zeros(module.weight.shape[0], device=device) if module.has_bias else None
                module.adopt(torch.full(module.weight.shape, 0.01, device=device), bias)
        return self._make(model, max(max(self.sizes()), LONG_TOKENS))


def with_layers(config: EncoderConfig, layers: int) -> EncoderConfig:
    """Return the config with only its first `layers` layers."""
    cut = replace(config, num_layers=layers, windows=config.windows[:layers], ropes=config.ropes[:layers])
    if config.decoder is None:
        return cut
    decoder = config.decoder
    few = replace(decoder, num_layers=layers, windows=decoder.windows[:layers], ropes=decoder.ropes[:layers])
    return replace(cut, decoder=few)


def _of_pairs(seconds: Mapping[StepShape, float], num_layers: int) -> float:
    """Return the seconds that each pair of tokens of one text costs in all layers, or 0 if this was not measured."""
    for shape, took in seconds.items():
        without = seconds.get(replace(shape, context=0))
        if shape.context and without is not None:
            more = shape.size * (shape.context - TABLE_TEXT_TOKENS)
            return max(0.0, took - without) / more * num_layers / shape.layers
    return 0.0
