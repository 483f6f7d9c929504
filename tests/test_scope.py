"""docs/scope.md: its counts are right, what it names exists, what is not offered is not there."""

from __future__ import annotations

import re
import shlex
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from app.api.application import create_app
from app.api.routing import ApiRuntime
from app.cli.parser import parse_arguments
from app.errors import SettingsInvalid, UnknownArgument
from app.settings import given_settings, load_settings
from armature_bench.flags import BENCHES, cost_flags
from armature_kernels.linear.torchao_config import KLEIDI_INT4
from tests.api.scripted_service import Lifetime

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs" / "scope.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| (?P<name>.+) \| (?P<state>built|no) \| (?P<answer>.+) \|$", re.MULTILINE)
ROWS = [match.groupdict() for part in PAGE.split("\n## ")[1:] for match in ROW.finditer(part)]
SPANS = sorted({span for row in ROWS for span in re.findall(r"`([^`]+)`", row["answer"])})
NOT_OFFERED = sorted({span for row in ROWS if row["state"] == "no" for span in re.findall(r"`([^`]+)`", row["name"])})
OTHER_PROGRAMS = {"docker buildx bake": "docker-bake.hcl", "kubectl kustomize": "k8s", "file build/": "Makefile"}
BASES = ("", "armature_kernels/csrc", ".github/workflows")  # where a named file may be


def test_the_counts_are_those_of_the_rows() -> None:
    legend = dict(re.findall(r"^\| (built|no) \| .+ \| (\d+) \|$", PAGE.split("\n## ")[0], re.MULTILINE))
    assert Counter({state: int(number) for state, number in legend.items()}) == Counter(row["state"] for row in ROWS)


def test_every_line_of_the_tables_is_a_row() -> None:
    tables = [line for part in PAGE.split("\n## ")[1:] for line in part.splitlines() if line.startswith("|")]
    heads = 2 * (PAGE.count("\n## "))
    assert len(tables) - heads == len(ROWS)
    assert len({row["name"] for row in ROWS}) == len(ROWS), "no point is named twice"


@pytest.mark.parametrize("span", [span for span in SPANS if "armature " in span])
def test_its_commands_are_read_by_the_command_line(span: str) -> None:
    words = shlex.split(re.sub(r"^taskset -c \S+ ", "", span))
    assert words[0] == "armature"
    arguments = parse_arguments(words[1:])
    load_settings(**given_settings(arguments))


@pytest.mark.parametrize("span", [span for span in SPANS if "armature " not in span])
def test_what_it_names_exists(span: str) -> None:
    assert exists(span), f"docs/scope.md names `{span}`"


@pytest.mark.parametrize("span", NOT_OFFERED)
def test_what_is_not_offered_is_not_there(span: str) -> None:
    assert span not in source()


def test_a_name_that_does_not_exist_is_found() -> None:
    for span in (
        "--no-such-flag 1",
        "--precision int3",
        "GET /none",
        "armature_no_such",
        "NO_SUCH",
        "make none",
        "none.py",
    ):
        assert not exists(span), span


def exists(span: str) -> bool:
    """Whether a flag, route, metric, variable, target, module, file or name in the code is there."""
    if span.startswith("--"):
        return _is_flag(shlex.split(span))
    if re.match(r"(GET|POST) /", span):
        method, path = span.split()
        return method.lower() in routes().get(path, {})
    if span.startswith("make "):
        return f"\n{span.removeprefix('make ')}:" in (ROOT / "Makefile").read_text(encoding="utf-8")
    if span.startswith("python -m "):
        return (ROOT / f"{span.removeprefix('python -m ').replace('.', '/')}.py").exists()
    if (other := next((name for name in OTHER_PROGRAMS if span.startswith(name)), None)) is not None:
        return (ROOT / OTHER_PROGRAMS[other]).exists() and _path_of(span)
    if re.fullmatch(r"[\w./-]+(/[\w.-]+|\.(c|h|py|hcl|yml|cmake))", span):
        return any((ROOT / base / span).exists() for base in BASES)
    if span.startswith("armature_"):
        return f'"{span}"' in source() or f'"{span.removeprefix("armature_")}"' in source()
    level = ROOT / "armature_kernels/csrc/levels" / f"{span}.c"
    return level.exists() or span in " ".join(KLEIDI_INT4.values()) or span.split("=")[0] in source()


def _is_flag(words: list[str]) -> bool:
    if len(words) == 1 and words[0] in {flag for bench in BENCHES.values() for flag in bench.flags} | set(cost_flags()):
        return True
    try:
        given = given_settings(parse_arguments(["serve", *words, *(["any"] if len(words) == 1 else [])]))
        if len(words) > 1:
            load_settings(**given)
    except (UnknownArgument, SettingsInvalid):
        return False
    return True


def _path_of(span: str) -> bool:
    """Whether the path that is given to kubectl is there; other programs are given none that is kept."""
    last = span.split()[-1]
    return (ROOT / last / "kustomization.yaml").exists() if span.startswith("kubectl") else True


@cache
def source() -> str:
    """Return all Python of the package."""
    return "\n".join(file.read_text(encoding="utf-8") for file in sorted((ROOT / "app").rglob("*.py")))


@cache
def routes() -> dict[str, Any]:
    """Return the paths of the application, with their methods."""
    nothing: Any = None
    paths: dict[str, Any] = create_app(ApiRuntime(nothing, nothing, Lifetime(), dict, created=1)).openapi()["paths"]
    return paths
