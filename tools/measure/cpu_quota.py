"""Measure serving under a real CPU quota: `python -m tools.measure.cpu_quota --model DIR [--cores 1.5] [--peer ...]`.

It runs our server as planned, our server with each fixed number of threads, and peers (`NAME=COMMAND`) with their
defaults. Each runs in its own control group and is stopped while another is measured. The result is the plan's speed
divided by that of the best fixed number of threads that is rarely throttled.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from armature_bench.http.tally import GenerateRun, GenerateTraffic, GenerateWorkload, overall_rate
from armature_bench.http.wire import HttpClient, event_loop
from armature_bench.http.workload import UniformLengths
from tools.peers.quota import Quota
from tools.peers.servers import ServerSide, ServerSpec, one_run, report_progress, server_spec, traffic_to

MOST_THROTTLED = 0.02  # share of the wall time; a number of threads that is throttled for longer does not fit the quota
TARGET = 0.95
PREFILL_TOKENS = 512
PROMPT_TOKENS = 128


@dataclass(frozen=True, slots=True)
class Load:
    name: str
    clients: int
    prompt_tokens: int
    max_tokens: int

    def rate(self, run: GenerateRun) -> float:
        """Return tokens per second.

        For a prefill: prompt tokens until the first token. Otherwise: all answers, from the first request to the last
        token.
        """
        if self.max_tokens == 1:
            return self.prompt_tokens / run.answered[0].stream.time_to_first_token
        return overall_rate(run)


@dataclass(slots=True)
class Found:
    rates: list[float] = field(default_factory=list)
    throttled: list[float] = field(default_factory=list)  # seconds per second of wall time
    cores: list[float] = field(default_factory=list)


Results = dict[str, dict[str, Found]]  # by load and server


@dataclass(frozen=True, slots=True)
class Guest:
    """A server in its control group, with the traffic of each load."""

    side: ServerSide
    quota: Quota
    traffics: Mapping[str, GenerateTraffic]


def main() -> int:
    """Run the measurement. Progress goes to stderr; stdout has a table and, in the last line, JSON."""
    arguments = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that servers and control groups are removed
    loads = [
        Load("prefill 512", 1, PREFILL_TOKENS, 1),
        Load("×1", 1, PROMPT_TOKENS, arguments.max_tokens),
        Load("×8", 8, PROMPT_TOKENS, arguments.max_tokens),
    ]
    specs = [*ours(arguments.model, arguments.flags, arguments.threads, arguments.python), *arguments.peer]
    results: Results = {load.name: {each.name: Found() for each in specs} for load in loads}
    with event_loop() as runner:
        runner.run(_measured(specs, loads, arguments.cores, arguments.rounds, results))
    _report(arguments.cores, specs, results)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--flags", default="", help="further flags of armature serve, in one string")
    parser.add_argument("--cores", type=float, default=1.5)
    parser.add_argument(
        "--threads",
        type=int,
        nargs="+",
        default=list(range(1, (os.cpu_count() or 1) + 1)),
        help="numbers of threads to measure",
    )
    parser.add_argument(
        "--peer", action="append", default=[], type=server_spec, metavar="NAME=[VARIABLE=value ...] COMMAND"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--python", default=sys.executable)
    return parser.parse_args()


def ours(model: str, flags: str, threads: Sequence[int], python: str) -> list[ServerSpec]:
    """Return our servers, the one with automatic threads first."""
    serve = f"{python} -m app serve --model {model} --host 127.0.0.1 --port {{port}} {flags}"
    forced = [ServerSpec.parse(f"{count}-threads={serve} --threads {count}") for count in threads]
    return [ServerSpec.parse(f"auto={serve}"), *forced]


async def _measured(
    specs: Sequence[ServerSpec], loads: Sequence[Load], cores: float, rounds: int, results: Results
) -> None:
    with ExitStack() as stack:
        guests = [await _guest(each, loads, cores, stack) for each in specs]
        for number in range(rounds):
            first = number % len(guests)
            for load in loads:
                for guest in guests[first:] + guests[:first]:
                    await _one(guest, load, results[load.name][guest.side.spec.name])


async def _guest(spec: ServerSpec, loads: Sequence[Load], cores: float, stack: ExitStack) -> Guest:
    quota = Quota.make(spec.name, cores)
    stack.callback(quota.remove)
    side = ServerSide(spec, (quota.procs,))
    stack.callback(side.end)
    seconds = await side.first_answer()
    wire = stack.enter_context(closing(HttpClient(side.url)))
    traffics = {}
    for load in loads:
        wanted = GenerateWorkload(
            UniformLengths(load.prompt_tokens, load.prompt_tokens), UniformLengths(load.max_tokens, load.max_tokens)
        )
        traffics[load.name] = (await traffic_to(side, wanted, wire))[0]
    report_progress(f"{spec.name}: first answer after {seconds:.1f} s; plan {await _planned(wire)}")
    side.halt()
    return Guest(side, quota, traffics)


async def _planned(wire: HttpClient) -> str:
    """Return what our server detected and decided, to show that the quota reached its plan."""
    answer = await wire.get("/info")
    try:
        plan = answer.json()["plan"]
        return ", ".join(
            f"{name}={plan[name]['value']} ({plan[name]['reason']})" for name in ("threads", "wait_policy")
        )
    except (ValueError, KeyError, TypeError):
        return "unknown"


async def _one(guest: Guest, load: Load, found: Found) -> None:
    with guest.side.awake():
        before = guest.quota.throttled_seconds(), guest.side.cpu_seconds()
        run = await one_run(guest.traffics[load.name], load.clients, 1, min(16, load.max_tokens))
        throttled, cpu = guest.quota.throttled_seconds() - before[0], guest.side.cpu_seconds() - before[1]
    wall = run.ended - run.started
    found.rates.append(load.rate(run))
    found.throttled.append(throttled / wall)
    found.cores.append(cpu / wall)
    report_progress(
        f"{load.name}: {guest.side.spec.name} {found.rates[-1]:.1f} tok/s, throttled {found.throttled[-1]:.1%}"
    )


def share_of_best(of: Mapping[str, Found]) -> tuple[float, str] | None:
    """Return the plan's speed relative to the best fixed number of threads that is rarely throttled.

    None if all of them are throttled.
    """
    forced = {name: found for name, found in of.items() if name.endswith("-threads")}
    fitting = {name: found for name, found in forced.items() if statistics.median(found.throttled) < MOST_THROTTLED}
    if not fitting:
        return None
    best = max(fitting, key=lambda name: statistics.median(fitting[name].rates))
    pairs = zip(of["auto"].rates, fitting[best].rates, strict=True)
    return statistics.median(auto / other for auto, other in pairs), best


def _report(cores: float, specs: Sequence[ServerSpec], results: Results) -> None:
    figures: dict[str, Any] = {}
    for load, of in results.items():
        rows = {
            name: {each: statistics.median(getattr(found, each)) for each in ("rates", "throttled", "cores")}
            for name, found in of.items()
        }
        for name, row in rows.items():
            print(
                f"{load:12} {name:20} {row['rates']:8.1f} tok/s, throttled {row['throttled']:6.1%}, cores {row['cores']:.2f}"
            )
        best = share_of_best(of)
        verdict = (
            "every number of threads is throttled" if best is None else f"{best[0]:.2f} of {best[1]}, target {TARGET}"
        )
        print(f"{load:12} auto is {verdict}")
        figures[load] = {"servers": rows, "auto_over_best": best}
    commands = {
        each.name: [f"{name}={value}" for name, value in each.environment.items()] + list(each.command)
        for each in specs
    }
    print(json.dumps({"cores": cores, "servers": commands, "loads": figures}))


if __name__ == "__main__":
    sys.exit(main())
