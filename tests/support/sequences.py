"""Rows of logits for sequences that each pick their next token."""

from __future__ import annotations

from app.engine.scheduler.batch import LogitRow, Sequence


def rows_of(sequences: list[Sequence]) -> list[LogitRow]:
    return [LogitRow(one, len(one.token_ids)) for one in sequences]
