"""Text generation under load, as measured by `armature bench http`: requests, figures, and notes on the streams."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from armature_bench.console import Figure
from armature_bench.http.dialects import GENERATE_DIALECTS
from armature_bench.http.load import LoadLevel, ServerTarget
from armature_bench.http.loops import RunLimits, ServerRuns
from armature_bench.http.tally import (
    GenerateTiming,
    GenerateTraffic,
    GenerateWorkload,
    LatencyObjective,
    prompts_for,
    served_model,
    stream_figures,
    stream_record,
)
from armature_bench.http.wire import HttpClient

REQUESTS_PER_CLIENT = 4
OPEN_SECONDS = 30.0
MULTI_TOKEN_CHUNKS = 1.05  # tokens per chunk from which on the notes mention it
NO_OBJECTIVE = LatencyObjective()


@dataclass(frozen=True, slots=True)
class GenerateBench:
    """Generation workload: streamed answers, and the latency objective that a client considers good service."""

    workload: GenerateWorkload
    objective: LatencyObjective = NO_OBJECTIVE
    unit: str = "piece"

    @property
    def seed(self) -> int:
        return self.workload.seed

    def bounds(self, level: LoadLevel) -> RunLimits:
        """Return the default limits of one run: requests per client in a closed loop, seconds in an open loop."""
        return (
            RunLimits(num_requests=REQUESTS_PER_CLIENT * level.clients)
            if level.clients
            else RunLimits(seconds=OPEN_SECONDS)
        )

    async def traffic(self, wire: HttpClient, target: ServerTarget) -> tuple[GenerateTraffic, str]:
        dialect = GENERATE_DIALECTS[target.api]
        model = target.model or await served_model(wire, target.preferred)
        prompts, description = await prompts_for(wire, dialect, model, self.seed)
        return GenerateTraffic(wire, dialect, model, prompts, self.workload), description

    def figures(self, side: ServerRuns[GenerateTiming], against: ServerRuns[GenerateTiming] | None) -> Iterator[Figure]:
        return stream_figures(side, self.objective, against)

    def caveats(self, name: str, answered: Sequence[GenerateTiming], prompts: str) -> Iterator[str]:
        streams = [each.stream for each in answered]
        read = [stream.usage.prompt_tokens for stream in streams if stream.usage is not None]
        num_chunks = sum(len(stream.chunks) for stream in streams)
        tokens = sum(stream.num_tokens for stream in streams)
        yield f"{name}: prompts are {prompts}" + (
            f", {statistics.median(read):g} tokens by its own count." if read else "."
        )
        if any(stream.usage is None for stream in streams):
            yield f"{name}: no usage in its answers: each chunk is counted as one token."
        if tokens > MULTI_TOKEN_CHUNKS * num_chunks:
            yield f"{name}: a chunk has {tokens / num_chunks:.2f} tokens on average: ITL is the time between chunks."
        short = sum(each.stream.num_tokens < each.asked_tokens for each in answered)
        if short and self.workload.ignore_eos:
            yield f"{name}: {short} of {len(answered)} answers ended before the requested number of tokens."

    def record(self, answered: GenerateTiming, started: float) -> dict[str, Any]:
        return stream_record(answered, started)

    def details(self) -> dict[str, Any]:
        image = self.workload.image
        pictures = {} if image is None else {"image": "x".join(map(str, image))}
        lengths = {"prompt_tokens": str(self.workload.prompt_tokens), "max_tokens": str(self.workload.max_tokens)}
        return lengths | pictures
