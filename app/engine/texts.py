"""Which texts are computed together: requests take turns so that neither a long one nor a short one waits for the other. Counts only.

Nothing is padded, so any lengths may share a step at no cost; what a text pays for its neighbours is that all end together. So half of a
step is the oldest request's, and the rest goes to requests as they came, but that larger ones yield to smaller ones: those that fit a step
wait only for each other and for half of what is larger. (The least first among them too, p99 was 8 times p50 under 32 clients.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from app.messages import Array, Encode, Text

FLOAT_BYTES = 4
Length = tuple[int, int]  # of a text: its tokens and, negative, its index, so that among equals the first is the last


def size_class(tokens: int, step: int) -> int:
    """0: they fit a step; then 1, 2, … for up to 2, 4, … times as many."""
    return max((tokens - 1) // max(step, 1), 0).bit_length()


@dataclass(frozen=True, slots=True)
class Room:
    """Of a batch: so many tokens and so many texts more."""

    tokens: int
    texts: int

    def beside(self, spans: Collection[TextSpan]) -> Room:
        """What is left of it next to these."""
        return Room(self.tokens - sum(span.num_tokens for span in spans), self.texts - len(spans))


@dataclass(slots=True, eq=False)
class Encoding:
    """An `Encode` inside the engine, `num_tokens` in all. `left` are its texts that are still to be computed, the longest last.

    `alone`: a step that it was in has failed, so it goes without others to see whose fault that was.
    """

    order: Encode
    left: list[Length]
    num_tokens: int
    tokens_left: int
    results: dict[int, dict[str, bytes]] = field(default_factory=dict)  # by index of the text
    started_at: float | None = None
    alone: bool = False

    @classmethod
    def of(cls, order: Encode) -> Encoding:
        left = sorted((len(text.token_ids), -index) for index, text in enumerate(order.texts))
        num_tokens = sum(tokens for tokens, _ in left)
        return cls(order, left, num_tokens, num_tokens)

    @property
    def longest(self) -> int:
        """Tokens of the longest of those that are left."""
        return self.left[-1][0] if self.left else 0

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.order.texts)

    def take(self, room: Room) -> list[TextSpan]:
        """Its texts that fit, the longest first: what is left over then fits best into what other steps leave."""
        taken: list[TextSpan] = []
        while room.texts > 0 and (at := bisect_right(self.left, (room.tokens, 0))) > 0:
            tokens, index = self.left.pop(at - 1)
            room = Room(room.tokens - tokens, room.texts - 1)
            self.tokens_left -= tokens
            taken.append(TextSpan(self, -index, tokens))
        return taken

    def spans(self) -> list[TextSpan]:
        """All of its texts, in order."""
        return [TextSpan(self, index, len(text.token_ids)) for index, text in enumerate(self.order.texts)]

    def put_back(self, spans: Iterable[TextSpan]) -> None:
        """Taken, but not computed."""
        self.left = sorted([*self.left, *((span.num_tokens, -span.index) for span in spans)])
        self.tokens_left = sum(tokens for tokens, _ in self.left)

    def arrays(self) -> dict[str, Array]:
        """All that was asked for, texts in order; once it is done."""
        return {name: self._array(name) for name in self.order.outputs}

    def _array(self, name: str) -> Array:
        parts = [self.results[index][name] for index in range(len(self.order.texts))]
        each_token = name == "last_hidden_state"
        rows = self.num_tokens if each_token else len(parts)
        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        return Array("FP32", (rows, len(joined) // FLOAT_BYTES // rows), joined)


@dataclass(frozen=True, slots=True)
class TextSpan:
    """One text of a batch, and its number of tokens."""

    request: Encoding
    index: int
    num_tokens: int

    @property
    def text(self) -> Text:
        return self.request.order.texts[self.index]


class TextQueue:
    """Open requests, oldest first; those of a batch stay until they are done, or gone."""

    def __init__(self) -> None:
        self._requests: dict[str, Encoding] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def oldest(self) -> Encoding:
        return next(iter(self._requests.values()))

    @property
    def requests(self) -> Iterable[Encoding]:
        """Oldest first."""
        return self._requests.values()

    @property
    def num_tokens(self) -> int:
        """Of all texts that are still to be computed."""
        return sum(request.tokens_left for request in self._requests.values())

    def add(self, order: Encode) -> Encoding:
        request = self._requests[order.request_id] = Encoding.of(order)
        return request

    def remove(self, request_id: str) -> Encoding | None:
        return self._requests.pop(request_id, None)

    def take(self, room: Room) -> tuple[TextSpan, ...]:
        """The next batch; the longest text that is left of the oldest request is in it, whatever its length.

        Each batch takes a text of the oldest request, so a text waits for no more steps than older requests have texts.
        """
        left = [request for request in self._requests.values() if request.left]  # of others all texts are under way
        if not left:
            return ()
        suspect = next((request for request in left if request.alone), None)
        first = suspect or left[0]
        half = room if suspect else Room(room.tokens // 2, max(room.texts // 2, 1))
        spans = first.take(Room(max(half.tokens, first.longest), half.texts))
        if suspect is not None:
            return tuple(spans)
        whole, room = room.tokens, room.beside(spans)
        for request in sorted(left, key=lambda request: size_class(request.tokens_left, whole)):
            if room.tokens <= 0 or room.texts <= 0:
                break
            more = request.take(room)
            room = room.beside(more)
            spans += more
        return tuple(spans)
