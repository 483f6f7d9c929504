"""Computes the values of quantized weights in FP32, and the codes that our forms can hold.

A value is scale * (code - zero), or scale * code + minimum, computed in FP32 as the libraries do in the dtype of the
scales.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from app.errors import CheckpointInvalid
from app.weights.quantized.entries import GROUP, CodeLayout, PackedEntry
from app.weights.safetensors import TensorEntry
from armature_kernels.linear.quantization import Int4Weight, Int8Weight

_Read = Callable[[TensorEntry], Tensor]
WORD_BITS = 32
# The output of a word's n-th code in AWQ: codes are stored in the order 0, 2, 4, 6, 1, 3, 5, 7.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
# Levels of NF4: quantiles of the normal distribution (Dettmers et al., "QLoRA", 2023, appendix E); FP4 by its bits.
_TABLES = {
    "nf4": (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
        -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
    "fp4": tuple(
        sign * size / 12 for sign in (1, -1) for size in (0, 0.0625, 8, 12, 4, 6, 2, 3)
    ),
}  # fmt: skip
_E8M0_NAN = 255
E2M1 = tuple(sign * size for sign in (1, -1) for size in (0, 1, 2, 3, 4, 6, 8, 12))  # twice the values
# The values of a byte's low and high half, side by side.
_E2M1_PAIRS = torch.tensor([(E2M1[byte % 16], E2M1[byte // 16]) for byte in range(256)], dtype=torch.int8).view(
    torch.int16
)[:, 0]


@dataclass(frozen=True, slots=True)
class RowCodes:
    """Codes [rows, inputs] of some rows, integers, with scales FP32 and zeros or minimums [rows, groups].

    `places` int64 [inputs] is the group of each input, None if they follow each other.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor | None
    minimums: Tensor | None
    group: int
    places: Tensor | None = None

    def values(self) -> Tensor:
        codes, scales = self.codes.float(), self._spread(self.scales)
        if self.minimums is not None:
            return scales * codes + self._spread(self.minimums)
        return scales * (codes if self.zeros is None else codes - self._spread(self.zeros))

    def centered(self) -> Tensor:
        codes = self.codes.short()
        return codes if self.zeros is None else codes - self._spread(self.zeros).short()

    def _spread(self, each: Tensor) -> Tensor:
        if self.places is not None:
            return each[:, self.places]
        return each.repeat_interleave(self.group, 1)[:, : self.codes.shape[1]]


