"""`ARMATURE_ISA` and the commands: the plan has the level that it names, or the command says in a sentence why not."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys

import pytest

from armature_kernels.native.library import native_library
from native_levels import levels

LEVELS = levels()
FOREIGN = "i8mm" if platform.machine() in ("x86_64", "AMD64") else "avx2"
pytestmark = pytest.mark.skipif(not LEVELS, reason=native_library().reason)


def run(level: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"ARMATURE_ISA": level}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False, env=env)


@pytest.mark.parametrize("level", LEVELS)
def test_the_plan_says_that_a_level_was_asked_for(level: str) -> None:
    result = run(level, "-m", "app", "probe", "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["plan"]["kernels"] == {"value": level, "reason": "ARMATURE_ISA asks for it."}


@pytest.mark.cases(ci=2)
@pytest.mark.full
@pytest.mark.parametrize("level", [FOREIGN, "no-such-level"])
@pytest.mark.parametrize("command", [["probe"], ["serve", "--port", "0"]], ids=lambda command: str(command[0]))
def test_a_level_that_cannot_run_is_refused_in_a_sentence(level: str, command: list[str]) -> None:
    result = run(level, "-m", "app", *command)
    assert result.returncode == 2
    assert f"armature: ARMATURE_ISA is {level}, which this library or this processor does not have." in result.stderr
    assert ", ".join(LEVELS) in result.stderr, "what it may be instead"
    assert "Traceback" not in result.stderr
