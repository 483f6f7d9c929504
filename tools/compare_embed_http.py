"""Embedding over HTTP beside other servers', turn by turn in one run: `python -m tools.compare_embed_http --model DIR --venv NAME=DIR ...`.

Names are `sentence_transformers`, `openvino` and `onnxruntime`, each behind the same plain FastAPI route, and `infinity`; DIR is an
environment that has them. Every server is sent the same texts by the same client, and is halted while another has its turn. Clients
who wait for their answers come first; then half as many requests a second as that server then answered, at random moments. Ratios are
ours over each other's, round by round.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.bench.console import percentile
from app.bench.http.dialects import EMBED_DIALECTS
from app.bench.http.embed import (
    EmbedTiming,
    EmbedTraffic,
    EmbedWorkload,
    num_texts,
    num_tokens,
    send_texts,
)
from app.bench.http.loops import (
    LoadRun,
    RunLimits,
    units_per_second,
)
from app.bench.http.tally import first_served_model
from app.bench.http.wire import (
    HttpClient,
    event_loop,
)
from app.bench.http.workload import (
    LogNormalLengths,
    TextPrompts,
    poisson_arrivals,
)
from tools.compare_http import ratio, say
from tools.peers.servers import ServerSide, ServerSpec

OPENAI = EMBED_DIALECTS["openai"]
TOKENS_AROUND = 2.0  # [CLS] and [SEP]; our words are one token each in the usual vocabularies
WARM_UP_REQUESTS = 32
FEWEST = 20  # requests at half load
ROUTES = ("sentence_transformers", "openvino", "onnxruntime")


@dataclass(frozen=True, slots=True)
class Job:
    specs: Sequence[ServerSpec]
    clients: int
    rounds: int
    seconds: float
    texts: EmbedWorkload


@dataclass(slots=True)
class Measured:
    """One server: what every round found."""

    samples: list[float] = field(default_factory=list)  # texts a second, all clients waiting
    tokens: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)  # seconds, of every request under all clients
    calm: list[float] = field(default_factory=list)  # the same at half of that load
    cores: list[float] = field(default_factory=list)
    client_cores: list[float] = field(default_factory=list)

    def add(self, busy: LoadRun[EmbedTiming], calm: LoadRun[EmbedTiming], cpu_seconds: float) -> None:
        self.samples.append(units_per_second(busy, True, num_texts))
        self.tokens.append(units_per_second(busy, True, num_tokens))
        self.latencies += [each.ended - each.intended for each in busy.answered]
        self.calm += [each.ended - each.intended for each in calm.answered]
        self.cores.append(cpu_seconds / (busy.ended - busy.started))
        self.client_cores.append(busy.cpu_seconds / (busy.ended - busy.started))

    def summary(self) -> dict[str, float]:
        medians = {
            name: statistics.median(getattr(self, name)) for name in ("samples", "tokens", "cores", "client_cores")
        }
        spreads = {"busy": self.latencies, "calm": self.calm}
        shares = {
            f"{name}_p{at}_ms": 1e3 * percentile(of, at / 100) for name, of in spreads.items() for at in (50, 95, 99)
        }
        return medians | shares


Found = dict[str, Measured]


def main() -> int:
    """Progress goes to stderr; then come a table and, as the last line, JSON. Ctrl-C keeps the rounds that are whole."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that servers end too
    arguments = _arguments()
    texts = EmbedWorkload(arguments.texts, LogNormalLengths(*arguments.lengths))
    job = Job(list(_specs(arguments)), arguments.clients, arguments.rounds, arguments.seconds, texts)
    found: Found = {spec.name: Measured() for spec in job.specs}
    complete = True
    try:
        with event_loop() as runner:
            runner.run(_measured(job, found))
    except KeyboardInterrupt:
        complete = False
    if all(measured.samples for measured in found.values()):
        _report(found)
        print(json.dumps({"complete": complete, **_details(job, found)}))
    return 0 if complete else 128 + signal.SIGINT


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a sentence-transformers directory")
    parser.add_argument("--venv", action="append", default=[], type=_venv, metavar="NAME=DIR")
    parser.add_argument("--flags", default="", help="of our server")
    parser.add_argument(
        "--exports", type=Path, default=Path("/tmp/exports"), help="where converted models lie, or shall"
    )
    parser.add_argument(
        "--workers", type=_numbers, default=(1, 2), help="requests that a route computes at once: 1,2 is each in turn"
    )
    parser.add_argument("--threads", type=int, default=2, help="cores that every server may use")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--texts", type=int, default=1, help="of a request")
    parser.add_argument(
        "--lengths", type=_lengths, default=(40, 512), help="MEDIAN:HIGHEST of a log-normal distribution"
    )
    parser.add_argument("--seconds", type=float, default=10.0, help="of each load in each round")
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


def _lengths(text: str) -> tuple[int, int]:
    median, _, highest = text.partition(":")
    return int(median), int(highest)