def unpack(words: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 [..., n] that words of 32 bits [..., n * bits / 32] hold, lowest bits first."""
    mask = 2**bits - 1
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        narrow: Tensor = words.contiguous().view(torch.uint8)[..., None] >> shifts & mask
        return narrow.flatten(-2)
    first = torch.arange(GROUP) * bits  # 32 codes fill `bits` words
    wide = words.contiguous().view(torch.int32).view(*words.shape[:-1], -1, bits).to(torch.int64) & 0xFFFFFFFF
    low = wide[..., first // 32] >> first % 32
    high = wide[..., (first // 32 + 1).clamp(max=bits - 1)] << 32 - first % 32
    codes: Tensor = ((low | high) & mask).to(torch.uint8)
    return codes.flatten(-2)


def decode_rows(entry: PackedEntry, rows: range, read: _Read) -> Tensor:
    """Return the values of some rows of a weight, FP32 [rows, inputs]."""
    if entry.packing is CodeLayout.FP8:
        return _fp8(entry, rows, read)
    if entry.packing is CodeLayout.BITSANDBYTES:
        return _bitsandbytes(entry, rows, read)
    return row_codes(entry, rows, read).values()


def held_codes(entry: PackedEntry, rows: range, read: _Read, bits: int) -> Int4Weight | Int8Weight | None:
    """Return codes in groups of 32 with BF16 scales; None if codes of these bits cannot hold them.

    Raises `CheckpointInvalid` if the zeros or the order are not as config.json says.
    """
    if not entry.form:
        return None
    found = row_codes(entry, rows, read)
    if found.places is not None:
        raise CheckpointInvalid(
            f"{entry.name[:120]}: its g_idx orders the inputs, and config.json says desc_act: false; it must be true."
        )
    found = replace(found, places=None)
    repeats, inputs = found.group // GROUP, found.codes.shape[1]
    scales = found.scales.repeat_interleave(repeats, 1)[:, : inputs // GROUP].to(torch.bfloat16)
    if bits == 8:
        centered = None if found.minimums is not None else found.centered()
        if centered is None or int(centered.amin()) < -128 or int(centered.amax()) > 127:
            return None
        return Int8Weight(centered.to(torch.int8), scales)
    if entry.form == "int4/32":
        centered = found.centered() + 8
        if int(centered.amin()) < 0 or int(centered.amax()) > 15:
            raise CheckpointInvalid(
                f"{entry.name[:120]}: its qzeros are not in the middle, and config.json says sym: true; it must be false."
            )
        return Int4Weight(centered.to(torch.uint8), scales, None, GROUP, inputs)
    minimums = found.minimums
    if minimums is None:
        assert found.zeros is not None, "codes with a minimum have zeros or minimums"
        minimums = -found.scales * found.zeros.float()
    own = minimums.repeat_interleave(repeats, 1)[:, : inputs // GROUP].to(torch.bfloat16)
    codes = found.codes
    if entry.middle:  # signed in the library, and stored without a sign
        codes = codes.to(torch.uint8)
    return Int4Weight(codes, scales, own, GROUP, inputs)


def row_codes(entry: PackedEntry, rows: range, read: _Read) -> RowCodes:
    parts = {role: read(part) for role, part in entry.parts}
    if entry.packing is CodeLayout.MXFP4:
        return _mxfp4(entry, parts, rows)
    if entry.packing is CodeLayout.GPTQ:
        codes = unpack(parts["codes"][:, rows.start : rows.stop].T, entry.bits)
        zeros = _columns(parts["zeros"], rows, entry.bits, entry.added).T.short()
        scales = parts["scales"][:, rows.start : rows.stop].T.float()
        return RowCodes(codes, scales, zeros, None, entry.group, _places(entry, parts.get("order"), scales.shape[1]))
    if entry.packing is CodeLayout.AWQ:
        codes, zeros = (_awq_columns(parts[role], rows).T for role in ("codes", "zeros"))
        scales = parts["scales"][:, rows.start : rows.stop].T.float()
        return RowCodes(codes, scales, zeros, None, entry.group)
    stored = parts["codes"][rows.start : rows.stop]
    scales = _scales(entry, parts, rows)
    if entry.packing is CodeLayout.INTEGERS:
        return RowCodes(stored, scales, None, None, entry.group)
    codes = unpack(stored, entry.bits)
    if "minimums" in parts:
        return RowCodes(codes, scales, None, parts["minimums"][rows.start : rows.stop].float(), entry.group)
    zeros = torch.full(scales.shape, entry.middle, dtype=torch.int16)
    if "zeros" in parts:  # signed too, so both have the middle added
        zeros = _columns(parts["zeros"].T, rows, entry.bits).T.short()
    return RowCodes(codes, scales, zeros, None, entry.group, _places(entry, parts.get("order"), scales.shape[1]))


def _mxfp4(entry: PackedEntry, parts: dict[str, Tensor], rows: range) -> RowCodes:
    """Return E2M1 values as doubled integers -12 to 12, and halved scales, powers of two but 255: `CheckpointInvalid`."""
    stored, exponents = (parts[role][rows.start : rows.stop, entry.place] for role in ("codes", "scales"))
    if int(exponents.amax()) == _E8M0_NAN:
        raise CheckpointInvalid(
            f"{entry.file.name}: {entry.name[:120]} has a scale of {_E8M0_NAN}, which is no number in MXFP4."
        )
    pairs = _E2M1_PAIRS.index_select(0, stored.flatten().int())
    scales = torch.exp2(exponents.double() - 128).float()
    return RowCodes(pairs.view(torch.int8).view(len(rows), -1), scales, None, None, entry.group)


def _scales(entry: PackedEntry, parts: dict[str, Tensor], rows: range) -> Tensor:
    if "largest" in parts:  # of an output, whose code is 127
        return parts["largest"][rows.start : rows.stop, None] / 127
    scales = parts["scales"].float()
    return scales.expand(len(rows), 1) if scales.dim() == 1 else scales[rows.start : rows.stop]


def _columns(words: Tensor, rows: range, bits: int, added: int = 0) -> Tensor:
    """Return codes uint8 [n, rows] of these columns of packed words [n, columns * bits / 32], with `added` to each.

    A sum that is too large wraps to 0, and carries into the next code of its word. That is how GPTQModel reads zeros of
    GPTQ's first version, and the opposite of how it writes them. In 3 bits, where codes cross words, it neither carries
    nor borrows.
    """
    first = rows.start // GROUP * GROUP
    part = words[:, first // GROUP * bits : -(-rows.stop // GROUP) * bits]
    if WORD_BITS % bits == 0:
        codes = unpack(part + added * ((2**WORD_BITS - 1) // (2**bits - 1)), bits)
    else:
        codes = unpack(part, bits) + added & 2**bits - 1
    return codes[:, rows.start - first : rows.stop - first]


def _awq_columns(words: Tensor, rows: range) -> Tensor:
    first = rows.start // 8 * 8
    codes = unpack(words[:, first // 8 : -(-rows.stop // 8)], 4)
    ordered: Tensor = codes.view(len(codes), -1, 8)[..., list(_AWQ_PLACES)].flatten(1)
    return ordered[:, rows.start - first : rows.stop - first]


def _places(entry: PackedEntry, order: Tensor | None, groups: int) -> Tensor | None:
    """Return the group of each input; None if in order. Raises `CheckpointInvalid` if a group does not exist."""
    if order is None:
        return None
    places = order.to(torch.int64)
    if int(places.amin()) < 0 or int(places.amax()) >= groups:
        raise CheckpointInvalid(
            f"{entry.file.name}: {entry.name[:120]} has {groups} groups, and its g_idx names another one."
        )
    return None if torch.equal(places, torch.arange(len(places)) // entry.group) else places


def fp8_codes(entry: PackedEntry, rows: range, read: _Read) -> tuple[Tensor, Tensor]:
    """Return the codes of some rows [n, inputs] as 8-bit floats, and their scales FP32 [n, inputs / width of a block]."""
    parts = {role: read(part) for role, part in entry.parts}
    scales = parts["scales"].float()
    grid = scales.reshape(-1, scales.shape[1] if scales.dim() == 2 else 1)
    return parts["codes"][rows.start : rows.stop], grid[torch.arange(rows.start, rows.stop) // entry.block[0]]


def _fp8(entry: PackedEntry, rows: range, read: _Read) -> Tensor:
    codes, scales = fp8_codes(entry, rows, read)
    return codes.float() * scales.repeat_interleave(entry.block[1], 1)[:, : codes.shape[1]]


def _bitsandbytes(entry: PackedEntry, rows: range, read: _Read) -> Tensor:
    """Return values of a table times the largest of their block, which may be quantized itself."""
    parts = {
        role: read(replace(part, dtype="U8", shape=(part.nbytes,)) if role == "codes" else part)
        for role, part in entry.parts
    }
    inputs, group = entry.shape[1], entry.group
    begin, end = rows.start * inputs, rows.stop * inputs
    first, last = begin // group, -(-end // group)
    pairs = parts["codes"][first * group // 2 : last * group // 2]
    codes = torch.stack((pairs >> 4, pairs & 15), dim=1).flatten()[begin - first * group :][: end - begin]
    largest = parts["scales"][first:last]
    if "nested_scales" in parts:
        own = parts["nested_scales"][torch.arange(first, last) // entry.nested_block]
        largest = parts["nested_table"][largest.long()] * own + entry.offset
    spread = largest.repeat_interleave(group)[begin - first * group :][: end - begin]
    return (torch.tensor(_TABLES[entry.table])[codes.long()] * spread).view(len(rows), inputs)
