"""Measure nginx's balancing rules with unequal servers: `python -m tools.measure.load_balancing [--model DIR]`.

Requests arrive at random, at fractions of the total capacity that the servers report, or come from clients that each
wait for their answer. The weights are those of tools/upstream_weights.py, so they come from /metrics alone. Needs
Linux, the right to create control groups (root), and nginx.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass

from app.bench.console import percentile
from app.bench.http.loops import RunLimits
from app.bench.http.tally import (
    GenerateRun,
    GenerateTraffic,
    GenerateWorkload,
    first_served_model,
    prompts_for,
    time_to_first_token,
)
from app.bench.http.wire import HttpClient, event_loop
from app.bench.http.workload import UniformLengths, poisson_arrivals
from tools.peers.nginx import Rule, before
from tools.peers.quota import Quota
from tools.peers.servers import COMPLETIONS, ServerSide, ServerSpec, report_progress
from tools.upstream_weights import requests_per_second, weigh

WARM_UP_REQUESTS = 4
DRAIN_SECONDS = 300.0  # time for an overloaded server to finish its queue after the last request


@dataclass(frozen=True, slots=True)
class Load:
    """A fraction of the capacity at which requests arrive, or a number of clients. One of the two is None."""

    part: float | None = None
    clients: int | None = None

    def __str__(self) -> str:
        return f"{self.clients} clients" if self.clients else f"{self.part:g}"


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one rule under one load.

    Seconds count from the moment a request was due. `shares` are the fractions of requests that each server answered.
    """

    load: str
    rule: str
    first_token_p50: float
    first_token_p99: float
    whole_p50: float
    whole_p99: float
    tokens_per_second: float
    answered: int
    refused: int
    failed: int
    shares: tuple[float, ...]

    @classmethod
    def of(cls, load: Load, rule: str, run: GenerateRun, answers: Sequence[float]) -> Row:
        """Summarize a run.

        `answers` has the count of each server. The speed is all tokens divided by the time of arrivals.
        """
        first = [time_to_first_token(each) for each in run.answered]
        whole = [each.stream.chunks[-1][0] - each.intended for each in run.answered]
        refused = run.failures["status 429"]
        return cls(
            load=str(load),
            rule=rule,
            first_token_p50=percentile(first, 0.5),
            first_token_p99=percentile(first, 0.99),
            whole_p50=percentile(whole, 0.5),
            whole_p99=percentile(whole, 0.99),
            tokens_per_second=sum(each.stream.num_tokens for each in run.answered) / (run.ended - run.started),
            answered=len(run.answered),
            refused=refused,
            failed=run.failures.total() - refused,
            shares=tuple(count / max(1.0, sum(answers)) for count in answers),
        )

    def line(self) -> str:
        shares = " : ".join(f"{share:.0%}" for share in self.shares)
        return (
            f"| {self.load} | {self.rule} | {self.first_token_p50:.2f} / {self.first_token_p99:.2f} "
            f"| {self.whole_p50:.2f} / {self.whole_p99:.2f} | {self.tokens_per_second:.0f} "
            f"| {self.answered} / {self.refused} / {self.failed} | {shares} |"
        )


HEAD = (
    "| load | rule | first token p50 / p99 s | whole answer p50 / p99 s | tokens/s | answered / refused / failed | shares |\n"
    "|---|---|---|---|---|---|---|"
)


def main() -> int:
    """Run the measurement. Progress goes to stderr; stdout has a table and, in the last line, JSON."""
    arguments = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that servers, control groups and nginx end too
    with event_loop() as runner:
        capacities, rows = runner.run(_measured(arguments))
    reported = " and ".join(f"{capacity:.2f}" for capacity in capacities)
    print(f"Quotas of {' and '.join(map(str, arguments.quotas))} cores; reported requests/s: {reported}.\n\n{HEAD}")
    print("\n".join(row.line() for row in rows))
    print(
        json.dumps(
            {"quotas": arguments.quotas, "requests_per_second_told": capacities, "rows": [asdict(row) for row in rows]}
        )
    )
    return 0


def rules_for(weights: Sequence[int]) -> dict[str, Rule]:
    ones = [1] * len(weights)
    return {
        "round-robin": Rule(ones),
        "weights": Rule(weights),
        "least_conn": Rule(ones, least_connections=True),
        "least_conn, weights": Rule(weights, least_connections=True),
    }


async def _measured(arguments: argparse.Namespace) -> tuple[list[float], list[Row]]:
    with ExitStack() as stack:
        sides = [await _server(arguments, quota, stack) for quota in arguments.quotas]
        servers = [side.url.removeprefix("http://") for side in sides]
        capacities = [await _capacity(side, arguments) for side in sides]
        weights = list(weigh(dict(zip(servers, capacities, strict=True)), {}).values())
        report_progress(f"weights {weights}, from {', '.join(f'{capacity:.2f}' for capacity in capacities)} requests/s")
        nginx, urls = before(servers, rules_for(weights))
        stack.callback(nginx.end)
        return capacities, await _rows(arguments, urls, sides, sum(capacities))