def _venv(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in (*ROUTES, "infinity") or not (Path(folder) / "bin" / "python").exists():
        raise argparse.ArgumentTypeError(
            f"{text!r} is not NAME=DIR: {', '.join(ROUTES)} or infinity, and an environment's folder"
        )
    return name, Path(folder).absolute()


def _specs(arguments: argparse.Namespace) -> list[ServerSpec]:
    """Ours first. Each route with one request at a time on all cores, and with several on fewer."""
    model, threads = str(arguments.model.absolute()), arguments.threads
    serve = (sys.executable, "-m", "app", "serve", "--model", model, "--threads", str(threads), "--host", "127.0.0.1")
    specs = [ServerSpec("ours", (*serve, *shlex.split(arguments.flags), "--port", "{port}"))]
    for name, venv in arguments.venv:
        python = str(venv / "bin" / "python")
        if name == "infinity":
            command = (
                str(venv / "bin" / "infinity_emb"),
                "v2",
                "--model-id",
                model,
                "--device",
                "cpu",
                "--engine",
                "torch",
            )
            rest = ("--no-bettertransformer", "--url-prefix", "/v1", "--host", "127.0.0.1", "--port", "{port}")
            specs.append(ServerSpec(name, (*command, *rest), {"OMP_NUM_THREADS": str(threads), "DO_NOT_TRACK": "1"}))
            continue
        for workers in arguments.workers:
            each = max(1, threads // workers)
            numbers = (
                "--workers",
                str(workers),
                "--threads",
                str(each),
                "--exports",
                str(arguments.exports.absolute()),
            )
            command = (python, "-m", "tools.peers.embed_route", name, model, *numbers, "--port", "{port}")
            # Without a limit of its own OpenMP would start as many threads as there are cores in every worker.
            specs.append(ServerSpec(f"{name} {workers}×{each}", command, {"OMP_NUM_THREADS": str(each)}))
    return specs


async def _measured(job: Job, found: Found) -> None:
    with ExitStack() as stack:
        sides: list[tuple[ServerSide, EmbedTraffic]] = []
        for spec in job.specs:
            side = ServerSide(spec)
            stack.callback(side.end)
            seconds = await side.first_answer(lambda wire, model: send_texts(wire, OPENAI, model, ["once upon a time"]))
            wire = stack.enter_context(closing(HttpClient(side.url)))
            deck = TextPrompts(1.0, TOKENS_AROUND, job.texts.seed)
            traffic = EmbedTraffic(wire, OPENAI, await first_served_model(wire), deck, job.texts)
            side.halt()
            sides.append((side, traffic))
            say(f"{spec.name}: first answer after {seconds:.1f} s")
        for number in range(job.rounds):
            await _round(number, job, sides, found)


async def _round(number: int, job: Job, sides: list[tuple[ServerSide, EmbedTraffic]], found: Found) -> None:
    """Who begins changes from round to round: a machine's drift must not fall on one server. Kept only once it is whole."""
    first = number % len(sides)
    runs = []
    for side, traffic in sides[first:] + sides[:first]:
        with side.awake():
            await traffic.warm_up(WARM_UP_REQUESTS)
            before = side.cpu_seconds()
            busy: LoadRun[EmbedTiming] = LoadRun()
            await traffic.run_closed_loop(busy, job.clients, RunLimits(seconds=job.seconds))
            runs.append((side.spec.name, busy, calm := LoadRun[EmbedTiming](), side.cpu_seconds() - before))
            _check(side, busy)
            half = len(busy.answered) / (busy.ended - busy.started) / 2
            await traffic.run_open_loop(
                calm, poisson_arrivals(half, number), RunLimits(num_requests=max(FEWEST, round(half * job.seconds)))
            )
            _check(side, calm)
        say(f"round {number + 1}: {side.spec.name} {units_per_second(busy, True, num_texts):.0f} texts/s")
    for name, busy, calm, cpu_seconds in runs:
        found[name].add(busy, calm, cpu_seconds)


def _check(side: ServerSide, run: LoadRun[EmbedTiming]) -> None:
    """A figure without a request that failed would be another's."""
    if run.failures or not run.answered:
        raise SystemExit(
            side.complaint("; ".join(f"{kind}: {text}" for kind, text in run.messages.items()) or "nothing answered")
        )


def _report(found: Found) -> None:
    ours = next(iter(found.values()))
    for name, measured in found.items():
        it = measured.summary()
        speed = f"{it['samples']:8.1f} texts/s {it['tokens']:9.0f} tok/s, ours over it {ratio(ours.samples, measured.samples):5.2f}"
        busy = " / ".join(f"{it[f'busy_p{at}_ms']:.1f}" for at in (50, 95, 99))
        calm = " / ".join(f"{it[f'calm_p{at}_ms']:.1f}" for at in (50, 95, 99))
        cores = f"cores {it['cores']:.2f}, client {it['client_cores']:.2f}"
        print(f"{name:28} {speed}; p50/p95/p99 {busy} ms, at half load {calm} ms; {cores}")


def _details(job: Job, found: Found) -> dict[str, Any]:
    ours = next(iter(found.values()))
    servers = {
        spec.name: {
            "command": spec.command,
            "environment": spec.environment,
            **found[spec.name].summary(),
            "rounds": found[spec.name].samples,
            "ours_over": ratio(ours.samples, found[spec.name].samples),
        }
        for spec in job.specs
    }
    return {"clients": job.clients, "texts": job.texts.number, "lengths": str(job.texts.lengths), "servers": servers}


if __name__ == "__main__":
    sys.exit(main())
