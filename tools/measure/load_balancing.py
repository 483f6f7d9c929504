"""Measure real routers before unequal servers: `python -m tools.measure.load_balancing --programs VENV/bin`.

Requests arrive at random, at fractions of the total capacity that the servers report, or come from clients that each
wait for their answer. Weights are those of tools/upstream_weights.py, so they come from /metrics alone. Servers are
unequal by `--speeds`, with steps that last a set time (tools/peers/serve_paced.py), or by `--quotas` of CPU time, which
needs the right to create control groups (root). With `--sessions`, prompts begin with one of that many texts, so
that a prefix cache helps. With `--end-one`, the slowest server is told to stop in the middle of each run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import re
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, replace

from armature_bench.console import percentile
from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import (
    GenerateRun,
    GenerateTraffic,
    GenerateWorkload,
    first_served_model,
    prompts_for,
    time_to_first_token,
)
from armature_bench.http.wire import HttpClient, event_loop
from armature_bench.http.workload import TextPrompts, UniformLengths, poisson_arrivals
from tools.peers.quota import Quota
from tools.peers.routers.processes import NAMES, Fleet, running
from tools.peers.servers import COMPLETIONS, ServerSide, ServerSpec, report_progress
from tools.upstream_weights import requests_per_second, weigh

WARM_UP_REQUESTS = 4
DRAIN_SECONDS = 300.0  # time for an overloaded server to finish its queue after the last request
TEXT = replace(COMPLETIONS, takes_ids=False)  # routers that look for prefixes read text
# Rules that know the weights and nothing else; the best of them is what the others are compared with.
BY_WEIGHTS = ("nginx weights", "nginx least_conn, weights")


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

    Seconds count from the moment a request was due. `shares` are the fractions of requests that each server answered,
    and `hits` the part of the prompts' tokens that were in a prefix cache.
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
    hits: float = 0.0

    @classmethod
    def of(cls, load: Load, rule: str, run: GenerateRun, counts: Sequence[Counted]) -> Row:
        """Summarize a run.

        `counts` has what each server did. The speed is all tokens divided by the time of arrivals.
        """
        total = sum(counts, Counted())
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
            shares=tuple(each.answered / max(1.0, total.answered) for each in counts),
            hits=total.cached_tokens / max(1.0, total.prompt_tokens),
        )

    def line(self, best_p99: float = math.nan) -> str:
        """Return the row of the table; `best_p99` is what the p99 of whole answers is divided by."""
        shares = " : ".join(f"{share:.0%}" for share in self.shares)
        ratio = "–" if math.isnan(best_p99) else f"{self.whole_p99 / best_p99:.2f}"
        return (
            f"| {self.load} | {self.rule} | {self.first_token_p50:.2f} / {self.first_token_p99:.2f} "
            f"| {self.whole_p50:.2f} / {self.whole_p99:.2f} | {ratio} | {self.tokens_per_second:.0f} "
            f"| {self.answered} / {self.refused} / {self.failed} | {shares} | {self.hits:.0%} |"
        )


HEAD = (
    "| load | router | first token p50 / p99 s | whole answer p50 / p99 s | p99 over the best weights' | tokens/s "
    "| answered / refused / failed | shares | cached |\n|---|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Counted:
    """What a server has counted: completions that it finished, tokens of prompts, and those of them that were cached."""

    answered: float = 0.0
    prompt_tokens: float = 0.0
    cached_tokens: float = 0.0

    @classmethod
    def read(cls, metrics: str) -> Counted:
        """Return the counters of a server's metrics."""
        series = [line.rpartition(" ") for line in metrics.splitlines()]
        requests = [(name, value) for name, _, value in series if name.startswith("armature_requests_total{")]
        tokens = {name: float(value) for name, _, value in series if name.startswith("armature_tokens_total{")}
        return cls(
            sum(float(value) for name, value in requests if re.search(r'outcome="(length|stop)"', name)),
            tokens.get('armature_tokens_total{kind="prompt"}', 0.0),
            tokens.get('armature_tokens_total{kind="cached"}', 0.0),
        )

    def __add__(self, other: Counted) -> Counted:
        return self._with(other, 1)

    def __sub__(self, other: Counted) -> Counted:
        return self._with(other, -1)

    def _with(self, other: Counted, sign: int) -> Counted:
        return Counted(*(mine + sign * its for mine, its in zip(_values(self), _values(other), strict=True)))


def _values(counted: Counted) -> tuple[float, float, float]:
    return counted.answered, counted.prompt_tokens, counted.cached_tokens