async def _server(arguments: argparse.Namespace, quota: float, stack: ExitStack) -> ServerSide:
    """Start a server in its own control group and wait for its first answer."""
    model = f"--model {arguments.model}" if arguments.model else ""
    command = f"{arguments.python} -m app serve {model} --host 127.0.0.1 --port {{port}} {arguments.flags}"
    group = Quota.make(f"{quota:g}", quota)
    stack.callback(group.remove)
    side = ServerSide(ServerSpec.parse(f"{quota:g}-cores={command}"), (group.procs,))
    stack.callback(side.end)
    report_progress(f"{quota:g} cores: first answer after {await side.first_answer():.1f} s")
    return side


async def _capacity(side: ServerSide, arguments: argparse.Namespace) -> float:
    with closing(HttpClient(side.url)) as wire:
        metrics = (await wire.get("/metrics")).raise_for_status("/metrics").body.decode()
        told = requests_per_second(metrics, arguments.prompt_tokens, arguments.max_tokens)
        if told is None:
            reason = (await wire.get("/info")).json()["plan"]["calibrate"]["reason"]
            raise SystemExit(f"{side.spec.name} reports no capacity: {reason}")
        return told


async def _rows(
    arguments: argparse.Namespace, urls: Mapping[str, str], sides: Sequence[ServerSide], capacity: float
) -> list[Row]:
    loads = [Load(part=part) for part in arguments.loads] + [Load(clients=count) for count in arguments.clients]
    wanted = GenerateWorkload(_about(arguments.prompt_tokens), _about(arguments.max_tokens))
    rows = []
    for load in loads:
        for name, url in urls.items():
            with closing(HttpClient(url)) as wire:
                traffic = await _traffic(wire, wanted)
                await traffic.warm_up(WARM_UP_REQUESTS)
                then = await _answers(sides)
                run = await _one(load, traffic, capacity, arguments.seconds)
                answers = [later - earlier for later, earlier in zip(await _answers(sides), then, strict=True)]
            if not run.answered:
                raise SystemExit(f"{name} at {load}: no request was answered: {dict(run.messages)}")
            rows.append(Row.of(load, name, run, answers))
            report_progress(rows[-1].line())
    return rows


def _about(tokens: int) -> UniformLengths:
    """Return lengths from half to one and a half times `tokens`, so that requests do not run in lockstep."""
    return UniformLengths(max(1, tokens // 2), tokens + tokens // 2)


async def _traffic(wire: HttpClient, wanted: GenerateWorkload) -> GenerateTraffic:
    model = await first_served_model(wire)
    deck, _ = await prompts_for(wire, COMPLETIONS, model, wanted.seed)
    return GenerateTraffic(wire, COMPLETIONS, model, deck, wanted)


async def _one(load: Load, traffic: GenerateTraffic, capacity: float, seconds: float) -> GenerateRun:
    run = GenerateRun()
    try:
        async with asyncio.timeout(seconds + DRAIN_SECONDS):
            if load.clients:
                await traffic.run_closed_loop(run, load.clients, RunLimits(seconds=seconds))
            else:
                assert load.part, "a load is one of both"
                await traffic.run_open_loop(
                    run, poisson_arrivals(load.part * capacity, seed=1), RunLimits(seconds=seconds)
                )
    except TimeoutError:
        raise SystemExit(
            f"{load}: requests are still open {DRAIN_SECONDS:g} s after the last arrival; use a lower load"
        ) from None
    return run


async def _answers(sides: Sequence[ServerSide]) -> list[float]:
    """Return the number of completions that each server has finished."""
    counts = []
    for side in sides:
        with closing(HttpClient(side.url)) as wire:
            counts.append(completed((await wire.get("/metrics")).body.decode()))
    return counts


def completed(metrics: str) -> float:
    series = (line.rpartition(" ") for line in metrics.splitlines() if line.startswith("armature_requests_total{"))
    return sum(float(value) for name, _, value in series if 'outcome="length"' in name or 'outcome="stop"' in name)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="checkpoint; default: the embedded demo")
    parser.add_argument("--flags", default="", help="further flags of armature serve, in one string")
    parser.add_argument("--quotas", type=float, nargs="+", default=[1.0, 0.25], help="cores of each server")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="fractions of the total capacity")
    parser.add_argument("--clients", type=int, nargs="*", default=[16])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each rule under each load")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--python", default=sys.executable)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
