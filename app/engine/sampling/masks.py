"""Masks of the tokens that each row of a step may sample: grammar, allowed tokens, bad words, `min_tokens`.

A mask is made before the step runs, because the output product compares only allowed tokens (csrc/pick.h). A grammar's
mask of 50,000 tokens takes 7 to 100 µs. Steps use all cores, so another thread would only take time from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.engine.scheduler.batch import ScheduledSpan, Sequence

_MIN_ROWS = 16
_MAX_KEPT_LISTS = 16  # lists of allowed tokens whose masks are kept

Words = NDArray[Any]  # uint32: bit t % 32 of word t // 32 is token t


class TokenMasks:
    """The masks of one step's rows, `words` int32 [rows, ceil(vocab / 32)], at a fixed address until rows exceed it."""

    __slots__ = ("_array", "_vocab_size", "words")

    def __init__(self, vocab_size: int, rows: int = _MIN_ROWS) -> None:
        self._vocab_size = vocab_size
        self._array: Words = numpy.zeros((rows, -(-vocab_size // 32)), numpy.uint32)
        self.words = torch.from_numpy(self._array.view(numpy.int32))

    def for_step(self, spans: Iterable[ScheduledSpan], num_rows: int) -> TokenMasks | None:
        """Return the masks of a step's rows, in order, maybe in a larger object; None if no row is restricted."""
        sampling = [span for span in spans if span.samples]
        if not any(span.sequence.restricts_tokens for span in sampling):
            return None
        masks = self
        if num_rows > len(self._array):
            masks = TokenMasks(self._vocab_size, max(num_rows, 2 * len(self._array)))
        first = 0
        for span in sampling:
            rows = masks._array[first : first + span.num_samples]
            _fill(rows, span, self._vocab_size)
            first += span.num_samples
        return masks

    def allowed(self, num_rows: int) -> Tensor:
        bits = numpy.unpackbits(self._array[:num_rows].view(numpy.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits[:, : self._vocab_size]).bool()


def _fill(rows: Words, span: ScheduledSpan, vocab_size: int) -> None:
    sequence, params = span.sequence, span.sequence.params
    if sequence.grammar is None:
        rows[:] = 0xFFFFFFFF
    else:
        sequence.grammar.fill_masks(rows.ctypes.data, rows.strides[0], span.draft_ids)
    if params.allowed_token_ids is not None:
        rows &= _mask_of(params.allowed_token_ids, vocab_size)
    for place in range(span.num_samples):
        known = span.known_end + place
        if known - sequence.num_prompt_tokens < params.min_tokens:
            _clear(rows[place], sequence.stop_ids)
        if sequence.bad_word_ids:
            _clear(rows[place], _forbidden_ids(sequence, span.draft_ids[:place]))
        if not rows[place].any():
            _allow_end(rows[place], sequence)


def _forbidden_ids(sequence: Sequence, draft_ids: tuple[int, ...]) -> set[int]:
    """Return the tokens that would complete a bad word of the completion."""
    longest = max(map(len, sequence.bad_word_ids)) - 1
    start = max(sequence.num_prompt_tokens, len(sequence.token_ids) - longest)
    recent = (*sequence.token_ids[start:], *draft_ids)
    return {
        word[-1]
        for word in sequence.bad_word_ids
        if len(word) == 1 or (len(recent) >= len(word) - 1 and recent[1 - len(word) :] == word[:-1])
    }


def _clear(row: Words, token_ids: Iterable[int]) -> None:
    for token_id in token_ids:
        if token_id >> 5 < len(row):
            row[token_id >> 5] &= ~numpy.uint32(1 << (token_id & 31))


def _allow_end(row: Words, sequence: Sequence) -> None:
    """Allow the end tokens, or any token if there are none, where the rules together allow no token."""
    if not sequence.stop_ids:
        row[:] = 0xFFFFFFFF
    for token_id in sequence.stop_ids:
        if token_id >> 5 < len(row):
            row[token_id >> 5] |= numpy.uint32(1 << (token_id & 31))


@lru_cache(_MAX_KEPT_LISTS)
def _mask_of(token_ids: tuple[int, ...], vocab_size: int) -> Words:
    bits = numpy.zeros(-(-vocab_size // 32) * 32, numpy.uint8)
    bits[list(token_ids)] = 1
    words: Words = numpy.packbits(bits, bitorder="little").view(numpy.uint32)
    return words
