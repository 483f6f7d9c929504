"""What a step must read and multiply at the least, counted from the layers themselves, as they are held."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.hardware.facts import Facts
from app.kernels.device_ceilings import cache_bytes
from app.kernels.hybrid import HybridLinear
from app.kernels.linear import Linear, LinearForm


@dataclass(frozen=True, slots=True)
class Weights:
    """Bytes of all products' weights, and multiply-adds (times two) a token and a row of logits."""

    num_bytes: int
    operations_per_token: float
    operations_per_logit_row: float
    cache_bytes: int = 0  # the machine's largest cache

    @property
    def read_bytes(self) -> int:
        """What a step reads of them from memory; what may stay in a cache is read in no time."""
        return self.num_bytes if self.num_bytes > 2 * self.cache_bytes else 0

    def operations(self, tokens: int, logit_rows: int) -> float:
        return tokens * self.operations_per_token + logit_rows * self.operations_per_logit_row


def weights_of(model: torch.nn.Module, vocab_size: int, cache_bytes: int) -> Weights:
    """`cache_bytes`: of the machine's largest cache."""
    layers = [layer for layer in model.modules() if isinstance(layer, Linear)]
    output = [layer for layer in layers if layer.out_features == vocab_size]
    inner = [layer for layer in layers if layer.out_features != vocab_size]
    return Weights(
        num_bytes=sum({id(layer.form): _few_rows_bytes(layer.form) for layer in layers}.values()),
        operations_per_token=2.0 * sum(layer.in_features * layer.out_features for layer in inner),
        operations_per_logit_row=2.0 * sum(layer.in_features * layer.out_features for layer in output),
        cache_bytes=cache_bytes,
    )


def cache_of(facts: Facts, device: torch.device) -> int:
    """Bytes of the largest cache where the model's weights are."""
    return cache_bytes(device) if device.type != "cpu" else max((cache.size_bytes for cache in facts.caches), default=0)


def _few_rows_bytes(form: LinearForm) -> int:
    """What the product of a few rows reads: of a weight that is held in two forms, one."""
    return form.few.nbytes if isinstance(form, HybridLinear) else form.nbytes
