"""Sequences of one model that transformers computes, alone or as a batch, in the way of its `generate`.

The library's own methods prepare the inputs of each step and take its results, so that every class that `generate`
serves is served, whatever it keeps between steps: keys and values, states, or nothing. A batch has rows of different
lengths, padded on the left; only caches of attention and of states that do not grow can be batched (`can_batch`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Items
from copy import copy
from inspect import signature
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import (
    Cache,
    DummyLayer,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from app.engine.scheduler.batch import Sequence

# Layers whose result does not depend on where a row begins. Chunked attention does, so it is left out by name.
_BATCHED_LAYERS = (
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
_CACHE_NAMES = ("past_key_values", "cache_params")
_LEAST_LENGTH = 256  # rows up to this length are batched; longer ones with rows of the same power of two


class Rows:
    """Sequences that are computed together. `kwargs` are the library's arguments, kept from step to step.

    `input_ids` [rows, length] are all tokens so far, each row with `padding` zeros before it.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.admissions = [one.num_admitted for one in sequences]
        self.padding = [0] * len(sequences)
        self.input_ids = torch.empty((len(sequences), 0), dtype=torch.int64)
        self.kwargs: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def cache(self) -> Any:
        return next((self.kwargs[name] for name in _CACHE_NAMES if name in self.kwargs), None)

    def num_computed(self, row: int) -> int:
        return self.input_ids.shape[1] - self.padding[row]

    def is_current(self, row: int) -> bool:
        """Return False if the sequence has ended, or computes all its tokens again."""
        sequence = self.sequences[row]
        return sequence.slot is not None and sequence.num_admitted == self.admissions[row]

    def size_class(self, row: int) -> int:
        """Return the power of two that bounds the row's length, so that padding at most doubles a batch's memory."""
        return max(_LEAST_LENGTH, 1 << self.num_computed(row).bit_length())

    def select(self, rows: list[int]) -> Rows:
        """Return a copy of some of the rows, without padding that all of them have."""
        chosen = Rows([self.sequences[row] for row in rows])
        chosen.admissions = [self.admissions[row] for row in rows]
        common = min(self.padding[row] for row in rows)
        chosen.padding = [self.padding[row] - common for row in rows]
        chosen.input_ids, chosen.kwargs = self.input_ids[rows, common:], dict(self.kwargs)
        for name in ("attention_mask", "position_ids"):
            if chosen.kwargs.get(name) is not None:
                chosen.kwargs[name] = _rows_of(chosen.kwargs[name], len(self))[rows, common:]
        if not any(chosen.padding):
            chosen.kwargs["attention_mask"] = None
        for name in _CACHE_NAMES:
            if name in self.kwargs:
                chosen.kwargs[name] = cache = copy(self.kwargs[name])
                cache.layers = [_select_layer(layer, rows, common) for layer in cache.layers]
        return chosen


def join(groups: list[Rows]) -> Rows:
    """Return the rows of all groups as one batch. The groups must not be used any more."""
    joined = Rows([sequence for group in groups for sequence in group.sequences])
    length = max(group.input_ids.shape[1] for group in groups)
    pads = [length - group.input_ids.shape[1] for group in groups]
    joined.admissions = [one for group in groups for one in group.admissions]
    joined.padding = [one + pad for group, pad in zip(groups, pads, strict=True) for one in group.padding]
    joined.kwargs = dict(groups[0].kwargs)
    joined.input_ids = _stack([group.input_ids for group in groups], pads)
    if "position_ids" in joined.kwargs:
        positions = [_rows_of(group.kwargs["position_ids"], len(group)) for group in groups]
        joined.kwargs["position_ids"] = _stack(positions, pads)
    if any(joined.padding):
        places = torch.arange(length, device=joined.input_ids.device)
        first = torch.tensor(joined.padding, device=joined.input_ids.device)
        joined.kwargs["attention_mask"] = (places >= first.unsqueeze(1)).to(torch.int64)
    if joined.cache is not None:
        for layers in zip(*(group.cache.layers for group in groups), strict=True):
            _join_layers(layers, pads)
    return joined


def _stack(values: Items[Tensor], pads: Items[int]) -> Tensor:
    padded = [torch.nn.functional.pad(one, (pad, 0)) for one, pad in zip(values, pads, strict=True)]
    return torch.cat(padded)


def _rows_of(values: Tensor, rows: int) -> Tensor:
    return values.expand(rows, -1) if values.shape[0] != rows else values


