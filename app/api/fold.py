"""A whole answer as a fold of the pieces that a stream would have shown: one path, so a stream and an answer cannot disagree."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.api.streaming import Pieces
from app.generation import Accepted, ChoiceFinished, Piece, ScoredToken, TextDelta, Usage
from app.messages import FinishReason, Timings

PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class Choice:
    """One completion as far as it has come."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    finished: ChoiceFinished | None = None

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def reason(self) -> FinishReason:
        assert self.finished is not None, "every choice of a whole answer has ended"
        return self.finished.reason


@dataclass(slots=True)
class Whole:
    """Everything that the pieces said, choice by choice."""

    by_index: dict[int, Choice] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(0))

    def add(self, piece: Piece) -> None:
        if isinstance(piece, Accepted):
            return
        choice = self.by_index.setdefault(piece.choice, Choice(piece.choice))
        if isinstance(piece, TextDelta):
            choice.texts.append(piece.text)
            choice.token_ids += piece.token_ids
            choice.logprobs += piece.logprobs
        else:
            choice.finished = piece
            self.usage = piece.usage

    @property
    def choices(self) -> list[Choice]:
        return [self.by_index[index] for index in sorted(self.by_index)]

    def headers(self) -> dict[str, str]:
        return server_timing(choice.finished.timings for choice in self.choices if choice.finished)


async def fold(pieces: Pieces) -> Whole:
    """Reads to the end. Raises what the pieces raise."""
    whole = Whole()
    async for piece in pieces:
        whole.add(piece)
    return whole


def server_timing(timings: Iterable[Timings], *phases: str) -> dict[str, str]:
    """A `Server-Timing` header with the longest of each phase over choices that ran side by side, milliseconds.

    A stream's header is sent at its first token: it can tell `queue` and `prefill`, and HTTP has no place after the body for the rest.
    """
    each = list(timings)
    if not each:
        return {}
    seconds = {phase: max(getattr(timing, f"{phase}_seconds") for timing in each) for phase in phases or PHASES}
    return {"server-timing": ", ".join(f"{phase};dur={longest * 1000:.1f}" for phase, longest in seconds.items())}
