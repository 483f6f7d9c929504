"""Rows of logits for sequences that each pick their next token."""

from __future__ import annotations

from app.engine.batch import RowToPick
from app.engine.sequence import Sequence


def rows_of(sequences: list[Sequence]) -> list[RowToPick]:
    return [RowToPick(one, len(one.token_ids)) for one in sequences]
