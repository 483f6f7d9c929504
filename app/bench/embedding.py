"""Embedding under load, as measured by `armature bench http --kind embed`.

Reports texts and tokens per second, and latencies of whole requests.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.embed_dialects import EMBED_DIALECTS
from app.bench.embed_traffic import Embedded, EmbedTraffic, Texts, text_deck
from app.bench.load import Level, Target
from app.bench.loops import Bounds, Side
from app.bench.prompts import served_model
from app.bench.rates import Counted, speed
from app.bench.stats import Figure
from app.bench.tally import failures, latency
from app.bench.wire import Wire

LOAD_SECONDS = 10.0  # requests take milliseconds, so a run has thousands of them


@dataclass(frozen=True, slots=True)
class Embedding:
    """Embedding workload: each answer arrives at once and has one vector per text."""

    texts: Texts
    piece: str = "text"

    @property
    def seed(self) -> int:
        """Seed of the text lengths."""
        return self.texts.seed

    def bounds(self, level: Level) -> Bounds:
        """Return the default limits of one run: `LOAD_SECONDS`."""
        return Bounds(seconds=LOAD_SECONDS)

    async def traffic(self, wire: Wire, target: Target) -> tuple[EmbedTraffic, str]:
        """Return the traffic for one server, and a description of its texts."""
        dialect = EMBED_DIALECTS[target.api]
        model = target.model or await served_model(wire)
        deck, words = await text_deck(wire, dialect, model, self.seed)
        return EmbedTraffic(wire, dialect, model, deck, self.texts), words

    def figures(self, side: Side[Embedded], against: Side[Embedded] | None) -> Iterator[Figure]:
        """Yield throughput, latency and failures of one server under one load."""
        if side.answered:
            yield speed(SAMPLES, side, against)
            yield speed(TOKENS, side, against)
            yield latency(f"{side.label} latency", [each.ended - each.intended for each in side.answered])
        yield from failures(side)

    def doubts(self, name: str, answered: Sequence[Embedded], prompts: str) -> Iterator[str]:
        """Yield notes on how texts were sized and tokens were counted."""
        each = statistics.median(num_tokens(one) / one.num_texts for one in answered)
        yield f"{name}: texts are {prompts}; {each:.0f} tokens each in the median request."
        if any(one.num_tokens is None for one in answered):
            yield f"{name}: no usage in its answers: tokens are the intended numbers."

    def record(self, answered: Embedded, started: float) -> dict[str, Any]:
        """Return one request for the result file; times are seconds since the run `started` or since it was due."""
        return {
            "client": answered.client,
            "intended": round(answered.intended - started, 6),
            "answered": round(answered.ended - answered.intended, 6),
            "texts": answered.num_texts,
            "tokens": answered.num_tokens,
        }

    def details(self) -> dict[str, Any]:
        """Return the workload's parameters for the result file."""
        return {"texts": self.texts.number, "lengths": str(self.texts.lengths)}


def num_texts(answered: Embedded) -> float:
    """Return the number of texts of one request."""
    return answered.num_texts


def num_tokens(answered: Embedded) -> float:
    """Return the server's token count of one request, or the intended number if the server reports none."""
    return answered.asked_tokens if answered.num_tokens is None else answered.num_tokens


SAMPLES = Counted("samples", "text/s", num_texts, requests=True)
TOKENS = Counted("tokens", "tok/s", num_tokens)
