"""Collection of a stream's events into a complete response, so that both forms come from the same events."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from app.api.streaming import Pieces
from app.generation import Accepted, ChoiceFinished, Piece, ScoredToken, TextDelta, Usage
from app.messages import FinishReason, Timings

PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class Choice:
    """One completion as collected so far."""

    index: int
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)
    finished: ChoiceFinished | None = None

    @property
    def text(self) -> str:
        """The text so far."""
        return "".join(self.texts)

    @property
    def reason(self) -> FinishReason:
        """Finish reason; valid only after the choice has finished."""
        assert self.finished is not None, "every choice of a complete response has finished"
        return self.finished.reason


@dataclass(slots=True)
class Whole:
    """A request's completions, collected from its stream events."""

    by_index: dict[int, Choice] = field(default_factory=dict)
    usage: Usage = field(default_factory=lambda: Usage(0))

    def add(self, piece: Piece) -> None:
        """Add one event to its choice."""
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
        """Choices in the order of their index."""
        return [self.by_index[index] for index in sorted(self.by_index)]

    def headers(self) -> dict[str, str]:
        """Return the `Server-Timing` header over all choices."""
        return server_timing(choice.finished.timings for choice in self.choices if choice.finished)


async def fold(pieces: Pieces) -> Whole:
    """Read the stream to its end. Exceptions of the stream are raised."""
    whole = Whole()
    async for piece in pieces:
        whole.add(piece)
    return whole


def server_timing(timings: Iterable[Timings], *phases: str) -> dict[str, str]:
    """Return a `Server-Timing` header with the longest time of each phase over all choices, in milliseconds.

    Choices run in parallel. A stream sends its headers at the first token, so it can report `queue` and
    `prefill` only; HTTP has no place for the rest after the body.
    """
    each = list(timings)
    if not each:
        return {}
    seconds = {phase: max(getattr(timing, f"{phase}_seconds") for timing in each) for phase in phases or PHASES}
    return {"server-timing": ", ".join(f"{phase};dur={longest * 1000:.1f}" for phase, longest in seconds.items())}
