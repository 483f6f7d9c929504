"""Lower bounds of a step, counted from the loaded layers: bytes that it must read and operations to perform."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.hardware.facts import Facts
from app.kernels.device_ceilings import cache_bytes
from app.kernels.hybrid import HybridLinear
from app.kernels.linear import Linear, LinearForm


@dataclass(frozen=True, slots=True)
class Weights:
    """Cost of all matrix products of a model.

    `num_bytes` is the size of the weights. Operations are multiply-adds times two: per token for the inner layers,
    and per row of logits for the output layer.
    """

    num_bytes: int
    operations_per_token: float
    operations_per_logit_row: float
    cache_bytes: int = 0  # the machine's largest cache

    @property
    def read_bytes(self) -> int:
        """Weight bytes that a step reads from memory; 0 if at least half of the weights fit in the cache."""
        return self.num_bytes if self.num_bytes > 2 * self.cache_bytes else 0

    def operations(self, tokens: int, logit_rows: int) -> float:
        """Return the operations of a step with this many tokens and rows of logits."""
        return tokens * self.operations_per_token + logit_rows * self.operations_per_logit_row


def weights_of(model: torch.nn.Module, vocab_size: int, cache_bytes: int) -> Weights:
    """Count the products of a model.

    Args:
        model: The loaded model; its `Linear` layers are counted.
        vocab_size: Output size by which the output layer is recognised; -1 if there is none.
        cache_bytes: Size of the machine's largest cache.
    """
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
    """Return the bytes of the largest cache of the device that holds the weights."""
    return cache_bytes(device) if device.type != "cpu" else max((cache.size_bytes for cache in facts.caches), default=0)


def _few_rows_bytes(form: LinearForm) -> int:
    """Return the bytes that a product of a few rows reads; a weight in two forms counts once."""
    return form.few.nbytes if isinstance(form, HybridLinear) else form.nbytes
