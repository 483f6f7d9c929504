"""Sequences of one model that transformers computes, alone or as a batch, in the way of its `generate`.

The library's own methods prepare the inputs of each step and take its results, so that every class that `generate`
serves is served, whatever it keeps between steps: keys and values, states, or nothing. A batch has rows of different
lengths, padded on the left; only caches of attention and of states that do not grow can be batched (`can_batch`).

Of a model with an encoder, a sequence is the source text, the token that starts the decoder, and the completion.
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
    EncoderDecoderCache,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from app.engine.scheduler.batch import Sequence


class RoomyLayer(DynamicLayer):  # type: ignore[misc]
    """Keys and values [rows, heads, length, size] with room for more tokens, so that a step copies only its own."""

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys, self.values = self._grown("keys", key_states), self._grown("values", value_states)
        return self.keys, self.values

    def _grown(self, name: str, new: Tensor) -> Tensor:
        """Return what is kept with the new tokens behind it: a part of a larger tensor, which nothing else reads."""
        kept: Tensor = getattr(self, name)
        if not kept.numel():
            return new.contiguous()
        length, total = kept.shape[-2], kept.shape[-2] + new.shape[-2]
        whole, part = getattr(self, f"_{name}_room", (kept, None))
        if part is not kept or whole.shape[-2] < total:
            whole = kept.new_empty((*kept.shape[:-2], total + _ROOM_TOKENS, kept.shape[-1]))
            whole[..., :length, :] = kept
        whole[..., length:total, :] = new
        part = whole[..., :total, :]
        setattr(self, f"_{name}_room", (whole, part))
        return part


# Layers whose result does not depend on where a row begins. Chunked attention does, so it is left out by name.
_BATCHED_LAYERS = (
    DynamicLayer,
    RoomyLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionAndSlidingWindowAttentionLayer,
    DummyLayer,
)
_CACHE_NAMES = ("past_key_values", "cache_params")
_ROOM_TOKENS = 64  # by which keys and values grow


class Rows:
    """Sequences that are computed together. `kwargs` are the library's arguments, kept from step to step.

    `input_ids` [rows, length] are all tokens so far, each row with `padding` zeros before it. Without those of the
    sources, the first `num_sources` tokens of each sequence, whose encoded states are among `kwargs`.
    """

    def __init__(self, sequences: list[Sequence]) -> None:
        self.sequences = sequences
        self.admissions = [one.num_admitted for one in sequences]
        self.padding, self.num_sources = [0] * len(sequences), [0] * len(sequences)
        self.input_ids = torch.empty((len(sequences), 0), dtype=torch.int64)
        self.kwargs: dict[str, Any] = {}

    def __len__(self) -> int:
        return len(self.sequences)

    @property
    def cache(self) -> Any:
        return next((self.kwargs[name] for name in _CACHE_NAMES if name in self.kwargs), None)

    @property
    def mask_name(self) -> str:
        return "decoder_attention_mask" if "encoder_outputs" in self.kwargs else "attention_mask"

    def num_decoded(self, row: int) -> int:
        return self.input_ids.shape[1] - self.padding[row]

    def num_computed(self, row: int) -> int:
        return self.num_sources[row] + self.num_decoded(row)

    def is_current(self, row: int) -> bool:
        """Return False if the sequence has ended, or computes all its tokens again."""
        sequence = self.sequences[row]
        return sequence.slot is not None and sequence.num_admitted == self.admissions[row]

    def lengths(self, row: int) -> tuple[int, int]:
        return self.num_sources[row], self.num_decoded(row)

    def select(self, chosen_rows: Items[tuple[int, Sequence]]) -> Rows:
        """Return a copy of rows, each for its sequence, without padding that all of them have."""
        rows = [row for row, _ in chosen_rows]
        chosen = Rows([sequence for _, sequence in chosen_rows])
        chosen.num_sources = [self.num_sources[row] for row in rows]
        common = min(self.padding[row] for row in rows)
        chosen.padding = [self.padding[row] - common for row in rows]
        chosen.input_ids, chosen.kwargs = self.input_ids[rows, common:], dict(self.kwargs)
        for name in (self.mask_name, "position_ids"):
            if chosen.kwargs.get(name) is not None:
                chosen.kwargs[name] = _rows_of(chosen.kwargs[name], len(self))[rows, common:]
        if not any(chosen.padding):
            chosen.kwargs[self.mask_name] = None
        for name in _CACHE_NAMES:
            if name in self.kwargs:
                chosen.kwargs[name] = _select_cache(self.kwargs[name], rows, common)
        if "encoder_outputs" in self.kwargs:
            chosen._select_sources(rows)
        return chosen

    def _select_sources(self, rows: list[int]) -> None:
        """Keep the encoded states of some of the rows, without places that are padding in all of them."""
        mask = self.kwargs["attention_mask"][rows]
        places = mask.any(0).nonzero().squeeze(1)
        self.kwargs["attention_mask"] = mask[:, places]
        self.kwargs["encoder_outputs"] = _with_states(
            self.kwargs["encoder_outputs"], self.kwargs["encoder_outputs"][0][rows][:, places]
        )
        for layer in self.cache.cross_attention_cache.layers if places.numel() < mask.shape[1] else ():
            layer.keys, layer.values = layer.keys[:, :, places], layer.values[:, :, places]


def join(groups: list[Rows]) -> Rows:
    """Return the rows of all groups as one batch. The groups must not be used any more."""
    joined = Rows([sequence for group in groups for sequence in group.sequences])
    length = max(group.input_ids.shape[1] for group in groups)
    pads = [length - group.input_ids.shape[1] for group in groups]
    joined.admissions = [one for group in groups for one in group.admissions]
    joined.padding = [one + pad for group, pad in zip(groups, pads, strict=True) for one in group.padding]
    joined.num_sources = [one for group in groups for one in group.num_sources]
    joined.kwargs = dict(groups[0].kwargs)
    joined.input_ids = _stack([group.input_ids for group in groups], pads)
    if "position_ids" in joined.kwargs:
        positions = [_rows_of(group.kwargs["position_ids"], len(group)) for group in groups]
        joined.kwargs["position_ids"] = _stack(positions, pads)
    if any(joined.padding):
        places = torch.arange(length, device=joined.input_ids.device)
        first = torch.tensor(joined.padding, device=joined.input_ids.device)
        joined.kwargs[joined.mask_name] = (places >= first.unsqueeze(1)).to(torch.int64)
    caches = [group.cache for group in groups]
    if isinstance(joined.cache, EncoderDecoderCache):
        masks = [group.kwargs["attention_mask"] for group in groups]
        source_pads = [max(mask.shape[1] for mask in masks) - mask.shape[1] for mask in masks]
        joined.kwargs["attention_mask"] = _stack(masks, source_pads)
        states = [group.kwargs["encoder_outputs"][0] for group in groups]
        padded = [torch.nn.functional.pad(one, (0, 0, n, 0)) for one, n in zip(states, source_pads, strict=True)]
        joined.kwargs["encoder_outputs"] = _with_states(joined.kwargs["encoder_outputs"], torch.cat(padded))
        _join_caches([cache.cross_attention_cache for cache in caches], source_pads)
        caches = [cache.self_attention_cache for cache in caches]
    if joined.cache is not None:
        _join_caches(caches, pads)
    return joined


def _with_states(outputs: Any, states: Tensor) -> Any:
    """Return an encoder's outputs, of the class that its decoder takes, with these states alone."""
    return type(outputs)(last_hidden_state=states)


