"""The angles of rotary position embeddings, from the `RopeConfig` of each layer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from app.models.decoders.rope import RopeConfig, RopeKind
from armature_kernels.attention.attention import RopeAngles
from armature_kernels.elementwise.rope import rope_angles


class RotaryEmbedding:
    """The angles of one `RopeConfig`.

    With longrope, a server whose contexts may exceed the original length always uses the long factors. (transformers
    uses the short ones while a sequence is short; keys cached before the border then have wrong angles.)
    """

    def __init__(self, rope: RopeConfig, max_model_len: int, device: torch.device) -> None:
        frequencies, self.scale = _KINDS[rope.kind](rope, max_model_len)
        self.frequencies = frequencies.to(device)

    def __call__(self, positions: Tensor) -> RopeAngles:
        """Map positions [tokens] to cos and signed sin [tokens, 1, dim]."""
        return rope_angles(positions, self.frequencies, self.scale)


class LayerRopeAngles:
    """The angles of all layers. Layers with the same `RopeConfig` share them; a layer without one gets None."""

    def __init__(self, ropes: Sequence[RopeConfig | None], max_model_len: int, device: torch.device) -> None:
        distinct = list(dict.fromkeys(rope for rope in ropes if rope is not None))
        self.rotaries = [RotaryEmbedding(rope, max_model_len, device) for rope in distinct]
        self.indices = [None if rope is None else distinct.index(rope) for rope in ropes]

    def __call__(self, positions: Tensor) -> list[Tensor]:
        """Map positions [tokens] to the cos and signed sin of each distinct rotary embedding, one after the other."""
        return [tensor for rotary in self.rotaries for tensor in rotary(positions)]

    def by_layer(self, computed: Sequence[Tensor]) -> list[RopeAngles | None]:
        """Return one entry per layer, from the result of the call."""
        return [None if index is None else (computed[2 * index], computed[2 * index + 1]) for index in self.indices]


# ---- frequencies [dim / 2] and the factor on cos and sin, for each kind --------------------------------------------


def _plain(rope: RopeConfig) -> Tensor:
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.float32, device="cpu") / rope.dim
    return 1.0 / rope.theta**exponents


def _default(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope), 1.0


def _linear(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    return _plain(rope) / rope.factor, 1.0


def _proportional(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Rotate the first pairs of a whole head only; the others have the frequency 0."""
    plain = _plain(rope) / rope.factor
    plain[rope.num_rotated :] = 0.0
    return plain, 1.0


def _llama3(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide the frequencies of waves long against the original context by `factor`, and blend at the border."""
    plain, length = _plain(rope), rope.original_max_position_embeddings
    waves = length * plain / (2 * math.pi)  # number of waves that fit
    blend = ((waves - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return plain * blend + plain / rope.factor * (1 - blend), 1.0


def _yarn(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Blend as in llama3, over the index, from `beta_fast` to `beta_slow` rotations in the original context."""

    def index_of(rotations: float) -> float:
        return (
            rope.dim
            * math.log(rope.original_max_position_embeddings / (rotations * 2 * math.pi))
            / (2 * math.log(rope.theta))
        )

    low, high = index_of(rope.beta_fast), index_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    width = high - low if high != low else 0.001
    interpolated = ((torch.arange(rope.dim // 2, dtype=torch.float32, device="cpu") - low) / width).clamp(0, 1)
    plain = _plain(rope)
    return plain / rope.factor * interpolated + plain * (1 - interpolated), _yarn_scale(rope)


def _yarn_scale(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1.0 else 0.1 * weight * math.log(rope.factor) + 1.0

    return mscale(rope.mscale) / mscale(rope.mscale_all_dim) if rope.mscale and rope.mscale_all_dim else mscale(1.0)


def _longrope(rope: RopeConfig, max_model_len: int) -> tuple[Tensor, float]:
    """Divide each frequency by a separate factor, from one set for short contexts and one for long contexts."""
    original = rope.original_max_position_embeddings
    is_long = max_model_len > original
    factors = torch.tensor(rope.long_factor if is_long else rope.short_factor, device="cpu")
    scale = rope.long_mscale if is_long else rope.short_mscale
    scale = rope.attention_factor if scale is None else scale
    if scale is None:
        scale = 1.0 if rope.factor <= 1.0 else math.sqrt(1 + math.log(rope.factor) / math.log(original))
    return _plain(rope) / factors, scale


_KINDS: Mapping[RopeKind, Callable[[RopeConfig, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
}
