"""Summary of runs of streamed requests: latency percentiles, tokens per second, and failures by kind."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from app.bench.client import Stream
from app.bench.loops import Side, Stretch
from app.bench.stats import Figure, percentile
from app.bench.traffic import Answered, Run


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objective of a client: limits in seconds for the first token and for the mean time per later token."""

    ttft_seconds: float | None = None
    itl_seconds: float | None = None

    def met(self, answered: Answered) -> bool:
        """Return True if the request met all limits."""
        per_token = seconds_per_token(answered.stream) or 0.0
        soon = self.ttft_seconds is None or first_token_seconds(answered) <= self.ttft_seconds
        return soon and (self.itl_seconds is None or per_token <= self.itl_seconds)


def tokens_per_second(side: Side[Answered]) -> float:
    """Return the median of all rounds' tokens per second."""
    return statistics.median(_rate(run, side.closed) for run in side.runs if run.answered)


def over(side: Side[Answered], other: Side[Answered]) -> float | None:
    """Return the median over the rounds of the ratio of both servers' tokens per second, or None."""
    ratios = [_rate(run, side.closed) / _rate(its, other.closed) for run, its in side.pairs(other)]
    return statistics.median(ratios) if ratios else None


def _rate(run: Run, closed: bool) -> float:
    begin, end = window(run, closed)
    return sum(tokens_within(each.stream, begin, end) for each in run.answered) / (end - begin)


def window(run: Run, closed: bool) -> tuple[float, float]:
    """Return the begin and end of the window in which throughput is counted.

    In a closed loop this is while all clients have a stream; otherwise from the first request to the last token.
    """
    by_client: dict[int, list[Stream]] = {}
    for answered in run.answered:
        by_client.setdefault(answered.client, []).append(answered.stream)
    whole = closed and not run.failures  # a rejected client has no stream for a while
    steady = _steady(by_client.values()) if whole else None
    return steady or (run.started, max(answered.stream.pieces[-1][0] for answered in run.answered))


def first_token_seconds(answered: Answered) -> float:
    """Return the seconds from the intended start of a request to its first token."""
    return answered.stream.pieces[0][0] - answered.intended


def seconds_per_token(stream: Stream) -> float | None:
    """Return the mean seconds per token after the first one, or None if there is no later chunk."""
    later = stream.num_tokens - 1
    return (stream.pieces[-1][0] - stream.pieces[0][0]) / later if later > 0 and len(stream.pieces) > 1 else None


def overall_rate(run: Run) -> float:
    """Return the tokens per second from the start of the run to the last token."""
    last = max(answered.stream.pieces[-1][0] for answered in run.answered)
    return sum(answered.stream.num_tokens for answered in run.answered) / (last - run.started)


def steady_rate(clients: Collection[Sequence[Stream]]) -> float | None:
    """Return the tokens per second while every client has a stream, or None if there is no such time."""
    steady = _steady(clients)
    if steady is None:
        return None
    begin, end = steady
    return sum(tokens_within(stream, begin, end) for streams in clients for stream in streams) / (end - begin)


def _steady(clients: Collection[Sequence[Stream]]) -> tuple[float, float] | None:
    """Return the begin and end of the time in which every client has a stream, or None.

    It starts when every client has a first token, and ends when the first client has received its last token.
    """
    begin = max(streams[0].pieces[0][0] for streams in clients)
    end = min(streams[-1].pieces[-1][0] for streams in clients)
    return None if end <= begin else (begin, end)


def tokens_within(stream: Stream, begin: float, end: float) -> float:
    """Return the number of tokens within `(begin, end]`.

    If the server counted more tokens than the chunks show, every chunk is scaled in proportion.
    """
    seen = sum(count for _, count in stream.pieces)
    inside = sum(count for moment, count in stream.pieces if begin < moment <= end)
    return inside * stream.num_tokens / seen


def figures(side: Side[Answered], objective: Objective, against: Side[Answered] | None = None) -> Iterator[Figure]:
    """Yield the figures of one server; `against` is another server under the same load in the same run."""
    label, answered, runs = side.label, side.answered, side.runs
    if answered:
        rate = tokens_per_second(side)
        ratio = None if against is None else over(side, against)
        overall = statistics.median(overall_rate(run) for run in runs if run.answered)
        requests = side.requests_per_second
        parts = {"overall": overall, "req/s": requests, "answered": len(answered)}
        yield Figure(
            f"{label} tokens", rate, "tok/s", ratio=ratio, against=against.server if against is not None else "", parts=parts
        )
        yield from _latencies(label, answered)
        if objective != Objective():
            good = sum(map(objective.met, answered))
            sent = sum(run.num_sent for run in runs)
            yield Figure(f"{label} goodput", requests * good / len(answered), "req/s", ratio=good / sent, against="all sent")
    yield from failures(side)


def _latencies(label: str, answered: Sequence[Answered]) -> Iterator[Figure]:
    streams = [each.stream for each in answered]
    samples = {
        "TTFT": [first_token_seconds(each) for each in answered],
        "ITL": [gap for stream in streams for gap in stream.gaps()],
        "TPOT": [seconds for seconds in map(seconds_per_token, streams) if seconds is not None],
        "E2E": [each.stream.pieces[-1][0] - each.intended for each in answered],
    }
    for name, seconds in samples.items():
        if seconds:
            yield latency(f"{label} {name}", seconds)


def failures(side: Side[Any]) -> Iterator[Figure]:
    """Yield the number of failed requests by kind."""
    for kind, number in sorted(sum((run.failures for run in side.runs), Counter[str]()).items()):
        yield Figure(f"{side.label} failed, {kind}", number, "requests", target=0, at_most=True)


def latency(name: str, seconds: Sequence[float]) -> Figure:
    """Return a latency figure in milliseconds: median, p90, p95 and p99."""
    parts = {f"p{share}": percentile(seconds, share / 100) * 1e3 for share in (90, 95)}
    return Figure(name, statistics.median(seconds) * 1e3, "ms", p99=percentile(seconds, 0.99) * 1e3, parts=parts)


def cpu_figure(runs: Iterable[Stretch[Any]], unit: str = "piece") -> Figure:
    """Return the share of a core that the client itself used; it shares the processor with the server."""
    taken = list(runs)
    wall = sum(run.ended - run.started for run in taken)
    cpu, pieces = sum(run.cpu_seconds for run in taken), sum(run.num_pieces for run in taken)
    parts = {f"us/{unit}": 1e6 * cpu / pieces} if pieces else {}
    return Figure("this client, of a core", 100 * cpu / wall if wall else 0.0, "%", parts=parts)


def record(answered: Answered, started: float) -> dict[str, Any]:
    """Return one request for the result file: seconds since its run `started` or since it was due, and tokens."""
    stream = answered.stream
    usage = None if stream.usage is None else stream.usage.prompt_tokens
    return {
        "client": answered.client,
        "intended": round(answered.intended - started, 6),
        "first_token": round(first_token_seconds(answered), 6),
        "last_token": round(stream.pieces[-1][0] - answered.intended, 6),
        "prompt_tokens": usage,
        "tokens": stream.num_tokens,
        "pieces": len(stream.pieces),
    }