def _join_caches(caches: Items[Any], pads: Items[int]) -> None:
    for layers in zip(*(cache.layers for cache in caches), strict=True):
        _join_layers(layers, pads)


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


def _select_cache(cache: Any, rows: list[int], common: int) -> Any:
    cache = copy(cache)
    if isinstance(cache, EncoderDecoderCache):
        cache.self_attention_cache = _select_cache(cache.self_attention_cache, rows, common)
        cache.cross_attention_cache = _select_cache(cache.cross_attention_cache, rows, 0)
    else:
        cache.layers = [_select_layer(layer, rows, common) for layer in cache.layers]
    return cache


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

    has_room = True  # for the keys and values of more tokens; without it, each step copies all

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
        self.has_encoder = bool(model.config.is_encoder_decoder)
        if self.has_encoder:
            self._takes_positions = False  # its decoders count them themselves
            self._kwargs = {"use_cache": True, "decoder_attention_mask": None}
        self._positions = _count_positions_by_row(model.get_decoder()) if self.has_encoder else None

    def advance(self, rows: Rows, token_ids: Items[Items[int]]) -> Tensor:
        """Compute each row's next tokens, as many of each, and return the logits after the last ones, [rows, vocab].

        At first, the sources may have different lengths.
        """
        is_first = not rows.kwargs
        encoded = self._encode(rows, token_ids) if is_first and self.has_encoder else {}
        taken = rows.num_sources if encoded else [0] * len(rows)
        ids = [ids[start:] for ids, start in zip(token_ids, taken, strict=True)]
        new = torch.tensor(ids, dtype=torch.int64, device=self.device)
        if is_first:
            rows.kwargs = self._first_kwargs(new) | encoded
            rows.input_ids = new
        else:
            rows.input_ids = torch.cat((rows.input_ids, new), 1)
            _extend(rows, new.shape[1])
        inputs = self.model.prepare_inputs_for_generation(
            rows.input_ids,
            next_sequence_length=None if is_first else new.shape[1],
            is_first_iteration=is_first,
            **rows.kwargs,
        )
        if self._positions is not None:
            self._positions.padding = rows.padding
        outputs = self.model(**inputs, return_dict=True)
        rows.kwargs = self.model._update_model_kwargs_for_generation(
            outputs, rows.kwargs, self.has_encoder, num_new_tokens=0
        )
        logits: Tensor = outputs.logits[:, -1, : self.vocab_size]
        return logits

    def _encode(self, rows: Rows, token_ids: Items[Items[int]]) -> dict[str, Any]:
        """Encode each row's source, padded on the right, where positions are counted from the left."""
        rows.num_sources = [one.num_source_tokens for one in rows.sequences]
        sources = [ids[:number] or ids[:1] for ids, number in zip(token_ids, rows.num_sources, strict=True)]
        length = max(map(len, sources))
        padding_id = self.model.config.get_text_config(encoder=True).pad_token_id or 0
        padded = [[*ids, *[padding_id] * (length - len(ids))] for ids in sources]
        mask = [[1] * len(ids) + [0] * (length - len(ids)) for ids in sources]
        input_ids, attention_mask = torch.tensor([padded, mask], dtype=torch.int64, device=self.device)
        outputs = self.model.get_encoder()(input_ids=input_ids, attention_mask=attention_mask, return_dict=True)
        return {"encoder_outputs": _with_states(outputs, outputs[0]), "attention_mask": attention_mask}

    def _first_kwargs(self, new: Tensor) -> dict[str, Any]:
        kwargs = dict(self._kwargs)
        if self._takes_positions:
            kwargs["position_ids"] = torch.arange(new.shape[1], device=self.device).expand(new.shape[0], -1)
        if self._has_cache:
            text = self.model.config.get_text_config(decoder=True)
            kwargs[self._cache_name] = cache = DynamicCache(config=text)
            if self.has_room:
                cache.layers = [RoomyLayer() if type(layer) is DynamicLayer else layer for layer in cache.layers]
            if self.has_encoder:
                # Of a decoder with windows too, all of the source is kept.
                kwargs[self._cache_name] = EncoderDecoderCache(cache, DynamicCache())
        return kwargs


