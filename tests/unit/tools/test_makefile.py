"""The Makefile: every target is explained, and a machine without a suitable Python gets instructions."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(root: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run make as a person does: the make that runs these tests passes its own variables on."""
    own = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "LEVELS", "TIER", "ARGS", "JOBS"}
    env = {name: value for name, value in os.environ.items() if name not in own}
    return subprocess.run(["make", *arguments], cwd=root, env=env, capture_output=True, text=True, check=False)


def test_make_alone_explains_every_target(root: Path) -> None:
    text = (root / "Makefile").read_text().replace("\\\n", " ")  # a line goes on after a backslash
    phony = next(line for line in text.splitlines() if line.startswith(".PHONY:"))
    explained = re.findall(r"^  make (\S+) ", make(root).stdout, re.MULTILINE)
    assert sorted(explained) == sorted(phony.split()[1:])


def test_without_a_fitting_python_it_says_what_to_install(root: Path, tmp_path: Path) -> None:
    result = make(root, "serve", f"VENV={tmp_path / 'venv'}", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "sudo apt install python3 python3-venv" in result.stdout
    assert not (tmp_path / "venv").exists()


def test_a_model_is_passed_as_one_word(root: Path, tmp_path: Path) -> None:
    for stamp in ("runtime.stamp", "dev.stamp"):
        (tmp_path / stamp).touch()
    result = make(root, "-n", "serve", f"VENV={tmp_path}", "MODEL=some where", "ARGS=--port 9")
    assert f'{tmp_path}/bin/armature serve --model "some where" --port 9' in result.stdout


def test_unit_runs_the_tests_of_one_folder(root: Path, tmp_path: Path) -> None:
    for stamp in ("runtime.stamp", "dev.stamp"):
        (tmp_path / stamp).touch()
    made = make(root, "-n", "unit", f"VENV={tmp_path}", "PATH=tests/unit/engine/sampling").stdout
    assert re.search(r"pytest -n 0 .*tests/unit/engine/sampling -m", made)
    assert re.search(
        r"pytest -n auto .*tests/unit tests/kernels tests/api -m", make(root, "-n", "unit", f"VENV={tmp_path}").stdout
    )


def test_continuous_integration_runs_what_a_person_would(root: Path) -> None:
    lines = [line for line in (root / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert [line.split(" </dev/null")[0] for line in lines[-5:]] == [
        "make checkers",
        "make venv",
        "make real-model",
        "wait",
        """exec make test-all LEVELS=usable TIER='-m "not nightly"'""",
    ]


def test_one_tier_leaves_out_what_the_other_runs_too(root: Path, tmp_path: Path) -> None:
    for stamp in ("runtime.stamp", "dev.stamp"):
        (tmp_path / stamp).touch()
    chosen = {}
    for target in ("test", "test-all"):
        printed = make(root, "-n", target, f"VENV={tmp_path}", "ARGS=").stdout
        (line,) = re.findall(r"^.* -m pytest .*--dist worksteal([^;]*)", printed, re.MULTILINE)
        chosen[target] = line.strip()
        assert "ruff check" in printed and "mypy" in printed
    assert chosen == {"test": '-m "not full"', "test-all": ""}


@pytest.mark.parametrize(
    ("target", "levels"),
    [("serve", "here"), ("test", "here"), ("unit", "here"), ("test-all", "all"), ("parity", "all")],
)
def test_only_the_tests_of_all_levels_compile_all(target: str, levels: str, root: Path, tmp_path: Path) -> None:
    for stamp in ("runtime.stamp", "dev.stamp"):
        (tmp_path / stamp).touch()
    said = make(root, "-n", target, f"VENV={tmp_path}").stdout
    assert re.findall(r" -m tools\.native (.*)$", said, re.MULTILINE) == [levels]
