"""Maps the tensor names of a checkpoint to this package's names: prefixes, layouts and fused tensors.

A part of a fused tensor is a range of its rows, so the header alone is enough.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import Shape, tensors_of
from app.models.decoders.stored import (
    ExpertPart,
    RepeatedRows,
    expert_parts,
    head_rows,
    is_computed,
    is_transposed,
    is_unused,
    our_name,
    row_factors,
)
from app.models.encoders.config import EncoderConfig
from app.models.encoders.families import StoredName, encoder_family, stored_names
from app.weights.quantized.entries import PackedEntry
from app.weights.safetensors import EncodedEntry, QuantizedEntry, RearrangedEntry, TensorEntry

log = logging.getLogger(__name__)

_COMPARED_BYTES = 4 * 2**20  # read at once
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"

DECODER_PREFIX = "model."
_DECODER_HEADS: Mapping[str, str] = {"dense": "head.dense", "classifier": "head.out", "score": "head.out"}
_OLD_NORM_NAMES: Mapping[str, str] = {"gamma": "weight", "beta": "bias"}  # names in the first BERT checkpoints
# Unused tensors: heads for masked tokens, next sentences or answers, computed positions, and parts of heads that are
# not served.
_HARMLESS = re.compile(
    r"(cls|lm_head|pooler|classifier|pre_classifier|qa_outputs|score|head|decoder|dense|vocab_\w+"
    r"|discriminator_predictions|generator_\w+)\."
    r"|(embeddings\.|.*\.)?position_ids$|.*rotary_emb\.inv_freq$"
)


@dataclass(frozen=True, slots=True)
class RenamedTensors:
    """Tensors by this package's names.

    `unused` are the stored names of unused tensors. `stored_names` maps each of this package's names to the name in the
    file, or to the one it would have.
    """

    tensors: dict[str, TensorEntry]
    unused: list[str]
    stored_names: Mapping[str, str]


def rename_tensors(found: Mapping[str, TensorEntry], config: EncoderConfig) -> RenamedTensors:
    """Return the tensors under this package's names; unused tensors that are known to be harmless are left out."""
    if any("lora_" in name or ".parametrizations." in name for name in found):
        raise CheckpointInvalid(
            "The weights hold adapters (LoRA), which are not supported: merge one into the weights and save them."
        )
    read = _encoder_names(found, config) if config.decoder is None else _decoder_names(found)
    return replace(read, unused=[name for name in read.unused if not _HARMLESS.match(name)])


def _decoder_names(found: Mapping[str, TensorEntry]) -> RenamedTensors:
    """Map the names of a decoder served for its hidden states, saved with or without a head and its prefix."""
    prefix = "" if any(name.startswith(DECODER_PREFIX) for name in found) else DECODER_PREFIX
    tensors, spare = {}, []
    for name, entry in found.items():
        head, _, kind = name.rpartition(".")
        if head in _DECODER_HEADS:
            tensors[f"{_DECODER_HEADS[head]}.{kind}"] = entry
        elif name.startswith("lm_head."):
            spare.append(name)
        else:
            tensors[prefix + name] = entry
    return RenamedTensors(tensors, spare, {})


def _encoder_names(found: Mapping[str, TensorEntry], config: EncoderConfig) -> RenamedTensors:
    family = encoder_family(config.architecture)
    plain = {_canonical_name(name, family.prefixes): entry for name, entry in found.items()}
    layouts = [dict(stored_names(names, config.num_layers)) for names in family.layouts]
    layout = max(layouts, key=lambda names: sum(f"{stored.name}.weight" in plain for stored in names.values()))
    tensors, used, stored_names_of = {}, set(), {}
    for ours, stored in layout.items():
        for kind in ("weight", "bias"):
            name = stored_names_of[f"{ours}.{kind}"] = f"{stored.name}.{kind}"
            if name in plain:
                tensors[f"{ours}.{kind}"] = fused_part(plain[name], stored)
                used.add(name)
    return RenamedTensors(tensors, [name for name in plain if name not in used], stored_names_of)


def _canonical_name(name: str, prefixes: tuple[str, ...]) -> str:
    name = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
    head, _, kind = name.rpartition(".")
    return f"{head}.{_OLD_NORM_NAMES[kind]}" if kind in _OLD_NORM_NAMES else name


