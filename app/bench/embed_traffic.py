"""Embedding requests to one server in one dialect, and the timing of each answer."""

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

FEW_WORDS, MORE_WORDS = 8, 40  # lengths of the two probe texts
USUAL_TOKENS_AROUND = 2.0  # [CLS] and [SEP]


@dataclass(frozen=True, slots=True)
class Texts:
    """Content of every request: `number` texts with lengths drawn from `lengths`, in tokens."""

    number: int
    lengths: Lengths | LogNormal
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Embedded:
    """Timing of one answered request, in `time.perf_counter` seconds.

    `intended` is when the request should have been sent; latency starts there. `client` is the index of its client.
    `asked_tokens` is the intended number of tokens; `num_tokens` is the server's count, or None if it reports none.
    """

    intended: float
    client: int
    started: float
    ended: float
    num_texts: int
    asked_tokens: int
    num_tokens: int | None


class EmbedTraffic:
    """Embedding requests to one server.

    Texts are drawn in the order of requests, so every server that counts tokens alike receives the same texts.
    """

    def __init__(self, wire: Wire, dialect: EmbedDialect, model: str | None, deck: TextDeck, texts: Texts) -> None:
        self._wire, self._dialect, self._model, self._deck = wire, dialect, model, deck
        self._texts, self._random = texts, random.Random(texts.seed)

    async def clients(self, run: Stretch[Embedded], num_clients: int, bounds: Bounds) -> None:
        """Run a closed loop of `num_clients` clients."""
        await loops.clients(run, num_clients, bounds, self._one)

    async def arrivals(self, run: Stretch[Embedded], moments: Iterable[float], bounds: Bounds) -> None:
        """Run an open loop with requests at these moments, in seconds from the start."""
        await loops.arrivals(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
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
    """Send one request and return the body of the answer without parsing it.

    Raises:
        RequestBroken: No complete answer with status 200 arrived.
    """
    path = dialect.path(model)
    return (await wire.post(path, dialect.body(texts, model))).checked(path).body


async def text_deck(wire: Wire, dialect: EmbedDialect, model: str | None, seed: int) -> tuple[TextDeck, str]:
    """Return a source of texts with a requested number of tokens, and a description of them.

    The number of tokens per word comes from the server's own counts for two probe texts.
    """
    few, more = [await _tried(wire, dialect, model, number) for number in (FEW_WORDS, MORE_WORDS)]
    if few is None or more is None or more <= few:
        deck = TextDeck(1.0, USUAL_TOKENS_AROUND, seed)
        return deck, "one word per token plus two special tokens: the server does not report token counts"
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return TextDeck(tokens_per_word, few - FEW_WORDS * tokens_per_word, seed), "sized by the server's own token count"


async def _tried(wire: Wire, dialect: EmbedDialect, model: str | None, num_words: int) -> int | None:
    """Send one text of `num_words` words, check the answer, and return the token count that the server reports.

    Raises:
        MeasurementFailed: The answer is not exactly one vector.
    """
    body = await posted(wire, dialect, model, [TextDeck(1.0, 0.0).words(num_words)])
    try:
        sizes = dialect.sizes(json.loads(body))
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered no vectors: {body[:200]!r}") from error
    if len(sizes) != 1 or not sizes[0]:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered one text with vectors of sizes {sizes}")
    return counted_tokens(body)
