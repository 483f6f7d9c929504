"""Measures what quantization costs an encoder: cosines of the vectors of a few texts with those of the exact model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.calibration.streaming import CALIBRATION_TEXT, WatchedForm
from app.engine.encoder.batching import EncodeState
from app.engine.encoder.cpu_runner import EncoderRunner
from app.errors import ArmatureError
from app.hardware.plan.plan import ServingPlan
from app.hardware.plan.precision import QUANTIZED_PRECISIONS
from app.messages import Encode, Text
from app.models.encoders.encoder import Encoder
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint
from armature_kernels.linear.activations import Activations
from armature_kernels.linear.linear import ExactLinear, Linear

WORDS = (1, 2, 4, 8, 16, 32, 64) * 2  # of the texts


@dataclass(slots=True)
class _ReleasedForm(WatchedForm):
    """Frees its FP32 copy after each product, so that one layer is in memory at a time."""

    def multiply(self, x: Activations) -> Tensor:
        product = self.form.multiply(x)
        self.form.release()
        return product


def measure_encoder_cost(
    checkpoint: Checkpoint, plan: ServingPlan, model: Encoder, exact: Callable[[Linear], ExactLinear]
) -> float | None:
    """Return 1 minus the lowest cosine of a vector of `model` with the vector of the stored weights.

    `exact` returns the exact form of a product. None: the model has no vectors or no tokenizer, is not quantized, or
    does not run on the processor.
    """
    if plan.weights.precision not in QUANTIZED_PRECISIONS or plan.placement.device != "cpu":
        return None
    if "embedding" not in model.config.outputs:
        return None
    try:
        tokenizer = Tokenizer(checkpoint.location, model.config.lowercases)
    except ArmatureError:
        return None
    texts = tokenizer.encode_texts(sample_texts(), plan.memory.max_model_len)
    if any(max(text.token_ids, default=0) >= checkpoint.encoder.vocab_size for text in texts):
        return None  # the tokenizer has tokens that the model does not know
    found = _vectors(model, texts)
    packed = {linear: linear.form for linear in model.modules() if isinstance(linear, Linear)}
    for linear in packed:
        linear.form = _ReleasedForm(exact(linear))
    expected = _vectors(model, texts)
    for linear, form in packed.items():
        linear.form = form
    cosine = float(F.cosine_similarity(found, expected).min())
    return max(0.0, 1 - cosine) if cosine == cosine else None


def sample_texts() -> list[str]:
    words = CALIBRATION_TEXT.read_text(encoding="utf-8").split()
    step = (len(words) - max(WORDS)) // len(WORDS)
    return [" ".join(words[at * step : at * step + count]) for at, count in enumerate(WORDS)]


def _vectors(model: Encoder, texts: list[Text]) -> Tensor:
    """Return the vectors of the texts, FP32 [texts, size]."""
    runner = EncoderRunner(model, sum(len(text.token_ids) for text in texts), "it runs once")
    state = EncodeState.from_message(Encode("cost", tuple(texts), ("embedding",), arrived_at=0.0))
    rows = runner.run(state.spans())
    return torch.stack([torch.frombuffer(bytearray(row["embedding"]), dtype=torch.float32) for row in rows])
