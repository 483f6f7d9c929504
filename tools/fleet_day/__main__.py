"""Simulate a day of a fleet's traffic: `python -m tools.fleet_day`.

It compares the pools alone and together, at the same traffic: dollars, waits, refusals and pods. The pools are ours,
or those of `--pool`. With `--into` it writes the figures and the pictures of docs/fleet.md.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from armature_bench.console import MeasurementFailed, progress
from tools.fleet_day.pictures import WORDS, write_pictures
from tools.fleet_day.pools import POOL_FORM, default_pools, read_pool
from tools.fleet_day.report import Figures, assumptions, figures, read, tables, wrapped, write
from tools.fleet_day.scenarios import SIZES, Fleets, Scenario, arm_speeds, by_size, changes
from tools.fleet_day.simulation import BALANCERS, Spot, Starts, simulate
from tools.fleet_day.traffic import HOUR, Traffic

FILE = "fleet-day.json"
ARM_FACTORS = (0.6, 0.8, 1.2, 1.4)
WITH_SERIES = 1_000  # the size of which the pictures show the day
PERCENT = 100


def main(words: Sequence[str] | None = None) -> int:
    """Print the tables, with progress on standard error."""
    arguments = _arguments(words)
    try:
        pools = {pool.name: pool for pool in map(read_pool, arguments.pool)} or default_pools(arguments.arm)
    except MeasurementFailed as error:
        print(error, file=sys.stderr)
        return 2
    fleets = Fleets(
        pools,
        Traffic(1.0, trough=arguments.trough, bursts=arguments.bursts),
        Starts(arguments.machine_seconds, arguments.image_seconds, arguments.model_seconds),
        Spot(arguments.spot_share, arguments.spot_price, arguments.spot_losses, arguments.spot_notice),
        arguments.balancer,
        arguments.simulated_pods,
    )
    found = list(_kept(arguments, fleets))
    found += [_simulated(each, arguments.seed, arguments.hours) for each in _scenarios(arguments, fleets)]
    print("\n".join(tables(found)))
    print("\n".join(wrapped(assumptions(fleets))))
    if arguments.into is not None:
        write(arguments.into / FILE, fleets, arguments.seed, found)
        write_pictures(read(arguments.into / FILE), arguments.into, arguments.png)
    return 0


def _scenarios(arguments: argparse.Namespace, fleets: Fleets) -> list[Scenario]:
    chosen = list(by_size(fleets, tuple(arguments.pods)))
    if len(fleets.pools) > 1:
        for pods in arguments.changes:
            chosen += changes(fleets, pods)
        for pods in arguments.speeds:
            chosen += arm_speeds(fleets, pods, ARM_FACTORS)
    return chosen


def _simulated(scenario: Scenario, seed: int, hours: float) -> Figures:
    plan, began, done = replace(scenario.plan, seconds=HOUR * hours), time.monotonic(), 0
    with progress(PERCENT, f"{scenario.name}, {scenario.pods:,} pods") as advance:

        def show(share: float) -> None:
            nonlocal done
            if int(PERCENT * share) > done:
                advance(f"{scenario.name}, {scenario.pods:,} pods", int(PERCENT * share) - done)
                done = int(PERCENT * share)

        day = simulate(plan, seed, show)
    seconds = time.monotonic() - began
    print(f"{scenario.name}, {scenario.pods:,} pods: {day.sent:,} requests in {seconds:.0f} s", file=sys.stderr)
    return figures(scenario, day, scenario.table in WORDS and scenario.pods == WITH_SERIES)


def _kept(arguments: argparse.Namespace, fleets: Fleets) -> list[Figures]:
    """Return the runs of an earlier file that this command does not repeat, if it had the same assumptions."""
    if not arguments.keep or arguments.into is None or not (arguments.into / FILE).exists():
        return []
    earlier = read(arguments.into / FILE)
    if earlier["seed"] != arguments.seed or earlier["assumptions"] != list(assumptions(fleets)):
        raise SystemExit(f"{FILE} has other assumptions than this command: leave out --keep, or use the same flags.")
    again = {(each.table, each.name, each.pods) for each in _scenarios(arguments, fleets)}
    return [run for run in earlier["runs"] if (run["table"], run["name"], run["pods"]) not in again]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    add = parser.add_argument
    add("--pods", type=int, nargs="*", default=list(SIZES), help="sizes of the traffic: each pool alone, and mixed")
    add("--changes", type=int, nargs="*", default=[], help="sizes at which the mixed fleet is changed, one by one")
    add("--speeds", type=int, nargs="*", default=[], help="sizes at which the first pool has other speeds")
    add("--pool", action="append", default=[], help=f"{POOL_FORM}; the cheaper pool first, at most two")
    add("--arm", type=float, default=1.0, help="rates of our Arm pod over those of the x86 pod: declared")
    add("--balancer", choices=BALANCERS, default="wait")
    add("--trough", type=float, default=0.25, help="the lowest rate over the highest")
    add("--bursts", type=float, default=4.0, help="bursts in a day")
    add("--machine-seconds", type=float, default=60.0, help="until a new machine joins")
    add("--image-seconds", type=float, default=20.0, help="to pull the image there")
    add("--model-seconds", type=float, default=34.6, help="from the container's start to ready")
    add("--spot-share", type=float, default=0.0, help="share of the pods above the minimum on spot machines")
    add("--spot-price", type=float, default=0.4, help="share of the price on demand")
    add("--spot-losses", type=float, default=0.05, help="losses per machine and hour")
    add("--spot-notice", type=float, default=120.0, help="seconds of notice; 0: none")
    add(
        "--simulated-pods",
        type=int,
        default=16,
        help="a larger fleet is a sample: so many pods take its peak at full load",
    )
    add("--hours", type=float, default=24.0)
    add("--seed", type=int, default=1)
    add("--into", type=Path, help=f"folder for {FILE} and the pictures")
    add("--keep", action="store_true", help="keep the runs in that file that this command does not repeat")
    add("--png", type=Path, help="folder for the pictures as PNG too, to look at")
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
