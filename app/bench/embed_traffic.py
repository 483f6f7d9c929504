"""Requests for vectors of texts, to one server in one dialect, and when each was answered."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from app.bench import loops
from app.bench.embed_dialects import EmbedDialect, counted_tokens
from app.bench.loops import Bounds, Stretch
from app.bench.stats import MeasurementFailed
from app.bench.wire import Wire
from app.bench.workload import Lengths, LogNormal, TextDeck

FEW_WORDS, MORE_WORDS = 8, 40  # whose tokens the server counts
USUAL_TOKENS_AROUND = 2.0  # [CLS] and [SEP]


@dataclass(frozen=True, slots=True)
class Texts:
    """What every request brings: so many texts of such lengths, in tokens."""

    number: int
    lengths: Lengths | LogNormal
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Embedded:
    """One answered request. `intended`: when it should have been sent, which is when latency begins; `client`: whose it was.

    `num_tokens` is the server's own count, `None` where it says none; `asked_tokens` what was meant.
    """

    intended: float
    client: int
    started: float
    ended: float
    num_texts: int
    asked_tokens: int
    num_tokens: int | None


class EmbedTraffic:
    """To one server. Texts are drawn in the order of requests: the same for every server that counts alike."""

    def __init__(self, wire: Wire, dialect: EmbedDialect, model: str | None, deck: TextDeck, texts: Texts) -> None:
        self._wire, self._dialect, self._model, self._deck = wire, dialect, model, deck
        self._texts, self._random = texts, random.Random(texts.seed)

    async def clients(self, run: Stretch[Embedded], num_clients: int, bounds: Bounds) -> None:
        await loops.clients(run, num_clients, bounds, self._one)

    async def arrivals(self, run: Stretch[Embedded], moments: Iterable[float], bounds: Bounds) -> None:
        await loops.arrivals(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Requests that are not counted, beside each other; what fails will fail again."""
        asked = [self._ask()[1] for _ in range(num_requests)]
        await asyncio.gather(*(self._post(texts) for texts in asked), return_exceptions=True)

    async def _one(self, run: Stretch[Embedded], client: int, intended: float) -> Embedded:
        asked_tokens, texts = self._ask()
        started = time.perf_counter()
        body = await self._post(texts)
        ended = time.perf_counter()
        run.num_pieces += len(texts)
        return Embedded(intended, client, started, ended, len(texts), asked_tokens, counted_tokens(body))

    def _ask(self) -> tuple[int, list[str]]:
        lengths = [self._texts.lengths.draw(self._random) for _ in range(self._texts.number)]
        return sum(lengths), [self._deck.prompt(length) for length in lengths]

    async def _post(self, texts: Sequence[str]) -> bytes:
        return await posted(self._wire, self._dialect, self._model, texts)


async def posted(wire: Wire, dialect: EmbedDialect, model: str | None, texts: Sequence[str]) -> bytes:
    """A whole answer, not looked at. Raises `RequestBroken`."""
    path = dialect.path(model)
    return (await wire.post(path, dialect.body(texts, model))).checked(path).body


async def text_deck(wire: Wire, dialect: EmbedDialect, model: str | None, seed: int) -> tuple[TextDeck, str]:
    """Texts of as many tokens as wanted, by what the server counts of some words, and what they are, in words."""
    few, more = [await _tried(wire, dialect, model, number) for number in (FEW_WORDS, MORE_WORDS)]
    if few is None or more is None or more <= few:
        deck = TextDeck(1.0, USUAL_TOKENS_AROUND, seed)
        return deck, "a word for a token and two around them: the server does not say how many tokens it reads"
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return TextDeck(tokens_per_word, few - FEW_WORDS * tokens_per_word, seed), "as long as the server counts them"


async def _tried(wire: Wire, dialect: EmbedDialect, model: str | None, num_words: int) -> int | None:
    """Tokens of so many words; the answer is read whole, once. Raises `MeasurementFailed` where it is no vector."""
    body = await posted(wire, dialect, model, [TextDeck(1.0, 0.0).words(num_words)])
    try:
        sizes = dialect.sizes(json.loads(body))
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered no vectors: {body[:200]!r}") from error
    if len(sizes) != 1 or not sizes[0]:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered vectors of {sizes} numbers to one text")
    return counted_tokens(body)
