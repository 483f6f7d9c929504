"""Maps the tensor names of an encoder checkpoint to this package's names.

It handles the prefixes and layouts of all families, and fused tensors. A part of a fused tensor is a range of its
rows, so the header alone is enough: nothing is read or copied.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.errors import CheckpointInvalid
from app.models.encoder_config import EncoderConfig
from app.models.encoder_families import Stored, family_of, stored_names
from app.weights.headers import TensorEntry

DECODER_PREFIX = "model."
_DECODER_HEADS: Mapping[str, str] = {"dense": "head.dense", "classifier": "head.out", "score": "head.out"}
_OLD_NORMS: Mapping[str, str] = {"gamma": "weight", "beta": "bias"}  # names in the first BERT checkpoints
# Unused tensors: heads for masked tokens, next sentences or answers, computed positions, and parts of heads that are
# not served.
_HARMLESS = re.compile(
    r"(cls|lm_head|pooler|classifier|pre_classifier|qa_outputs|score|head|decoder|dense|vocab_\w+)\."
    r"|(embeddings\.|.*\.)?position_ids$|.*rotary_emb\.inv_freq$"
)


@dataclass(frozen=True, slots=True)
class Renamed:
    """Tensors by this package's names.

    `spare` are the stored names of unused tensors. `theirs` maps each of this package's names to the name in the
    file, or to the one it would have.
    """

    tensors: dict[str, TensorEntry]
    spare: list[str]
    theirs: Mapping[str, str]


def renamed(found: Mapping[str, TensorEntry], config: EncoderConfig) -> Renamed:
    """Return the tensors under this package's names; unused tensors that are known to be harmless are left out."""
    if any("lora_" in name or ".parametrizations." in name for name in found):
        raise CheckpointInvalid(
            "The weights hold adapters (LoRA), which are not supported: merge one into the weights and save them."
        )
    read = _of_encoder(found, config) if config.decoder is None else _of_decoder(found)
    return replace(read, spare=[name for name in read.spare if not _HARMLESS.match(name)])


def _of_decoder(found: Mapping[str, TensorEntry]) -> Renamed:
    """Map the names of a decoder that is served for its hidden states.

    Saved alone it has no prefix; saved with a head it has one. Missing and extra tensors are found later.
    """
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
    return Renamed(tensors, spare, {})


def _of_encoder(found: Mapping[str, TensorEntry], config: EncoderConfig) -> Renamed:
    family = family_of(config.architecture)
    plain = {_plain(name, family.prefixes): entry for name, entry in found.items()}
    layouts = [dict(stored_names(names, config.num_layers)) for names in family.layouts]
    layout = max(layouts, key=lambda names: sum(f"{stored.name}.weight" in plain for stored in names.values()))
    tensors, used, theirs = {}, set(), {}
    for ours, stored in layout.items():
        for kind in ("weight", "bias"):
            name = theirs[f"{ours}.{kind}"] = f"{stored.name}.{kind}"
            if name in plain:
                tensors[f"{ours}.{kind}"] = part_of(plain[name], stored)
                used.add(name)
    return Renamed(tensors, [name for name in plain if name not in used], theirs)


def _plain(name: str, prefixes: tuple[str, ...]) -> str:
    """Return the name without the base model's prefix, with the usual names for a norm's tensors."""
    name = next((name.removeprefix(prefix) for prefix in prefixes if name.startswith(prefix)), name)
    head, _, kind = name.rpartition(".")
    return f"{head}.{_OLD_NORMS[kind]}" if kind in _OLD_NORMS else name


def part_of(entry: TensorEntry, stored: Stored) -> TensorEntry:
    """Return the rows of one of several tensors that are fused into one."""
    if stored.parts == 1:
        return entry
    if not entry.shape or entry.shape[0] % stored.parts:
        raise CheckpointInvalid(
            f"{entry.file.name}: {stored.name} of shape {list(entry.shape)} cannot be split into {stored.parts} equal parts by rows."
        )
    nbytes = entry.nbytes // stored.parts
    start = entry.start + stored.part * nbytes
    return replace(entry, shape=(entry.shape[0] // stored.parts, *entry.shape[1:]), start=start, end=start + nbytes)