def _join_layers(layers: Items[Any], pads: Items[int]) -> None:
    """Put the rows of all layers into the first one."""
    first = layers[0]
    if isinstance(first, DynamicLayer) and first.is_initialized:
        stored = first.keys.shape[-2] + pads[0]
        if isinstance(first, DynamicSlidingWindowLayer):
            first.cumulative_length += pads[0]
            stored = min(first.cumulative_length, first.sliding_window - 1)
        for name in ("keys", "values"):
            parts = [getattr(layer, name)[..., -stored:, :] for layer in layers]
            padded = [torch.nn.functional.pad(part, (0, 0, stored - part.shape[-2], 0)) for part in parts]
            setattr(first, name, torch.cat(padded))
    if isinstance(first, LinearAttentionCacheLayerMixin):
        for states in ("conv_states", "recurrent_states"):
            for index, state in getattr(first, states).items():
                if state is not None:
                    getattr(first, states)[index] = torch.cat([getattr(layer, states)[index] for layer in layers])


def _select_layer(layer: Any, rows: list[int], common: int) -> Any:
    layer = copy(layer)
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        start = common
        if isinstance(layer, DynamicSlidingWindowLayer):
            layer.cumulative_length -= common
            start = max(0, layer.keys.shape[-2] - layer.cumulative_length)
        layer.keys, layer.values = layer.keys[rows, :, start:], layer.values[rows, :, start:]
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        for name in ("conv_states", "recurrent_states"):
            states = getattr(layer, name).items()
            setattr(layer, name, {index: None if state is None else state[rows] for index, state in states})
    return layer


class GenerationSteps:
    """Computes steps of a model's sequences. For the worker thread."""

    def __init__(self, model: PreTrainedModel, vocab_size: int) -> None:
        self.model, self.vocab_size, self.device = model, vocab_size, model.device
        accepted = signature(model.forward).parameters
        self._takes_positions = "position_ids" in accepted
        self._kwargs: dict[str, Any] = {"use_cache": True}
        if "attention_mask" in accepted:
            self._kwargs["attention_mask"] = None
        if model._supports_logits_to_keep():
            self._kwargs["logits_to_keep"] = 1
        self._cache_name = _CACHE_NAMES["mamba" in type(model).__name__.lower()]
        self._has_cache = model._supports_default_dynamic_cache()

    def advance(self, rows: Rows, token_ids: Items[Items[int]]) -> Tensor:
        """Compute each row's next tokens, as many of each, and return the logits after the last ones, [rows, vocab]."""
        new = torch.tensor(token_ids, dtype=torch.int64, device=self.device)
        is_first = not rows.kwargs
        if is_first:
            rows.kwargs = self._first_kwargs(new)
            rows.input_ids = new
        else:
            rows.input_ids = torch.cat((rows.input_ids, new), 1)
            _extend(rows.kwargs, new.shape[1])
        inputs = self.model.prepare_inputs_for_generation(
            rows.input_ids,
            next_sequence_length=None if is_first else new.shape[1],
            is_first_iteration=is_first,
            **rows.kwargs,
        )
        outputs = self.model(**inputs, return_dict=True)
        rows.kwargs = self.model._update_model_kwargs_for_generation(outputs, rows.kwargs, num_new_tokens=0)
        logits: Tensor = outputs.logits[:, -1, : self.vocab_size]
        return logits

    def _first_kwargs(self, new: Tensor) -> dict[str, Any]:
        kwargs = dict(self._kwargs)
        if self._takes_positions:
            kwargs["position_ids"] = torch.arange(new.shape[1], device=self.device).expand(new.shape[0], -1)
        if self._has_cache:
            kwargs[self._cache_name] = DynamicCache(config=self.model.config.get_text_config(decoder=True))
        return kwargs


def _extend(kwargs: dict[str, Any], num_tokens: int) -> None:
    """Add the next tokens to the mask and the positions, as the library does after each step."""
    mask, positions = kwargs.get("attention_mask"), kwargs.get("position_ids")
    if mask is not None:
        kwargs["attention_mask"] = torch.nn.functional.pad(mask, (0, num_tokens), value=1)
    if positions is not None:
        following = torch.arange(1, num_tokens + 1, device=positions.device) + positions[..., -1:]
        kwargs["position_ids"] = torch.cat((positions, following), -1)


def can_batch(model: PreTrainedModel, rows: Rows) -> bool:
    """Return True if what the model keeps of its rows can be put together; whether results are equal is measured."""
    cache, text = rows.cache, model.config.get_text_config(decoder=True)
    has_chunks = getattr(text, "attention_chunk_size", None) or "chunked_attention" in (
        getattr(text, "layer_types", None) or ()
    )
    return type(cache) is DynamicCache and not has_chunks and all(type(one) in _BATCHED_LAYERS for one in cache.layers)


def kept_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of all tensors in what a model keeps between steps."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return 0
    seen.add(id(value))
    if isinstance(value, Tensor):
        return value.nbytes
    inner: Iterable[Any] = ()
    if isinstance(value, Mapping):
        inner = value.values()
    elif isinstance(value, list | tuple):
        inner = value
    elif isinstance(value, Cache) or (
        type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__")
    ):
        inner = vars(value).values()
    return sum(kept_bytes(one, seen) for one in inner)
