"""Embedding under load (`armature bench http --kind embed`): requests in one dialect, and their timing."""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from armature_bench.console import Figure, MeasurementFailed
from armature_bench.http import loops
from armature_bench.http.dialects import EMBED_DIALECTS, EmbedDialect, parse_prompt_tokens
from armature_bench.http.load import LoadLevel, ServerTarget
from armature_bench.http.loops import LoadRun, RateMetric, RunLimits, ServerRuns, rate_figure
from armature_bench.http.tally import failure_figures, latency_figure, served_model
from armature_bench.http.wire import HttpClient
from armature_bench.http.workload import LogNormalLengths, TextPrompts, UniformLengths

FEW_WORDS, MORE_WORDS = 8, 40  # lengths of the two probe texts
DEFAULT_SPECIAL_TOKENS = 2.0  # [CLS] and [SEP]


@dataclass(frozen=True, slots=True)
class EmbedWorkload:
    """Content of every request: `number` texts with lengths drawn from `lengths`, in tokens."""

    number: int
    lengths: UniformLengths | LogNormalLengths
    seed: int = 0


@dataclass(frozen=True, slots=True)
class EmbedTiming:
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

    def __init__(
        self, wire: HttpClient, dialect: EmbedDialect, model: str | None, prompts: TextPrompts, texts: EmbedWorkload
    ) -> None:
        self._wire, self._dialect, self._model, self._prompts = wire, dialect, model, prompts
        self._texts, self._random = texts, random.Random(texts.seed)

    async def run_closed_loop(self, run: LoadRun[EmbedTiming], num_clients: int, bounds: RunLimits) -> None:
        await loops.run_closed_loop(run, num_clients, bounds, self._one)

    async def run_open_loop(self, run: LoadRun[EmbedTiming], moments: Iterable[float], bounds: RunLimits) -> None:
        await loops.run_open_loop(run, moments, bounds, self._one)

    async def warm_up(self, num_requests: int) -> None:
        """Send concurrent requests that are not recorded. Errors are ignored: they will occur again when measured."""
        requests = [self._ask()[1] for _ in range(num_requests)]
        await asyncio.gather(*(self._send_texts(texts) for texts in requests), return_exceptions=True)

    async def _one(self, run: LoadRun[EmbedTiming], client: int, intended: float) -> EmbedTiming:
        asked_tokens, texts = self._ask()
        started = time.perf_counter()
        body = await self._send_texts(texts)
        ended = time.perf_counter()
        run.num_units += len(texts)
        return EmbedTiming(intended, client, started, ended, len(texts), asked_tokens, parse_prompt_tokens(body))

    def _ask(self) -> tuple[int, list[str]]:
        lengths = [self._texts.lengths.draw(self._random) for _ in range(self._texts.number)]
        return sum(lengths), [self._prompts.prompt(length) for length in lengths]

    async def _send_texts(self, texts: Sequence[str]) -> bytes:
        return await send_texts(self._wire, self._dialect, self._model, texts)


async def send_texts(wire: HttpClient, dialect: EmbedDialect, model: str | None, texts: Sequence[str]) -> bytes:
    """Send one request and return the body without parsing it. Raises `HttpRequestFailed` if the status is no 200."""
    path = dialect.path(model)
    return (await wire.post(path, dialect.body(texts, model))).raise_for_status(path).body


async def text_prompts_for(
    wire: HttpClient, dialect: EmbedDialect, model: str | None, seed: int
) -> tuple[TextPrompts, str]:
    """Return a source of texts with a requested number of tokens, and a description of them.

    The number of tokens per word comes from the server's own counts for two probe texts.
    """
    few, more = [await _probe_tokens(wire, dialect, model, number) for number in (FEW_WORDS, MORE_WORDS)]
    if few is None or more is None or more <= few:
        prompts = TextPrompts(1.0, DEFAULT_SPECIAL_TOKENS, seed)
        return prompts, "one word per token plus two special tokens: the server does not report token counts"
    tokens_per_word = (more - few) / (MORE_WORDS - FEW_WORDS)
    return TextPrompts(
        tokens_per_word, few - FEW_WORDS * tokens_per_word, seed
    ), "sized by the server's own token count"


async def _probe_tokens(wire: HttpClient, dialect: EmbedDialect, model: str | None, num_words: int) -> int | None:
    """Send one text of `num_words` words, check the answer, and return the token count that the server reports.

    Raises `MeasurementFailed` if the answer is not exactly one vector.
    """
    body = await send_texts(wire, dialect, model, [TextPrompts(1.0, 0.0).words(num_words)])
    try:
        sizes = dialect.sizes(json.loads(body))
    except (ValueError, LookupError, TypeError, StopIteration) as error:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered no vectors: {body[:200]!r}") from error
    if len(sizes) != 1 or not sizes[0]:
        raise MeasurementFailed(f"{wire.url}{dialect.path(model)} answered one text with vectors of sizes {sizes}")
    return parse_prompt_tokens(body)


LOAD_SECONDS = 10.0  # requests take milliseconds, so a run has thousands of them


@dataclass(frozen=True, slots=True)
class EmbedBench:
    """Embedding workload: each answer arrives at once and has one vector per text."""

    texts: EmbedWorkload
    unit: str = "text"

    @property
    def seed(self) -> int:
        return self.texts.seed

    def bounds(self, level: LoadLevel) -> RunLimits:
        return RunLimits(seconds=LOAD_SECONDS)

    async def traffic(self, wire: HttpClient, target: ServerTarget) -> tuple[EmbedTraffic, str]:
        dialect = EMBED_DIALECTS[target.api]
        model = target.model or await served_model(wire, target.preferred)
        prompts, description = await text_prompts_for(wire, dialect, model, self.seed)
        return EmbedTraffic(wire, dialect, model, prompts, self.texts), description

    def figures(self, side: ServerRuns[EmbedTiming], against: ServerRuns[EmbedTiming] | None) -> Iterator[Figure]:
        if side.answered:
            yield rate_figure(TEXT_RATE, side, against)
            yield rate_figure(TOKEN_RATE, side, against)
            yield latency_figure(f"{side.label} latency", [each.ended - each.intended for each in side.answered])
        yield from failure_figures(side)

    def caveats(self, name: str, answered: Sequence[EmbedTiming], prompts: str) -> Iterator[str]:
        each = statistics.median(num_tokens(one) / one.num_texts for one in answered)
        yield f"{name}: texts are {prompts}; {each:.0f} tokens each in the median request."
        if any(one.num_tokens is None for one in answered):
            yield f"{name}: no usage in its answers: tokens are the intended numbers."

    def record(self, answered: EmbedTiming, started: float) -> dict[str, Any]:
        """Return one request for the result file; times are seconds since the run `started` or since it was due."""
        return {
            "client": answered.client,
            "intended": round(answered.intended - started, 6),
            "answered": round(answered.ended - answered.intended, 6),
            "texts": answered.num_texts,
            "tokens": answered.num_tokens,
        }

    def details(self) -> dict[str, Any]:
        return {"texts": self.texts.number, "lengths": str(self.texts.lengths)}


def num_texts(answered: EmbedTiming) -> float:
    return answered.num_texts


def num_tokens(answered: EmbedTiming) -> float:
    """Return the server's token count of one request, or the intended number if the server reports none."""
    return answered.asked_tokens if answered.num_tokens is None else answered.num_tokens


TEXT_RATE = RateMetric("samples", "text/s", num_texts, requests=True)
TOKEN_RATE = RateMetric("tokens", "tok/s", num_tokens)
