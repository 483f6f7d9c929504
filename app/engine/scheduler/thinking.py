"""The limit of a sequence's reasoning: at so many tokens its end is forced, token by token."""

from __future__ import annotations

from collections.abc import Iterable

from app.messages import ThinkingLimit

_NEAR = 64  # tokens: more than a step drafts, and than a device is launched ahead
_MOST_BEFORE = 4  # tokens of a completion before its reasoning begins


class ThinkingState:
    """The reasoning of one sequence, as far as it is written."""

    __slots__ = ("_begins_by", "_closing", "_count", "_limit", "_longest", "_recent", "is_over")

    def __init__(self, limit: ThinkingLimit) -> None:
        self._limit, self.is_over = limit, False
        self._recent: list[int] = []
        self._count = 0 if limit.is_open else None  # tokens of reasoning, once it has begun
        self._closing: int | None = None  # the next of the forced tokens
        self._longest = max(map(len, (*limit.starts, *limit.ends)))
        self._begins_by = self._longest + _MOST_BEFORE
        self._close_if_full()

    @property
    def forced_id(self) -> int | None:
        """The only token that may follow; None: any may."""
        return None if self._closing is None or self.is_over else self._limit.closing[self._closing]

    @property
    def is_near(self) -> bool:
        """True if the next step may reach the limit."""
        return not self.is_over and self._limit.budget - (self._count or 0) <= _NEAR

    def advance(self, token_id: int) -> None:
        if self.is_over:
            return
        if self._closing is not None:
            self._closing += 1
            self.is_over = self._closing == len(self._limit.closing)
            return
        self._recent = [*self._recent[1 - self._longest :], token_id] if self._longest > 1 else [token_id]
        if self._count is None:
            self._begins_by -= 1
            begins = self._ends_with(self._limit.starts)
            self._count = 0 if begins else None
            self.is_over = self._begins_by <= 0 and not begins
        else:
            self._count += 1
            self.is_over = self._ends_with(self._limit.ends)
        self._close_if_full()

    def after(self, token_ids: Iterable[int]) -> ThinkingState:
        """Return the state after further tokens, which this one does not take."""
        other = ThinkingState(self._limit)
        for name in self.__slots__:
            setattr(other, name, getattr(self, name))
        for token_id in token_ids:
            other.advance(token_id)
        return other

    def _ends_with(self, markers: Iterable[tuple[int, ...]]) -> bool:
        return any(tuple(self._recent[-len(one) :]) == one for one in markers)

    def _close_if_full(self) -> None:
        """Begin to close the reasoning at the limit, after the part of the end that is there."""
        if self.is_over or self._count is None or self._count < self._limit.budget:
            return
        closing, known = self._limit.closing, len(self._recent)
        recent = tuple(self._recent[known - min(self._count, known) :])
        self._closing = next(
            size for size in range(len(closing) - 1, -1, -1) if not size or recent[-size:] == closing[:size]
        )
