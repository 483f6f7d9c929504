"""The real tree keeps the architecture rules, and each rule can fail: one violation of each kind is planted and found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import architecture_rules as rules
from architecture_rules import RULES, Tree, matches
from architecture_tables import TORCH_FREE

Rule = Callable[[Tree], Iterator[str]]

# A small tree without a violation: packages, and one module in several layers.
CLEAN = {
    "app/__init__.py": '"""Package."""\n',
    "app/errors.py": "class Overloaded(Exception): ...\n",
    "app/engine/__init__.py": '"""Engine."""\n',
    "app/engine/worker.py": "from app.errors import Overloaded\ntry:\n    pass\nexcept Exception:\n    pass\n",
    "armature_bench/__init__.py": '"""Client."""\n',
    "armature_bench/stats.py": "import statistics\n",
    "armature_bench/engine/__init__.py": '"""Inside."""\n',
    "armature_bench/engine/decoder.py": "from armature_bench import stats\nfrom app.engine import worker\n",
    "app/cli/__init__.py": '"""Commands."""\n',
    "app/cli/main.py": "from armature_bench import stats\nfrom armature_bench.engine import decoder\n",
    "armature_kernels/__init__.py": '"""Kernels."""\n',
    "armature_kernels/norms.py": "import statistics\n",
    "tests/test_nothing.py": "",
    "tools/nothing.py": "",
}

# rule, file, its source, part of the expected sentence
VIOLATIONS: list[tuple[Rule, str, str, str]] = [
    (
        rules.imports_point_down,
        "app/errors.py",
        "from app.engine.worker import X\n",
        "errors may not import engine.worker",
    ),
    (rules.imports_point_down, "app/errors.py", "import app.engine.worker\n", "errors may not import engine.worker"),
    (rules.imports_point_down, "app/engine/worker.py", "from ..cli import main\n", "may not import cli.main"),
    (rules.imports_point_down, "app/engine/worker.py", "def f():\n    from app.cli import main\n", "worker.py:2"),
    (rules.imports_point_down, "armature_bench/stats.py", "from app import errors\n", "armature_bench.stats"),
    (
        rules.imports_point_down,
        "armature_bench/stats.py",
        "from armature_bench.engine import decoder\n",
        "armature_bench.stats",
    ),
    (
        rules.imports_point_down,
        "armature_bench/engine/decoder.py",
        "from app.cli import main\n",
        "may not import cli.main",
    ),
    (
        rules.imports_point_down,
        "app/engine/worker.py",
        "from armature_bench import stats\n",
        "may not import armature_bench.stats",
    ),
    (
        rules.imports_point_down,
        "armature_kernels/norms.py",
        "from app import errors\n",
        "armature_kernels.norms may not import",
    ),
    (rules.imports_point_down, "app/novelty.py", "", "has no layer"),
    (rules.no_import_cycles, "app/engine/slots.py", "from app.engine import slots, ring\n", "cycle"),
    (
        rules.no_import_cycles,
        "armature_bench/stats.py",
        "from app.cli import main\n",
        "cycle: armature_bench > cli > armature_bench",
    ),
    (
        rules.packages_only_describe,
        "app/engine/__init__.py",
        '"""Engine."""\nfrom app.engine.worker import X\n',
        "nothing else",
    ),
    (rules.packages_only_describe, "app/engine/__init__.py", "", "must hold a docstring"),
    (rules.libraries_stay_in_their_folders, "app/cli/main.py", "from fastapi import FastAPI\n", "imports fastapi"),
    (rules.libraries_stay_in_their_folders, "app/cli/main.py", "import starlette.routing\n", "imports starlette"),
    (rules.libraries_stay_in_their_folders, "app/errors.py", "import prometheus_client\n", "imports prometheus_client"),
    (rules.libraries_stay_in_their_folders, "app/engine/worker.py", "import torchao\n", "imports torchao"),
    (
        rules.libraries_stay_in_their_folders,
        "app/engine/worker.py",
        "def f():\n    import transformers\n",
        "imports transformers",
    ),
    (rules.libraries_stay_in_their_folders, "app/errors.py", "import httpx\n", "imports httpx"),
    (
        rules.devices_stay_in_their_folders,
        "app/engine/worker.py",
        "import torch\ntorch.cuda.is_available()\n",
        "worker.py:2",
    ),
    (rules.devices_stay_in_their_folders, "app/engine/worker.py", "from torch import mps\n", "torch.mps"),
    (rules.devices_stay_in_their_folders, "app/engine/worker.py", "from torch.backends import cpu\n", "torch.backends"),
    (
        rules.devices_stay_in_their_folders,
        "app/cli/main.py",
        "import platform\nplatform.machine()\n",
        "platform.machine",
    ),
    (rules.blind_excepts_are_listed, "app/cli/main.py", "try:\n    pass\nexcept Exception:\n    pass\n", "main.py:3"),
    (
        rules.blind_excepts_are_listed,
        "app/cli/main.py",
        "try:\n    pass\nexcept (OSError, BaseException):\n    pass\n",
        "main.py:3",
    ),
    (rules.blind_excepts_are_listed, "app/cli/main.py", "try:\n    pass\nexcept:\n    pass\n", "main.py:3"),
    (
        rules.blind_excepts_are_listed,
        "app/cli/main.py",
        "with contextlib.suppress(Exception):\n    pass\n",
        "suppresses",
    ),
    (rules.blind_excepts_are_listed, "app/api/x.py", "try:\n    pass\nexcept Exception:\n    pass\n" * 3, "4 places"),
    (rules.class_names_are_unique, "app/engine/other.py", "class Overloaded: ...\n", "share the class name Overloaded"),
    (rules.files_are_short, "app/engine/worker.py", "x = 1\n" * 801, "801 lines"),
    (rules.files_are_short, "tests/test_nothing.py", "x = 1\n" * 801, "801 lines"),
    (rules.files_are_short, "tools/nothing.py", "x = 1\n" * 801, "801 lines"),
]
# Files that a violation needs around it.
AROUND: dict[Rule, dict[str, str]] = {
    rules.no_import_cycles: {"app/engine/ring.py": "from app.engine.slots import X\n"},
}


def plant(root: Path, sources: dict[str, str]) -> Tree:
    for name, text in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(root)


@pytest.fixture(scope="session")
def tree() -> Tree:
    """The real tree, parsed once."""
    return Tree(Path(__file__).resolve().parent.parent)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_rules(rule: Rule, tree: Tree) -> None:
    assert list(rule(tree)) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_a_clean_tree_has_no_violation(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(plant(tmp_path, CLEAN))) == []


@pytest.mark.parametrize("rule, path, source, expected", VIOLATIONS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_violation_is_found(rule: Rule, path: str, source: str, expected: str, tmp_path: Path) -> None:
    found = list(rule(plant(tmp_path, CLEAN | AROUND.get(rule, {}) | {path: source})))
    assert any(expected in sentence for sentence in found), found


def test_every_rule_has_a_planted_violation() -> None:
    assert {rule for rule, *_ in VIOLATIONS} == set(RULES)


def importers_of_torch(tree: Tree) -> list[str]:
    """Return the modules that should not import torch and do. One interpreter imports them one after the other."""
    names = [f"app.{module.name}" for module in tree.code() if matches(module.name, TORCH_FREE)]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script, *names], cwd=tree.root, capture_output=True, text=True, check=False
    )
    return [] if result.returncode == 0 else [result.stderr.strip()]


def test_modules_that_decide_and_translate_do_not_import_torch(tree: Tree) -> None:
    assert importers_of_torch(tree) == []


@pytest.mark.parametrize("source", ["import torch\n", "from app.weights import load\n"])
def test_a_planted_import_of_torch_is_found(source: str, tmp_path: Path) -> None:
    # A stub of torch keeps this fast: the test asks only whether a module of that name was loaded.
    packages = {
        "app/weights/__init__.py": "",
        "app/weights/load.py": "import torch\n",
        "app/engine/scheduler/__init__.py": "",
        "torch.py": "",
    }
    tree = plant(tmp_path, CLEAN | packages | {"app/engine/scheduler/slots.py": source, "app/cli/main.py": ""})
    assert importers_of_torch(tree) == ["app.engine.scheduler.slots imports torch"]
