"""Speed over HTTP beside other servers', turn by turn in one run: `python -m tools.compare_http --server 'NAME=COMMAND' ...`.

A server is any command that serves OpenAI's completions on `{port}`; it is halted while another has its turn. All get prompts of as
many tokens and must write as many, by one and the same client. Ratios are the first server's over each other's, round by round.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import statistics
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

from app.bench.console import percentile
from app.bench.http.tally import (
    GenerateRun,
    GenerateTraffic,
    GenerateWorkload,
    first_token_seconds,
    overall_rate,
    steady_rate,
)
from app.bench.http.wire import (
    HttpClient,
    event_loop,
)
from app.bench.http.workload import UniformLengths
from tools.peers.servers import ServerSide, ServerSpec, one_run, traffic_to

WARM_UP_TOKENS = 16
SHORTEST_WINDOW = 0.25  # of the time until the first client has ended


@dataclass(frozen=True, slots=True)
class Job:
    """What is measured of every server, in every round."""

    specs: Sequence[ServerSpec]
    clients: Sequence[int]
    rounds: int
    requests_each: int
    wanted: GenerateWorkload


@dataclass(slots=True)
class Measured:
    """One server under one number of clients: what every round found."""

    steady: list[float] = field(default_factory=list)  # tokens a second while all clients have a stream
    overall: list[float] = field(default_factory=list)  # from the first request to the last token
    together: list[float] = field(default_factory=list)  # how much of the time that was
    first_token: list[float] = field(default_factory=list)  # seconds, of every request
    gaps: list[float] = field(default_factory=list)
    server_cpu: list[float] = field(default_factory=list)  # cores
    client_cpu: list[float] = field(default_factory=list)

    def add(self, run: GenerateRun, cpu_seconds: float) -> None:
        streams: dict[int, list[Any]] = {}
        for answered in run.answered:
            streams.setdefault(answered.client, []).append(answered.stream)
            self.first_token.append(first_token_seconds(answered))
            self.gaps += answered.stream.gaps()
        rate, together = _steady(list(streams.values()))
        if together < SHORTEST_WINDOW:
            say(
                f"all clients had a stream for {together:.0%} of the time: the speed of that window is chance, see the overall one"
            )
        self.steady.append(rate)
        self.together.append(together)
        self.overall.append(overall_rate(run))
        self.server_cpu.append(cpu_seconds / (run.ended - run.started))
        self.client_cpu.append(run.cpu_seconds / (run.ended - run.started))

    def summary(self) -> dict[str, float]:
        milliseconds = {"ttft": self.first_token, "itl": self.gaps}
        spreads = {
            f"{name}_p{share}_ms": 1e3 * percentile(of, share / 100)
            for name, of in milliseconds.items()
            for share in (50, 99)
        }
        cpu = {"server_cores": statistics.median(self.server_cpu), "client_cores": statistics.median(self.client_cpu)}
        rates = {"steady": self.steady, "overall": self.overall, "together": self.together}
        return {**{name: statistics.median(values) for name, values in rates.items()}, **spreads, **cpu}


Found = dict[int, dict[str, Measured]]  # by clients and server


def _steady(clients: Sequence[Sequence[Any]]) -> tuple[float, float]:
    """Tokens a second while all have a stream, and the share of the first-ended one's time that this was; 0 and 0 where it never was."""
    begin = max(streams[0].chunks[0][0] for streams in clients)
    end = min(streams[-1].chunks[-1][0] for streams in clients)
    whole = end - min(streams[0].chunks[0][0] for streams in clients)
    rate = steady_rate(clients)
    return (0.0, 0.0) if rate is None else (rate, (end - begin) / whole)


def main() -> int:
    """Progress goes to stderr; then come a table and, as the last line, JSON. Ctrl-C keeps the rounds that are whole."""
    arguments = _arguments()
    lengths = (
        UniformLengths(arguments.prompt_tokens, arguments.prompt_tokens),
        UniformLengths(arguments.max_tokens, arguments.max_tokens),
    )
    job = Job(arguments.server, arguments.clients, arguments.rounds, arguments.requests, GenerateWorkload(*lengths))
    return run_and_report(job)


