"""Write nginx weights by the capacity of each server: `python tools/upstream_weights.py --out FILE HOST:PORT ...`.

For a fleet without a gateway. It reads /metrics of each server and writes the `server` lines that an `upstream` block
includes. The file is replaced and nginx reloaded only if a share changed by more than a tenth. Needs only the standard
library.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

MOST_WEIGHT = 100  # weight of the fastest server; weights are whole numbers, and a hundredth is precise enough
CHANGE = 0.1  # relative change of a share that causes a write: a reload keeps old workers until their streams end
ANSWER_SECONDS = 5.0
CAPACITY = re.compile(r'^armature_capacity_tokens_per_second\{phase="(\w+)",rows="(\d+)"\} (\S+)$', re.MULTILINE)
LINE = re.compile(r"^server (\S+) weight=(\d+) ", re.MULTILINE)
Weights = dict[str, int]


def requests_per_second(metrics: str, prompt_tokens: int, completion_tokens: int) -> float | None:
    """Return the requests per second of a full server by its own measurements, or None if it reports none.

    A prompt is read for each completion. For an encoder: texts of `prompt_tokens` tokens per second.
    """
    told: dict[str, dict[int, float]] = {}
    for phase, rows, speed in CAPACITY.findall(metrics):
        told.setdefault(phase, {})[int(rows)] = float(speed)
    fastest = {phase: by_rows[max(by_rows)] for phase, by_rows in told.items()}
    seconds = math.inf
    if "encode" in fastest:
        seconds = prompt_tokens / fastest["encode"] if fastest["encode"] > 0 else math.inf
    elif fastest.get("prefill", 0) > 0 and fastest.get("decode", 0) > 0:
        seconds = prompt_tokens / fastest["prefill"] + completion_tokens / fastest["decode"]
    return 1 / seconds if 0 < seconds < math.inf else None


def weigh(capacities: Mapping[str, float | None], before: Weights) -> Weights:
    """Return whole-number weights in proportion to the capacities.

    A server that reports nothing keeps its old weight. A server without an old weight counts as the slowest, so it
    never gets too much.
    """
    known = {server: capacity for server, capacity in capacities.items() if capacity is not None}
    most = max(known.values(), default=1.0)
    weights = {server: max(1, round(MOST_WEIGHT * capacity / most)) for server, capacity in known.items()}
    least = min(weights.values(), default=1)
    return {server: weights.get(server, before.get(server, least)) for server in capacities}


def differ(weights: Weights, before: Weights) -> bool:
    """Return True if the set of servers changed, or a share changed by more than a tenth of itself."""
    if weights.keys() != before.keys():
        return True
    now, then = sum(weights.values()), sum(before.values())
    return any(abs(weights[server] / now * then / before[server] - 1) > CHANGE for server in weights)


def read_weights(file: Path) -> Weights:
    """Return the weights that were written last, or none if there is no such file."""
    with suppress(FileNotFoundError):
        return {server: int(weight) for server, weight in LINE.findall(file.read_text())}
    return {}


def lines(weights: Weights) -> str:
    """Return the `server` lines.

    With max_fails above 0, nginx would treat a full server (429) as failed, and a fleet of full servers as down (502).
    """
    return "".join(f"server {server} weight={weight} max_fails=0;\n" for server, weight in weights.items())


def replace_safely(file: Path, text: str, check: Sequence[str], reload: Sequence[str]) -> str:
    """Write the file, check it and reload nginx. If the check fails, restore the old file.

    Returns a sentence on what went wrong, or None.
    """
    before = file.read_text() if file.exists() else None
    _write(file, text)
    for command in (check, reload):
        if not command:
            continue
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            if before is None:
                file.unlink()
            else:
                _write(file, before)
            return f"{shlex.join(command)} failed, and {file} is as it was: {done.stderr.strip()}"
    return ""


def _write(file: Path, text: str) -> None:
    """Replace the file atomically, so that nginx never reads half of it."""
    fresh = file.with_name(f".{file.name}.{os.getpid()}")
    fresh.write_text(text)
    fresh.replace(file)


def scraped(server: str) -> str:
    """Return the server's metrics, or an empty text if it does not answer."""
    try:
        with urllib.request.urlopen(f"http://{server}/metrics", timeout=ANSWER_SECONDS) as answer:
            text: str = answer.read().decode()
            return text
    except (OSError, urllib.error.URLError) as error:
        print(f"{server} does not answer: {error}", file=sys.stderr)
        return ""


def once(arguments: argparse.Namespace) -> int:
    """Query every server once and write the file if needed. Returns the exit status."""
    before = read_weights(arguments.out)
    capacities = {
        server: requests_per_second(scraped(server), arguments.prompt_tokens, arguments.completion_tokens)
        for server in arguments.server
    }
    weights = weigh(capacities, before)
    if not differ(weights, before):
        return 0
    problem = replace_safely(arguments.out, lines(weights), shlex.split(arguments.check), shlex.split(arguments.reload))
    if problem:
        print(problem, file=sys.stderr)
        return 1
    print(", ".join(f"{server} weight {weight}" for server, weight in weights.items()), flush=True)
    return 0


def main() -> int:
    arguments = _arguments()
    status = once(arguments)
    while arguments.every:
        time.sleep(arguments.every)
        once(arguments)
    return status


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("server", nargs="+", metavar="HOST:PORT")
    parser.add_argument("--out", type=Path, required=True, help="the file that the `upstream` block includes")
    parser.add_argument("--every", type=float, default=0.0, help="seconds between updates; without it, update once")
    parser.add_argument(
        "--check",
        default="",
        help="checks the configuration, such as 'nginx -t'; if it fails, the old file is restored",
    )
    parser.add_argument("--reload", default="", help="command that reloads nginx, such as 'nginx -s reload'")
    parser.add_argument("--prompt-tokens", type=int, default=256, help="tokens of a typical request")
    parser.add_argument("--completion-tokens", type=int, default=128)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
