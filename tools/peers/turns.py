"""One side of a comparison in its own process: loads the model once and runs a turn for each line of its stdin.

`python -m tools.peers.turns KIND MODEL --threads N [--option NAME=VALUE]...` runs with the interpreter that has the
peer's library, so this module uses only the standard library. Results are JSON lines with a prefix, which separates
them from what a library prints.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tools.peers.launch import die_with_parent

MARK = "TURN "
# Rows that were prefilled first already decode during the prefill of the last. No row may end before all decode
# together.
AHEAD_TOKENS = 24
CHECKED_TOKENS = 8  # first tokens of each row that are reported, to compare the sides

Rows = list[list[int]]  # token ids of each row of a batch
# From prompts and a number of tokens to the tokens of each row so far: before anything is computed, and after each
# step.
Generate = Callable[[Rows, int], Iterator[Rows]]


@dataclass(frozen=True, slots=True)
class Peer:
    """A loaded model that generates greedily and does not stop at the end of a text."""

    description: str  # library, version and, if known, the processor features it uses
    bytes_per_token: int  # bytes of weights that one decoded token reads
    generate: Generate


@dataclass(frozen=True, slots=True)
class Turn:
    """The request of one turn. `tokens` is 1 for a prefill; more are decoded by all rows together."""

    rows: int
    prompt_tokens: int
    tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Taken:
    """The result of one turn: `tokens` of all rows in `seconds`, and ids of each row, in the order computed."""

    seconds: float
    tokens: int
    ids: Rows


def main() -> int:
    """Report when the model is loaded, then answer each line of stdin."""
    parser = argparse.ArgumentParser()
    parser.add_argument("kind")
    parser.add_argument("model", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--option", action="append", default=[], help="NAME=VALUE")
    arguments = parser.parse_args()
    die_with_parent()
    start = time.perf_counter()
    options = dict(option.split("=", 1) for option in arguments.option)
    load: Callable[[Path, int, dict[str, str]], Peer] = importlib.import_module(f"tools.peers.{arguments.kind}").load
    peer = load(arguments.model, arguments.threads, options)
    _say(
        {
            "about": peer.description,
            "bytes_per_token": peer.bytes_per_token,
            "load_seconds": time.perf_counter() - start,
        }
    )
    for line in sys.stdin:
        turn = Turn(**json.loads(line))
        prompts = deal(turn)
        tokens = turn.tokens if turn.tokens == 1 else turn.tokens + AHEAD_TOKENS
        taken = timed(peer.generate(prompts, tokens), turn.tokens, tokens)
        _say(asdict(replace(taken, ids=[row[:CHECKED_TOKENS] for row in taken.ids])))
    return 0


def deal(turn: Turn) -> Rows:
    """Return prompts whose ids do not repeat, and never the same twice, so that no cache helps."""
    deck = random.Random(turn.seed)
    return [deck.sample(range(100, 2000), turn.prompt_tokens) for _ in range(turn.rows)]


def timed(steps: Iterable[Rows], wanted: int, whole: int, clock: Callable[[], float] = time.perf_counter) -> Taken:
    """Time one turn.

    A prefill's time ends at its first token. Decoding is timed from when the last row has a token until the first row
    ends.
    """
    began: float | None = None
    ended: float | None = None
    before = after = 0
    rows: Rows = []
    for rows in steps:
        now, picked = clock(), sum(map(len, rows))
        if began is None and (wanted == 1 or all(rows)):
            began, before = now, picked
        if ended is None and any(len(row) >= whole for row in rows):
            ended, after = now, picked
    if began is None or ended is None or min(map(len, rows)) < whole:
        raise SystemExit(f"the side stopped early: a row has {min(map(len, rows), default=0)} of {whole} tokens")
    if wanted > 1 and after - before < wanted // 2 * len(rows):
        raise SystemExit(
            f"rows decoded together for {(after - before) / len(rows):.0f} tokens only: take more --tokens"
        )
    return Taken(ended - began, after - before, rows)


def _say(values: dict[str, object]) -> None:
    print(f"\n{MARK}{json.dumps(values)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
