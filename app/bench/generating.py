"""Text generation under load, as measured by `armature bench http`: requests, figures, and notes on the streams."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.dialects import DIALECTS
from app.bench.load import Level, Target
from app.bench.loops import Bounds, Side
from app.bench.prompts import prompts_for, served_model
from app.bench.stats import Figure
from app.bench.tally import Objective, figures, record
from app.bench.traffic import Answered, Traffic, Wanted
from app.bench.wire import Wire

REQUESTS_PER_CLIENT = 4
OPEN_SECONDS = 30.0
GRAINY = 1.05  # tokens per chunk from which on the notes mention it
ANY = Objective()


@dataclass(frozen=True, slots=True)
class Generation:
    """Generation workload: streamed answers, and the latency objective that a client considers good service."""

    wanted: Wanted
    objective: Objective = ANY
    piece: str = "piece"

    @property
    def seed(self) -> int:
        """Seed of the prompts and lengths."""
        return self.wanted.seed

    def bounds(self, level: Level) -> Bounds:
        """Return the default limits of one run: requests per client in a closed loop, seconds in an open loop."""
        return Bounds(num_requests=REQUESTS_PER_CLIENT * level.clients) if level.clients else Bounds(seconds=OPEN_SECONDS)

    async def traffic(self, wire: Wire, target: Target) -> tuple[Traffic, str]:
        """Return the traffic for one server, and a description of its prompts."""
        dialect = DIALECTS[target.api]
        model = target.model or await served_model(wire)
        deck, words = await prompts_for(wire, dialect, model, self.seed)
        return Traffic(wire, dialect, model, deck, self.wanted), words

    def figures(self, side: Side[Answered], against: Side[Answered] | None) -> Iterator[Figure]:
        """Yield throughput, latencies, goodput and failures of one server under one load."""
        return figures(side, self.objective, against)

    def doubts(self, name: str, answered: Sequence[Answered], prompts: str) -> Iterator[str]:
        """Yield notes on prompts, token counts and answers that ended early."""
        streams = [each.stream for each in answered]
        read = [stream.usage.prompt_tokens for stream in streams if stream.usage is not None]
        pieces = sum(len(stream.pieces) for stream in streams)
        tokens = sum(stream.num_tokens for stream in streams)
        yield f"{name}: prompts are {prompts}" + (f", {statistics.median(read):g} tokens by its own count." if read else ".")
        if any(stream.usage is None for stream in streams):
            yield f"{name}: no usage in its answers: each chunk is counted as one token."
        if tokens > GRAINY * pieces:
            yield f"{name}: a chunk has {tokens / pieces:.2f} tokens on average: ITL is the time between chunks."
        short = sum(each.stream.num_tokens < each.asked_tokens for each in answered)
        if short and self.wanted.ignore_eos:
            yield f"{name}: {short} of {len(answered)} answers ended before the requested number of tokens."

    def record(self, answered: Answered, started: float) -> dict[str, Any]:
        """Return one request for the result file."""
        return record(answered, started)

    def details(self) -> dict[str, Any]:
        """Return the workload's parameters for the result file."""
        return {"prompt_tokens": str(self.wanted.prompt_tokens), "max_tokens": str(self.wanted.max_tokens)}
