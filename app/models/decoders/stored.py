"""How checkpoints name and order the tensors of a decoder. Torch is not needed."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from app.models.decoders.config import ModelConfig
from app.models.decoders.families import DECODER_FAMILIES
from app.models.decoders.layer_config import RecurrentConfig, RowFactors

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")
EXPERT_PRODUCTS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}


def our_name(config: ModelConfig, stored: str) -> str | None:
    """Return our name of a stored tensor; None if it is not part of the text model."""
    family = DECODER_FAMILIES[config.architecture]
    if stored.startswith(family.ignored):
        return None
    for prefix, ours in family.prefixes.items():
        if stored.startswith(prefix):
            stored = ours + stored.removeprefix(prefix)
            break
    for part, ours in family.parts.items():
        stored = stored.replace(part, ours)
    if config.experts is None:  # then the expert that all tokens share is the MLP
        stored = stored.replace(".mlp.shared_expert.", ".mlp.")
    stem, _, kind = stored.rpartition(".")
    number = _NUMBER.search(f".{stem}.")
    layer = "" if number is None else number.group()
    if layer and family.has_more_layers and int(layer) >= config.num_layers:
        return None
    pattern = stem if number is None else f".{stem}.".replace(f".{layer}.", ".{}.", 1).strip(".")
    known = family.names.get(pattern)
    return stored if known is None else f"{known.replace('{}', layer)}.{kind}"


def is_unused(config: ModelConfig, name: str) -> bool:
    """Return True for what would make keys and values, by our name, in a layer that reads those of another layer."""
    number = _NUMBER.search(name)
    if number is None or not config.num_layers - config.shared_kv_layers <= int(number.group()) < config.num_layers:
        return False
    return any(f".self_attn.{part}." in name for part in ("k_proj", "v_proj", "k_norm", "v_norm"))


def is_computed(config: ModelConfig, stored: str) -> bool:
    return stored.endswith(DECODER_FAMILIES[config.architecture].computed)


def is_transposed(config: ModelConfig, name: str) -> bool:
    """Return True if a weight, by our name, is stored as [in, out]."""
    return DECODER_FAMILIES[config.architecture].transposed and name.endswith("_proj.weight")


def row_factors(config: ModelConfig, name: str) -> RowFactors:
    """Return the factors by which the rows of a stored weight are multiplied, by our name; none: as stored."""
    return next((factors for end, factors in config.weight_factors if name.endswith(end)), ())


@dataclass(frozen=True, slots=True)
class HeadRows:
    """The order in which a file has the rows of `heads` query heads, then `kv_heads` key and value heads.

    They are in as many `blocks`, in each of which its queries, its keys and its values follow each other, or values come
    before keys. `rotated`: elements of each
    query and key for a rotation of neighbours: 2i + j in the file is i + j · rotated / 2 here.
    """

    heads: int
    kv_heads: int
    head_dim: int
    blocks: int = 1
    values_first: bool = False
    rotated: int = 0

    def stored_rows(self) -> tuple[int, ...]:
        """Return the row in the file of each row here."""
        return _stored_rows(self)


@dataclass(frozen=True, slots=True)
class GroupedRows:
    """The order in which a file has rows: for each of `groups`, those of each of `parts` in turn.

    Here all rows of a part follow each other, and the parts are in the order of `places`.
    """

    groups: int
    parts: tuple[int, ...]
    places: tuple[int, ...]

    def stored_rows(self) -> tuple[int, ...]:
        whole, firsts = sum(self.parts), [sum(self.parts[:place]) for place in range(len(self.parts))]
        return tuple(
            group * whole + firsts[place] + row
            for place in self.places
            for group in range(self.groups)
            for row in range(self.parts[place])
        )


@dataclass(frozen=True, slots=True)
class RepeatedRows:
    """Rows of which the file has one for each of `heads`; here each follows itself `times` times."""

    heads: int
    times: int

    def stored_rows(self) -> tuple[int, ...]:
        return tuple(head for head in range(self.heads) for _ in range(self.times))


@cache
def _stored_rows(order: HeadRows) -> tuple[int, ...]:
    return tuple(
        head * order.head_dim + element for head, is_value in _heads(order) for element in _elements(order, is_value)
    )


def _heads(order: HeadRows) -> Iterator[tuple[int, bool]]:
    """Yield the head in the file of each head here, and True if it is a value."""
    queries, keys = order.heads // order.blocks, order.kv_heads // order.blocks
    block = queries + 2 * keys
    for head in range(order.heads):
        yield head // queries * block + head % queries, False
    for part in range(2):
        place = 1 - part if order.values_first else part
        for head in range(order.kv_heads):
            yield head // keys * block + queries + place * keys + head % keys, part == 1


def _elements(order: HeadRows, is_value: bool) -> Iterator[int]:
    half = 0 if is_value else order.rotated // 2
    for element in range(order.head_dim):
        yield 2 * (element % half) + element // half if element < 2 * half else element


def head_rows(config: ModelConfig, name: str) -> HeadRows | GroupedRows | RepeatedRows | None:
    """Return the order of the stored rows of a tensor, by our name; None: as here."""
    if config.one_gate_a_head and name.endswith(".self_attn.gate_proj.weight"):
        return RepeatedRows(config.num_heads, config.head_dim)
    if (
        config.has_output_gate
        and not config.gates_apart
        and name.endswith((".self_attn.q_proj.weight", ".self_attn.q_proj.bias"))
    ):
        return GroupedRows(config.num_heads, (config.head_dim, config.head_dim), (1, 0))
    if config.recurrent is not None and ".linear_attn.in_proj_" in name:
        return _state_rows(config.recurrent, name.rpartition(".")[0].rpartition("_")[2])
    rope = next((rope for rope in config.ropes if rope is not None), None)
    rotated = rope.dim if config.interleaved_rope and rope is not None else 0
    blocks = {"stacked": 1, "grouped": config.num_kv_heads, "quarters": 4}[config.qkv_layout]
    part = name.rpartition(".")[0].rpartition(".")[2]
    norm = config.head_norm
    if part == "qkv_proj" and (rotated or blocks > 1):
        values_first = config.qkv_layout == "quarters"
        return HeadRows(config.num_heads, config.num_kv_heads, config.head_dim, blocks, values_first, rotated)
    if not rotated:
        return None
    if part in ("q_norm", "k_norm") and norm is not None and norm.scope == "shared":
        return HeadRows(1, 0, config.head_dim, rotated=rotated)
    if part in ("q_proj", "q_norm"):
        return HeadRows(config.num_heads, 0, config.head_dim, rotated=rotated)
    if part in ("k_proj", "k_norm"):
        return HeadRows(config.num_kv_heads, 0, config.head_dim, rotated=rotated)
    return None


def _state_rows(recurrent: RecurrentConfig, product: str) -> GroupedRows | None:
    sizes = recurrent.sizes
    shared = sizes.heads // sizes.key_heads
    values = shared * sizes.value_size
    if product == "qkvz":
        return GroupedRows(sizes.key_heads, (sizes.key_size, sizes.key_size, values, values), (0, 1, 2, 3))
    return GroupedRows(sizes.key_heads, (shared, shared), (0, 1)) if product == "ba" else None


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Some rows, or if `transposed` columns, of one expert in a tensor that holds those of all experts."""

    name: str
    expert: int
    rows: range
    transposed: bool = False


