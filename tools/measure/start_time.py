"""Measure the time from start to first token: `python -m tools.measure.start_time --server 'NAME=COMMAND' ...`.

Servers start one after the other, alone on the machine. The first round does not count: it warms the page cache and
lets each server write its own caches. Ratios are each other server's time divided by the first's.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence

from armature_bench.http.wire import event_loop
from tools.peers.servers import ServerSide, ServerSpec, median_ratio, report_progress, server_spec


def main() -> int:
    """Run the measurement. Progress goes to stderr; stdout has a table and, in the last line, JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--server", action="append", required=True, type=server_spec, metavar="NAME=[VARIABLE=value ...] COMMAND"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds that count")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the server ends too
    found: dict[str, list[float]] = {each.name: [] for each in arguments.server}
    with event_loop() as runner:
        for number in range(arguments.rounds + 1):
            for each in arguments.server:
                seconds = runner.run(start(each))
                report_progress(f"start {number}: {each.name} {seconds:.2f} s{'' if number else ', not counted'}")
                found[each.name] += [seconds] if number else []
    _report(arguments.server, found)
    return 0


async def start(spec: ServerSpec) -> float:
    side = ServerSide(spec)
    try:
        return await side.first_answer()
    finally:
        side.end()


def _report(specs: Sequence[ServerSpec], found: dict[str, list[float]]) -> None:
    first = next(iter(found.values()))
    over = {name: median_ratio(seconds, first) for name, seconds in found.items()}
    for name, seconds in found.items():
        print(f"{name:20} {statistics.median(seconds):8.2f} s to the first token, {over[name]:.1f} times the first's")
    commands = {each.name: {"command": each.command, "environment": each.environment} for each in specs}
    print(json.dumps({"servers": commands, "seconds": found, "over_first": over}))


if __name__ == "__main__":
    sys.exit(main())