class _RowPositions(torch.nn.Module):
    """A decoder's position embeddings that count each row from its first token, after `padding` places."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.padding: Items[int] = ()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Return the embeddings of ids, states or a shape [rows, length], as the inner module does."""
        if not any(self.padding):
            return self.inner(*args, **kwargs)  # type: ignore[no-any-return]
        given = signature(self.inner.forward).bind(*args, **kwargs).arguments
        parts = [self.inner(**_of_row(given, row, skipped)) for row, skipped in enumerate(self.padding)]
        return torch.cat([part if part.dim() == 3 else part.unsqueeze(0) for part in parts])


def _of_row(given: Mapping[str, Any], row: int, skipped: int) -> dict[str, Any]:
    """Return the arguments for one row, whose first token is after `skipped` places."""
    own: dict[str, Any] = {}
    for name, value in given.items():
        if value is not None and name in ("past_key_values_length", "position_ids"):
            own[name] = value - skipped
        elif isinstance(value, Tensor):
            own[name] = value[row : row + 1]
        else:
            own[name] = value if value is None else (1, *value[1:])
    return own


def _count_positions_by_row(decoder: Any) -> _RowPositions | None:
    """Let the decoder count positions by row; None if it has no embeddings of positions that it counts itself."""
    inner = getattr(decoder, "embed_positions", None)
    if inner is None or "past_key_values_length" not in signature(inner.forward).parameters:
        return None
    decoder.embed_positions = counting = _RowPositions(inner)
    return counting


def _extend(rows: Rows, num_tokens: int) -> None:
    """Add the next tokens to the mask and the positions, as the library does after each step."""
    kwargs = rows.kwargs
    mask, positions = kwargs.get(rows.mask_name), kwargs.get("position_ids")
    if mask is not None:
        kwargs[rows.mask_name] = torch.nn.functional.pad(mask, (0, num_tokens), value=1)
    if positions is not None:
        following = torch.arange(1, num_tokens + 1, device=positions.device) + positions[..., -1:]
        kwargs["position_ids"] = torch.cat((positions, following), -1)


def can_batch(model: PreTrainedModel, rows: Rows) -> bool:
    """Return True if what the model keeps of its rows can be put together; whether results are equal is measured."""
    cache, text = rows.cache, model.config.get_text_config(decoder=True)
    has_chunks = getattr(text, "attention_chunk_size", None) or "chunked_attention" in (
        getattr(text, "layer_types", None) or ()
    )
    caches = [cache]
    if isinstance(cache, EncoderDecoderCache):
        caches = [cache.self_attention_cache, cache.cross_attention_cache]
    return not has_chunks and all(
        type(one) is DynamicCache and all(type(layer) in _BATCHED_LAYERS for layer in one.layers) for one in caches
    )


def kept_bytes(value: Any, seen: set[int] | None = None) -> int:
    """Return the bytes of all tensors in what a model keeps between steps."""
    seen = set() if seen is None else seen
    place = value.untyped_storage().data_ptr() if isinstance(value, Tensor) else id(value)
    if place in seen:
        return 0
    seen.add(place)
    if isinstance(value, Tensor):
        return value.untyped_storage().nbytes()
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
