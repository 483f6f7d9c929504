"""Sides take turns: the others are halted meanwhile, only steps in which all rows decode count, and who ends early says why."""

from __future__ import annotations

import os
import stat
import sys
import time
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from tools.measure.engines import Workload
from tools.peers.ours_encoder import largest
from tools.peers.sides import Side, SideSpec, environment
from tools.peers.turns import AHEAD_TOKENS, Rows, Taken, Turn, deal, timed

STUB = """#!{python}
import json, os, sys
print("a library's own words")
ready = {{"pid": os.getpid(), "arguments": sys.argv[1:], "level": os.environ.get("LEVEL")}}
print("TURN " + json.dumps(ready), flush=True)
for line in sys.stdin:
    turn = json.loads(line)
    if turn["seed"] == 13:
        sys.exit("thirteen is refused")
    print("TURN " + json.dumps({{"seconds": 0.5, "tokens": turn["rows"], "ids": [[1]] * turn["rows"]}}), flush=True)
"""


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    """An interpreter that answers as a side does, whatever it is told to run."""
    python = tmp_path / "python"
    python.write_text(STUB.format(python=sys.executable))
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    side = Side(SideSpec.parse(f"ours/stub={python}:{tmp_path},precision=int4,LEVEL=avx2"), threads=3)
    yield side
    side.end()


def halted(pid: int) -> bool:
    """Whether it comes to a halt: the signal has been sent, and takes its time."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        found, status = os.waitpid(pid, os.WUNTRACED | os.WNOHANG)
        if found:
            return os.WIFSTOPPED(status)
    return False


def test_a_side_is_halted_but_in_its_turn(side: Side, tmp_path: Path) -> None:
    ready = side.wait_until_ready()
    assert ready["arguments"][:3] == ["-m", "tools.peers.turns", "ours"]
    assert ready["arguments"][3:] == [str(tmp_path), "--threads", "3", "--option", "precision=int4"]
    assert ready["level"] == "avx2"
    assert halted(ready["pid"])
    assert side.take(Turn(2, 128, 1, seed=1)) == Taken(0.5, 2, [[1], [1]])
    assert halted(ready["pid"])


def test_a_side_that_ends_says_why(side: Side) -> None:
    side.wait_until_ready()
    with pytest.raises(SystemExit, match=r"ours/stub ended:\nthirteen is refused"):
        side.take(Turn(1, 128, 1, seed=13))


def test_only_steps_in_which_all_rows_decode_count() -> None:
    clock = map(float, count())
    # Two rows of 4 tokens: the second comes two steps later, and the last step is the second's alone.
    counts = [(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (4, 4)]
    taken = timed([[[7] * a, [8] * b] for a, b in counts], wanted=2, whole=4, clock=lambda: next(clock))
    assert (taken.seconds, taken.tokens) == (1.0, 2)  # from (3, 1) to (4, 2)
    assert taken.ids == [[7] * 4, [8] * 4]


def test_a_prefill_lasts_until_its_first_token() -> None:
    clock = map(float, count())
    taken = timed([[[]], [[]], [[5]], [[5]]], wanted=1, whole=1, clock=lambda: next(clock))
    assert (taken.seconds, taken.tokens, taken.ids) == (2.0, 1, [[5]])


@pytest.mark.parametrize(
    ("steps", "sentence"),
    [
        ([[[]], [[1]], [[1] * 5]], "stopped early"),
        ([], "stopped early"),
        ([[[], []], [[1] * 10, []], [[1] * 10, [1] * 10]], "tokens only"),
    ],
)
def test_what_would_be_measured_wrongly_is_refused(steps: list[Rows], sentence: str) -> None:
    with pytest.raises(SystemExit, match=sentence):
        timed(steps, wanted=4, whole=10)


def test_prompts_repeat_nothing() -> None:
    first, second = deal(Turn(3, 512, 1, seed=1)), deal(Turn(3, 512, 1, seed=2))
    assert all(len(set(prompt)) == 512 for prompt in first + second)
    assert len({tuple(prompt) for prompt in first + second}) == 6
    assert deal(Turn(3, 512, 1, seed=1)) == first


def test_a_workload_is_a_rate() -> None:
    assert Workload("prefill", 64).rate(Taken(2.0, 1, [])) == 256.0
    assert Workload("8", 64).rate(Taken(2.0, 480, [])) == 240.0
    assert Workload("8", 64).turn(seed=5) == Turn(8, 128, 64, 5)
    assert AHEAD_TOKENS > 32 * 128 // 512  # 32 prompts of 128 tokens come in chunks of 512 beside those that decode


@pytest.mark.parametrize("text", ["ours=python", "ours:python=model", "theirs=python:model", "ours=python:model,int4"])
def test_a_side_that_is_not_understood_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not|must be"):
        SideSpec.parse(text)


def test_thread_pools_are_each_sides_own() -> None:
    ours = {"OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PATH": "/bin", "ARMATURE_ISA": "avx2"}
    kept = environment(ours, {"OMP_PROC_BIND": "true"})
    assert kept == {"PATH": "/bin", "ARMATURE_ISA": "avx2", "HF_HUB_OFFLINE": "1", "OMP_PROC_BIND": "true"}


def test_texts_of_an_encoder_are_one_turn_without_decoding() -> None:
    workload = Workload("8x128", tokens=64)
    assert workload.turn(seed=3) == Turn(8, 128, 1, seed=3)
    assert workload.rate(Taken(0.5, 8, [])) == 16.0
    assert str(workload) == "8 texts of 128"


def test_sides_of_encoders_are_held_against_each_other_by_their_largest_value() -> None:
    vectors = array("f", [0.1, 0.7, -0.9, 0.5, 0.2, 0.3])
    assert largest(vectors.tobytes(), 2) == [[1], [0]]