class SessionPrompts(TextPrompts):
    """Prompts of sessions: each begins with the text of one of them, and the tokens asked for follow it."""

    def __init__(self, plain: TextPrompts, sessions: int, shared_tokens: int) -> None:
        self._plain, self._choice = plain, random.Random(sessions)
        self._shared = [plain.prompt(shared_tokens) for _ in range(sessions)]

    def prompt(self, num_tokens: int) -> str:
        """Return the text of a session and about `num_tokens` tokens of its own."""
        return f"{self._choice.choice(self._shared)} {self._plain.prompt(num_tokens)}"


def main() -> int:
    """Run the measurement. Progress goes to stderr; stdout has a table and, in the last line, JSON."""
    arguments = _arguments()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)
    )  # so that servers, control groups and nginx end too
    with event_loop() as runner:
        capacities, rows = runner.run(_measured(arguments))
    kind, sizes = ("cores", arguments.quotas) if arguments.quotas else ("of the speed", arguments.speeds)
    reported = " and ".join(f"{capacity:.2f}" for capacity in capacities)
    print(f"Servers: {' and '.join(map(str, sizes))} {kind}; reported requests/s: {reported}.\n\n{HEAD}")
    print("\n".join(row.line(best_by_weights(rows, row.load)) for row in rows))
    print(json.dumps({kind: sizes, "requests_per_second_told": capacities, "rows": [asdict(row) for row in rows]}))
    return 0


def best_by_weights(rows: Sequence[Row], load: str) -> float:
    """Return the lowest p99 of whole answers of a rule that knows the weights and nothing else; NaN without one."""
    return min((row.whole_p99 for row in rows if row.load == load and row.rule in BY_WEIGHTS), default=math.nan)


async def _measured(arguments: argparse.Namespace) -> tuple[list[float], list[Row]]:
    loads = [Load(part=part) for part in arguments.loads] + [Load(clients=count) for count in arguments.clients]
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="armature-balancing-") as kept:
        if arguments.end_one:  # every run needs all servers again
            for load in loads:
                for name in arguments.routers:
                    capacities, found = await _started(arguments, kept, [load], [name])
                    rows += found
            return capacities, rows
        return await _started(arguments, kept, loads, arguments.routers)


async def _started(
    arguments: argparse.Namespace, kept: str, loads: Sequence[Load], names: Sequence[str]
) -> tuple[list[float], list[Row]]:
    """Start the servers and measure these routers under these loads. `kept` is a folder for calibrations."""
    with ExitStack() as stack:
        sides = [_server(arguments, kept, number, stack) for number in range(len(arguments.quotas or arguments.speeds))]
        for side in sides:
            report_progress(f"{side.spec.name}: first answer after {await side.first_answer():.1f} s")
        servers = [side.url.removeprefix("http://") for side in sides]
        capacities = [await _capacity(side, arguments) for side in sides]
        weights = list(weigh(dict(zip(servers, capacities, strict=True)), {}).values())
        report_progress(f"weights {weights}, from {', '.join(f'{capacity:.2f}' for capacity in capacities)} requests/s")
        fleet = Fleet(servers, weights, arguments.programs)
        rows = []
        for load in loads:
            for name in names:
                with running(name, fleet) as url:
                    rows.append(await _row(arguments, load, name, url, sides, sum(capacities)))
                report_progress(rows[-1].line(best_by_weights(rows, str(load))))
        return capacities, rows


def _server(arguments: argparse.Namespace, kept: str, number: int, stack: ExitStack) -> ServerSide:
    """Start a server: in its own control group, or with steps of a set time."""
    model = f"--model {arguments.model}" if arguments.model else ""
    flags = f"{model} --host 127.0.0.1 --port {{port}} --no-request-log {arguments.flags}"
    groups: tuple[Quota, ...] = ()
    if arguments.quotas:
        name, command = f"{arguments.quotas[number]:g}-cores", f"{arguments.python} -m app serve {flags}"
        groups = (Quota.make(f"{number}", arguments.quotas[number]),)
        stack.callback(groups[0].remove)
    else:
        speed = arguments.speeds[number]
        name, paced = f"speed-{speed:g}", f"{arguments.python} -m tools.peers.serve_paced --speed {speed:g}"
        command = f"{paced} -- --threads 1 --cache-dir {kept}/{speed:g} {flags}"
    side = ServerSide(ServerSpec.parse(f"{name}={command}"), tuple(group.procs for group in groups))
    stack.callback(side.end)
    return side