def fused_part(entry: TensorEntry, stored: StoredName) -> TensorEntry:
    if stored.parts == 1:
        return entry
    if not entry.shape or entry.shape[0] % stored.parts:
        raise CheckpointInvalid(
            f"{entry.file.name}: {stored.name} of shape {list(entry.shape)} cannot be split into {stored.parts} equal parts by rows."
        )
    nbytes = entry.nbytes // stored.parts
    start = entry.start + stored.part * nbytes
    return replace(entry, shape=(entry.shape[0] // stored.parts, *entry.shape[1:]), start=start, end=start + nbytes)


# ---- decoders ------------------------------------------------------------------------------------------------------


def rename_decoder_tensors(found: Mapping[str, TensorEntry], config: ModelConfig) -> RenamedTensors:
    """Return the tensors of a decoder under this package's names, in this package's order of rows.

    Left out are tensors that are computed, other parts of a model than its text half, keys and values that no layer
    reads, and a tied embedding that is stored twice.
    """
    expected = tensors_of(config)
    tensors, unused, stored_names = {}, [], {}
    # Files that keep one of two tied tensors may keep the output layer.
    only_head = config.tie_embeddings and not any(our_name(config, stored) == _EMBEDDING for stored in found)
    others = [stored for stored in found if our_name(config, stored) is None]
    if others:
        parts = ", ".join(sorted({name.rpartition(".")[0].split(".layers.")[0] for name in others})[:3])
        log.info("only the text half is served: %d tensors of other parts (%s, ...) are not read", len(others), parts)
    for stored, ours, entry in _separate_tensors(found, config):
        if ours is None or is_computed(config, stored) or is_unused(config, ours):
            continue
        if ours == _HEAD and config.tie_embeddings:
            if not only_head:
                continue
            ours = _EMBEDDING
        if ours not in expected:
            unused.append(stored)
        else:
            tensors[ours], stored_names[ours] = _rearranged(stored, entry, ours, expected[ours], config), stored
    return RenamedTensors(tensors, unused, stored_names)


def has_own_head(found: Mapping[str, TensorEntry], config: ModelConfig) -> bool:
    """Return True if a decoder's files have an output layer whose values differ from the embedding's."""
    names = {our_name(config, stored): stored for stored in found}
    pair = [found[names[name]] for name in (_HEAD, _EMBEDDING) if name in names]
    if len(pair) < 2 or pair[0] == pair[1]:
        return False
    first, second = map(_stored_parts, pair)
    return len(first) != len(second) or any(map(_differ, first, second))


def _stored_parts(entry: TensorEntry) -> list[TensorEntry]:
    return [part for _, part in entry.parts] if isinstance(entry, PackedEntry | QuantizedEntry) else [entry]


def _differ(one: TensorEntry, other: TensorEntry) -> bool:
    if (one.dtype, one.shape, one.nbytes) != (other.dtype, other.shape, other.nbytes):
        return True
    with one.file.open("rb") as first, other.file.open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        sizes = (min(_COMPARED_BYTES, one.nbytes - done) for done in range(0, one.nbytes, _COMPARED_BYTES))
        return any(first.read(size) != second.read(size) for size in sizes)


def _separate_tensors(
    found: Mapping[str, TensorEntry], config: ModelConfig
) -> Iterator[tuple[str, str | None, TensorEntry]]:
    for stored, entry in found.items():
        ours = our_name(config, stored)
        parts = [] if ours is None or isinstance(entry, EncodedEntry) else expert_parts(config, ours, entry.shape)
        if not parts:
            yield stored, ours, entry
        for part in parts:
            yield f"{stored} (expert {part.expert})", part.name, _expert_part(entry, part)


def _expert_part(entry: TensorEntry, part: ExpertPart) -> TensorEntry:
    nbytes, shape = entry.nbytes // entry.shape[0], entry.shape[1:]
    whole = replace(entry, shape=shape, start=entry.start + part.expert * nbytes)
    whole = replace(whole, end=whole.start + nbytes)
    if part.transposed or part.rows.step > 1:
        own = (len(part.rows), shape[0]) if part.transposed else (len(part.rows), *shape[1:])
        share = nbytes // part.rows.step  # of the bytes: gates and ups are read from the same ones
        start = whole.start + part.rows.start * share
        return RearrangedEntry(entry.file, entry.dtype, own, start, start + share, whole, part.rows, part.transposed)
    row = nbytes // max(1, shape[0])
    start = whole.start + part.rows.start * row
    return replace(whole, shape=(len(part.rows), *shape[1:]), start=start, end=start + len(part.rows) * row)


def _rearranged(stored: str, entry: TensorEntry, ours: str, shape: Shape, config: ModelConfig) -> TensorEntry:
    """Return the entry of a tensor in our order, or the stored one if that is the same or has a wrong shape."""
    rows, transposed, factors = head_rows(config, ours), is_transposed(config, ours), row_factors(config, ours)
    found = entry.shape[::-1] if transposed else entry.shape
    is_flat = len(shape) == 1 and entry.num_elements == shape[0]
    wanted = (rows.heads, *shape[1:]) if isinstance(rows, RepeatedRows) else shape
    if found != wanted and not is_flat:
        return entry
    if rows is None and not transposed and not factors and entry.shape == shape:
        return entry
    if isinstance(entry, EncodedEntry) and (transposed or entry.shape != wanted):
        raise CheckpointInvalid(
            f"{entry.file.name}: {stored} is quantized, which is not supported for {config.architecture}, whose rows are"
            " stored in another order. Use the original weights."
        )
    order = None if rows is None else rows.stored_rows()
    return RearrangedEntry(entry.file, entry.dtype, shape, entry.start, entry.end, entry, order, transposed, factors)