def run_and_report(job: Job, report: Callable[[Job, Found], None] | None = None) -> int:
    """All of a job, and what is printed of it: the table here, or a caller's own."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers end too
    found: Found = {clients: {spec.name: Measured() for spec in job.specs} for clients in job.clients}
    complete = True
    try:
        with event_loop() as runner:
            runner.run(_measured(job, found))
    except KeyboardInterrupt:
        complete = False
    whole = {clients: of for clients, of in found.items() if all(measured.steady for measured in of.values())}
    if whole:
        (report or _report)(job, whole)
    print(json.dumps({"complete": complete, **_details(job, whole)}))
    return 0 if complete else 128 + signal.SIGINT


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--server", action="append", required=True, type=spec, metavar="NAME=[VARIABLE=value ...] COMMAND"
    )
    add_load_flags(parser)
    arguments = parser.parse_args()
    names = [each.name for each in arguments.server]
    if len(set(names)) < len(names):
        parser.error("two servers have one name")
    return arguments


def add_load_flags(parser: argparse.ArgumentParser, rounds: int = 5) -> None:
    parser.add_argument("--clients", type=_numbers, default=(8, 32), help="8,32")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, default=2, help="of each client and round, one after the other")


def spec(text: str) -> ServerSpec:
    try:
        return ServerSpec.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(word) if word.isdecimal() else 0 for word in text.split(","))
    if not all(numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers above 0")
    return numbers


async def _measured(job: Job, found: Found) -> None:
    with ExitStack() as stack:
        sides: list[tuple[ServerSide, GenerateTraffic]] = []
        for spec in job.specs:
            side = ServerSide(spec)
            stack.callback(side.end)
            seconds = await side.first_answer()
            traffic, words = await traffic_to(side, job.wanted, stack.enter_context(closing(HttpClient(side.url))))
            side.halt()
            sides.append((side, traffic))
            say(f"{spec.name}: first answer after {seconds:.1f} s; prompts are {words}")
        for number in range(job.rounds):
            await _round(number, job, sides, found)


async def _round(number: int, job: Job, sides: list[tuple[ServerSide, GenerateTraffic]], found: Found) -> None:
    """Who begins changes from round to round: a machine's drift must not fall on one server. Kept only once it is whole."""
    first = number % len(sides)
    runs: list[tuple[int, str, GenerateRun, float]] = []
    for clients in job.clients:
        for side, traffic in sides[first:] + sides[:first]:
            with side.awake():
                before = side.cpu_seconds()
                run = await one_run(traffic, clients, job.requests_each, WARM_UP_TOKENS)
                runs.append((clients, side.spec.name, run, side.cpu_seconds() - before))
            say(f"round {number + 1}: ×{clients}, {side.spec.name} {overall_rate(run):.1f} tok/s overall")
            await asyncio.sleep(0)
    for clients, name, run, cpu_seconds in runs:
        found[clients][name].add(run, cpu_seconds)


def ratio(ours: Sequence[float], others: Sequence[float]) -> float:
    """Median of the rounds; 0 where one of them has no figure."""
    return statistics.median(one / other if other else 0.0 for one, other in zip(ours, others, strict=True))


def _report(job: Job, found: Found) -> None:
    for each in job.specs:
        print(
            f"{each.name}: {' '.join([f'{name}={value}' for name, value in each.environment.items()] + list(each.command))}"
        )
    for clients, of in found.items():
        first = next(iter(of.values()))
        for name, measured in of.items():
            it = measured.summary()
            wait = f"TTFT {it['ttft_p50_ms']:6.0f} / {it['ttft_p99_ms']:6.0f} ms"
            wait += f", ITL {it['itl_p50_ms']:6.1f} / {it['itl_p99_ms']:6.1f} ms"
            over = f"{ratio(first.steady, measured.steady):5.2f} {ratio(first.overall, measured.overall):5.2f}"
            print(
                f"×{clients:<3} {name:20} {it['steady']:8.1f} tok/s in {it['together']:.0%}, overall {it['overall']:8.1f}",
                end="; ",
            )
            print(f"first over it {over}; {wait}; cores {it['server_cores']:.2f}, client {it['client_cores']:.2f}")


def _details(job: Job, found: Found) -> dict[str, Any]:
    servers = {each.name: {"command": each.command, "environment": each.environment} for each in job.specs}
    levels = {
        str(clients): {
            name: {
                **measured.summary(),
                "rounds": {"steady": measured.steady, "overall": measured.overall},
                "first_over": ratio(next(iter(of.values())).steady, measured.steady),
            }
            for name, measured in of.items()
        }
        for clients, of in found.items()
    }
    wanted = {"prompt_tokens": str(job.wanted.prompt_tokens), "max_tokens": str(job.wanted.max_tokens)}
    return {"servers": servers, **wanted, "requests_each": job.requests_each, "clients": levels}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
