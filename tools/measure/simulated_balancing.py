"""Simulate load balancing over servers of unequal speed: `python -m tools.measure.simulated_balancing`.

Requests arrive at random, or come from clients that each wait for their answer, and share the server that a rule
chooses. Work is measured in seconds of a server of speed 1. The simulation is pure Python and seeded, so it gives the
same figures on every machine.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tools.measure.simulated_server import Job, Server

SCRAPE_SECONDS = 0.05  # maximum age of an endpoint picker's metrics
WARM_UP = 0.1  # fraction of requests that are not counted, while the servers fill


Rule = Callable[[Sequence[Server], float], int]  # from the servers and the time to the chosen server


def smooth(weights: Sequence[float]) -> Callable[[Sequence[int]], int]:
    """Return nginx's smooth weighted round-robin.

    Each candidate gains its weight. The highest one is chosen and pays the weights of all.
    """
    riches = [0.0] * len(weights)

    def pick(among: Sequence[int]) -> int:
        for index in among:
            riches[index] += weights[index]
        best = max(among, key=lambda index: riches[index])
        riches[best] -= sum(weights[index] for index in among)
        return best

    return pick


def weighted(weights: Sequence[float]) -> Rule:
    turn = smooth(weights)
    return lambda servers, moment: turn(range(len(servers)))


def least_connections(weights: Sequence[float]) -> Rule:
    """Choose the server with the fewest requests for its weight; equal servers take turns."""
    turn = smooth(weights)

    def pick(servers: Sequence[Server], moment: float) -> int:
        shares = [server.num_here / weight for server, weight in zip(servers, weights, strict=True)]
        return turn([index for index, share in enumerate(shares) if share == min(shares)])

    return pick


def predicted_wait(scrape_seconds: float = SCRAPE_SECONDS) -> Rule:
    """Choose the server that would finish first with one more request, by metrics up to `scrape_seconds` old."""
    waits: list[float] = []
    asked = -math.inf

    def pick(servers: Sequence[Server], moment: float) -> int:
        nonlocal asked, waits
        if moment - asked >= scrape_seconds:
            asked, waits = moment, [(server.num_here + 1) / server.capacity for server in servers]
        best = min(range(len(waits)), key=lambda index: waits[index])
        waits[best] += 1 / servers[best].capacity  # the sender knows what it has sent since
        return best

    return pick


def rules(servers: Sequence[Server]) -> dict[str, Rule]:
    capacities = [server.capacity for server in servers]
    ones = [1.0] * len(servers)
    return {
        "round-robin": weighted(ones),
        "weights": weighted(capacities),
        "least_conn": least_connections(ones),
        "least_conn, weights": least_connections(capacities),
        "predicted wait": predicted_wait(),
    }


@dataclass(slots=True)
class Outcome:
    """Seconds from arrival to end of answered requests, and the counts of the others."""

    seconds: list[float] = field(default_factory=list)
    answered: int = 0  # answered before the last request arrived
    refused: int = 0
    began: float = 0.0
    ended: float = 0.0

    @property
    def per_second(self) -> float:
        return self.answered / (self.ended - self.began) if self.ended > self.began else 0.0

    def percentile(self, share: float) -> float:
        """Return the nearest-rank percentile; infinite if no request was answered."""
        ordered = sorted(self.seconds)
        return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else math.inf


def arrivals(servers: Sequence[Server], rule: Rule, rate: float, count: int, seed: int) -> Outcome:
    """Simulate independent arrivals, `rate` per second."""
    source, outcome, moment = random.Random(seed), Outcome(), 0.0
    first = int(WARM_UP * count)
    for number in range(count):
        moment += source.expovariate(rate)
        _run_until(servers, moment, lambda job: _count(job, servers, outcome, first))
        outcome.began = moment if number == first else outcome.began
        if not servers[rule(servers, moment)].take(Job(number, moment, source.expovariate(1.0))) and number >= first:
            outcome.refused += 1
    outcome.ended, outcome.answered = moment, len(outcome.seconds)
    _run_until(servers, math.inf, lambda job: _count(job, servers, outcome, first))
    return outcome


def clients(servers: Sequence[Server], rule: Rule, count: int, requests: int, seed: int) -> Outcome:
    """Simulate `count` clients that send the next request when one is answered. Places and queue hold them all."""
    source, outcome = random.Random(seed), Outcome()
    first, sent = int(WARM_UP * requests), 0

    def ask(moment: float) -> None:
        nonlocal sent
        taken = servers[rule(servers, moment)].take(Job(sent, moment, source.expovariate(1.0)))
        assert taken, "there are fewer clients than a server has room for"
        sent += 1

    for _ in range(count):
        ask(0.0)
    while len(outcome.seconds) < requests - first:
        moment = min(server.next_end for server in servers)
        _run_until(servers, moment, lambda job: _count(job, servers, outcome, first), just_one=True)
        outcome.began = outcome.began if outcome.seconds else moment
        ask(moment)
    outcome.ended, outcome.answered = servers[0].now, len(outcome.seconds)
    return outcome


def _run_until(servers: Sequence[Server], moment: float, on_end: Callable[[Job], None], just_one: bool = False) -> None:
    """Run to `moment`, until all servers are idle if it is infinite, or until the next request ends if `just_one`."""
    while (due := (ends := min(servers, key=lambda server: server.next_end)).next_end) <= moment:
        if due == math.inf:
            return
        for server in servers:
            server.advance(due)
        on_end(ends.end_next()[0])
        if just_one:
            return
    for server in servers:
        server.advance(moment)


def _count(job: Job, servers: Sequence[Server], outcome: Outcome, first: int) -> None:
    if job.number >= first:
        outcome.seconds.append(servers[0].now - job.arrived)


def main() -> int:
    arguments = _arguments()
    print("| load | rule | p50 s | p99 s | answered/s | refused |")
    print("|---|---|---|---|---|---|")
    for load in arguments.loads:
        for name in rules(_servers(arguments)):
            servers = _servers(arguments)
            rate = load * sum(server.capacity for server in servers)
            print(
                row(
                    f"{load:g}", name, arrivals(servers, rules(servers)[name], rate, arguments.requests, arguments.seed)
                )
            )
    for count in arguments.clients:
        for name in rules(_servers(arguments)):
            servers = _servers(arguments)
            found = clients(servers, rules(servers)[name], count, arguments.requests, arguments.seed)
            print(row(f"{count} clients", name, found))
    return 0


def row(load: str, name: str, found: Outcome) -> str:
    refused = found.refused / max(1, found.refused + len(found.seconds))
    seconds = f"{found.percentile(0.5):.2f} | {found.percentile(0.99):.2f}"
    return f"| {load} | {name} | {seconds} | {found.per_second:.2f} | {refused:.1%} |"


def _servers(arguments: argparse.Namespace) -> list[Server]:
    return [Server(speed, arguments.cost, arguments.places, arguments.queue) for speed in arguments.speeds]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--speeds", type=float, nargs="+", default=[1.0, 0.25])
    parser.add_argument(
        "--cost", type=float, default=1.0, help="cost of a further request in a batch, relative to the first"
    )
    parser.add_argument("--places", type=int, default=64)
    parser.add_argument("--queue", type=int, default=256)
    parser.add_argument("--loads", type=float, nargs="*", default=[0.3, 0.5, 0.7, 0.9])
    parser.add_argument("--clients", type=int, nargs="*", default=[8, 32])
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=1)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