def expert_parts(config: ModelConfig, ours: str, shape: tuple[int, ...]) -> list[ExpertPart]:
    """Return the tensors in a tensor [experts, rows, columns]; none if it does not hold all experts of a layer.

    The rows of gates come before those of ups. In `interleaved` files gates and ups take turns, weights are [experts,
    columns, rows], and biases are [experts, rows]. Files of `either` layout may have such weights too.
    """
    at, _, stored = ours.rpartition(".")
    layout = DECODER_FAMILIES[config.architecture].expert_layout
    interleaved = layout == "interleaved"
    is_bias = interleaved and stored.endswith("_bias")
    names = EXPERT_PRODUCTS.get(stored.removesuffix("_bias") if is_bias else stored, ())
    if not names or 0 in shape or len(shape) != (2 if is_bias else 3) or not at.endswith(".mlp.experts"):
        return []
    columns = config.hidden_size if len(names) > 1 or config.experts is None else config.experts.size
    transposed = interleaved or (layout == "either" and shape[-1] != columns)
    rows, kind = shape[-1] if transposed else shape[1], "bias" if is_bias else "weight"
    each = rows // len(names)
    return [
        ExpertPart(
            f"{at}.{expert}.{name}.{kind}",
            expert,
            range(place, rows, len(names)) if interleaved else range(place * each, (place + 1) * each),
            transposed and not is_bias,
        )
        for expert in range(shape[0])
        for place, name in enumerate(names)
    ]