async def _capacity(side: ServerSide, arguments: argparse.Namespace) -> float:
    with closing(HttpClient(side.url)) as wire:
        metrics = (await wire.get("/metrics")).raise_for_status("/metrics").body.decode()
        prompt_tokens = arguments.prompt_tokens + (arguments.shared_tokens if arguments.sessions else 0)
        told = requests_per_second(metrics, prompt_tokens, arguments.max_tokens)
        if told is None:
            reason = (await wire.get("/info")).json()["plan"]["calibrate"]["reason"]
            raise SystemExit(f"{side.spec.name} reports no capacity: {reason}")
        return told


async def _row(
    arguments: argparse.Namespace, load: Load, name: str, url: str, sides: Sequence[ServerSide], capacity: float
) -> Row:
    wanted = GenerateWorkload(_about(arguments.prompt_tokens), _about(arguments.max_tokens))
    with closing(HttpClient(url)) as wire:
        # Other words for each router, so that no prompt is in a cache from the run before; lengths are the same.
        traffic = await _traffic(arguments, sides[0], wire, wanted, seed=NAMES.index(name))
        await traffic.warm_up(WARM_UP_REQUESTS)
        then = [await _counted(side) for side in sides]
        ending = asyncio.ensure_future(_end_one(arguments, sides[-1]))
        run = await _one(load, traffic, capacity, arguments.seconds)
        last = await ending
        now = [await _counted(side) for side in sides[:-1]] + [last or await _counted(sides[-1])]
    if not run.answered:
        raise SystemExit(f"{name} at {load}: no request was answered: {dict(run.messages)}")
    for kind, message in run.messages.items():
        report_progress(f"{name}: {run.failures[kind]} times {kind}: {message}")
    return Row.of(load, name, run, [later - earlier for later, earlier in zip(now, then, strict=True)])


async def _end_one(arguments: argparse.Namespace, side: ServerSide) -> Counted | None:
    """In the middle of a run, tell the server to stop as a supervisor does; return what it had counted."""
    if not arguments.end_one:
        return None
    await asyncio.sleep(arguments.seconds / 2)
    counted = await _counted(side)
    side.stop()
    return counted


def _about(tokens: int) -> UniformLengths:
    """Return lengths from half to one and a half times `tokens`, so that requests do not run in lockstep."""
    return UniformLengths(max(1, tokens // 2), tokens + tokens // 2)


async def _traffic(
    arguments: argparse.Namespace, side: ServerSide, wire: HttpClient, wanted: GenerateWorkload, seed: int
) -> GenerateTraffic:
    """Return the traffic through a router. Model and length of words are asked of a server, which knows them."""
    with closing(HttpClient(side.url)) as direct:
        model = await first_served_model(direct)
        prompts, _ = await prompts_for(direct, TEXT, model, seed)
    assert isinstance(prompts, TextPrompts), "the dialect sends text"
    if arguments.sessions:
        prompts = SessionPrompts(prompts, arguments.sessions, arguments.shared_tokens)
    return GenerateTraffic(wire, TEXT, model, prompts, wanted)


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


async def _counted(side: ServerSide) -> Counted:
    with closing(HttpClient(side.url)) as wire:
        return Counted.read((await wire.get("/metrics")).raise_for_status("/metrics").body.decode())


def chosen_routers(names: Sequence[str]) -> list[str]:
    """Return the routers that begin with one of these names. Raises `SystemExit` if there is none."""
    for name in names:
        if not any(known.startswith(name) for known in NAMES):
            raise SystemExit(f"{name} is no router: choose of {', '.join(NAMES)}")
    return [known for known in NAMES if any(known == name or known.startswith(f"{name} ") for name in names)]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", default="", help="checkpoint; default: the embedded demo")
    parser.add_argument("--flags", default="", help="further flags of armature serve, in one string")
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 1.0, 0.5, 0.25], help="speed of each server")
    parser.add_argument("--quotas", type=float, nargs="+", default=[], help="cores of each server, instead of speeds")
    parser.add_argument("--routers", nargs="+", default=["nginx"], help="names of programs, or of program and policy")
    parser.add_argument("--programs", default="", metavar="DIR", help="where routers are looked up before PATH")
    parser.add_argument("--sessions", type=int, default=0, help="texts with which prompts begin; 0: all are different")
    parser.add_argument("--shared-tokens", type=int, default=512, help="tokens of such a text")
    parser.add_argument("--end-one", action="store_true", help="stop the last server in the middle of each run")
    parser.add_argument("--loads", type=float, nargs="*", default=[0.5, 0.8], help="fractions of the total capacity")
    parser.add_argument("--clients", type=int, nargs="*", default=[16])
    parser.add_argument("--seconds", type=float, default=60.0, help="seconds for each rule under each load")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--python", default=sys.executable)
    arguments = parser.parse_args()
    arguments.routers = chosen_routers(arguments.routers)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
