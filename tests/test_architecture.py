"""The real tree keeps the law of the layers, and each of its rules can fail: a fault of every kind is planted and found."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import house
from house import RULES, Tree, matches
from house_tables import TORCH_FREE

Rule = Callable[[Tree], Iterator[str]]

# A small tree without a fault: packages, and one innocent module in several layers.
INNOCENT = {
    "app/__init__.py": "",
    "app/errors.py": "class Overloaded(Exception): ...\n",
    "app/engine/__init__.py": "",
    "app/engine/worker.py": "from app.errors import Overloaded\ntry:\n    pass\nexcept Exception:\n    pass\n",
    "app/bench/__init__.py": "",
    "app/bench/stats.py": "import statistics\n",
    "app/cli.py": "from app.bench import stats\nfrom app.engine.worker import Overloaded\n",
    "tests/test_nothing.py": "",
    "tools/nothing.py": "",
}

# rule, file, its source, part of the sentence that is expected
FAULTS: list[tuple[Rule, str, str, str]] = [
    (house.imports_point_down, "app/errors.py", "from app.engine.worker import X\n", "errors (layer 0) imports engine.worker"),
    (house.imports_point_down, "app/errors.py", "import app.engine.worker\n", "errors (layer 0) imports engine.worker"),
    (house.imports_point_down, "app/engine/worker.py", "from .. import cli\n", "imports cli"),
    (house.imports_point_down, "app/engine/worker.py", "def f():\n    from app import cli\n", "worker.py:2"),
    (house.imports_point_down, "app/bench/stats.py", "from app import errors\n", "bench.stats"),
    (house.imports_point_down, "app/engine/worker.py", "from app.bench import stats\n", "imports bench.stats"),
    (house.imports_point_down, "app/novelty.py", "", "stands in no layer"),
    (house.no_circles, "app/engine/slots.py", "from app.engine import slots, ring\n", "circle"),
    (house.packages_are_empty, "app/engine/__init__.py", "from app.engine.worker import X\n", "is not empty"),
    (house.libraries_stay_in_their_places, "app/cli.py", "from fastapi import FastAPI\n", "imports fastapi"),
    (house.libraries_stay_in_their_places, "app/cli.py", "import starlette.routing\n", "imports starlette"),
    (house.libraries_stay_in_their_places, "app/service.py", "import prometheus_client\n", "imports prometheus_client"),
    (house.libraries_stay_in_their_places, "app/engine/worker.py", "import torchao\n", "imports torchao"),
    (house.libraries_stay_in_their_places, "app/engine/worker.py", "def f():\n    import transformers\n", "only tests may"),
    (house.libraries_stay_in_their_places, "app/service.py", "import httpx\n", "imports httpx"),
    (house.device_words_stay_in_their_places, "app/engine/worker.py", "import torch\ntorch.cuda.is_available()\n", "worker.py:2"),
    (house.device_words_stay_in_their_places, "app/engine/worker.py", "from torch import mps\n", "torch.mps"),
    (house.device_words_stay_in_their_places, "app/engine/worker.py", "from torch.backends import cpu\n", "torch.backends"),
    (house.device_words_stay_in_their_places, "app/cli.py", "import platform\nplatform.machine()\n", "platform.machine"),
    (house.blind_catches_are_named, "app/cli.py", "try:\n    pass\nexcept Exception:\n    pass\n", "cli.py:3"),
    (house.blind_catches_are_named, "app/cli.py", "try:\n    pass\nexcept (OSError, BaseException):\n    pass\n", "cli.py:3"),
    (house.blind_catches_are_named, "app/cli.py", "try:\n    pass\nexcept:\n    pass\n", "cli.py:3"),
    (house.blind_catches_are_named, "app/cli.py", "with contextlib.suppress(Exception):\n    pass\n", "suppresses"),
    (house.blind_catches_are_named, "app/api/x.py", "try:\n    pass\nexcept Exception:\n    pass\n" * 3, "4 places"),
    (house.names_say_something, "app/engine/slot_manager.py", "", "says nothing"),
    (house.names_say_something, "app/engine/utils.py", "", "says nothing"),
    (house.names_say_something, "app/engine/worker.py", "class RequestHandler: ...\n", "RequestHandler"),
    (house.names_say_something, "app/engine/worker.py", "class DataLoader: ...\n", "DataLoader"),
    (house.names_say_something, "app/engine/queue.py", "", "standard library"),
    (house.files_are_short, "app/engine/worker.py", "x = 1\n" * 301, "301 lines"),
    (house.files_are_short, "tests/test_nothing.py", "x = 1\n" * 301, "301 lines"),
    (house.files_are_short, "tools/nothing.py", "x = 1\n" * 301, "301 lines"),
    (house.functions_are_short, "app/engine/worker.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
]


def plant(root: Path, sources: dict[str, str]) -> Tree:
    for name, text in sources.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(root)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_the_tree_keeps_the_law(rule: Rule, root: Path) -> None:
    assert list(rule(Tree(root))) == []


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_an_innocent_tree_has_no_fault(rule: Rule, tmp_path: Path) -> None:
    assert list(rule(plant(tmp_path, INNOCENT))) == []


@pytest.mark.parametrize("rule, path, source, expected", FAULTS, ids=lambda value: getattr(value, "__name__", None))
def test_a_planted_fault_is_found(rule: Rule, path: str, source: str, expected: str, tmp_path: Path) -> None:
    circle = {"app/engine/ring.py": "from app.engine.slots import X\n"} if rule is house.no_circles else {}
    found = list(rule(plant(tmp_path, INNOCENT | circle | {path: source})))
    assert any(expected in sentence for sentence in found), found


def test_every_rule_has_a_planted_fault() -> None:
    assert {rule for rule, *_ in FAULTS} == set(RULES)


def loaders_of_torch(tree: Tree) -> list[str]:
    """Names of the modules that should do without torch and do not. One interpreter imports them one after the other."""
    names = [module.name for module in tree.code() if matches(module.name, TORCH_FREE)]
    script = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(f'app.{name}')\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'{name} imports torch')\n"
    )
    result = subprocess.run([sys.executable, "-c", script, *names], cwd=tree.root, capture_output=True, text=True, check=False)
    return [] if result.returncode == 0 else [result.stderr.strip()]


def test_what_decides_and_translates_does_without_torch(root: Path) -> None:
    assert loaders_of_torch(Tree(root)) == []


@pytest.mark.parametrize("source", ["import torch\n", "from app.weights import load\n"])
def test_a_planted_import_of_torch_is_found(source: str, tmp_path: Path) -> None:
    # A stand-in for torch keeps this quick: what counts is that a module of that name has been loaded.
    packages = {"app/weights/__init__.py": "", "app/weights/load.py": "import torch\n", "torch.py": ""}
    tree = plant(tmp_path, INNOCENT | packages | {"app/engine/slots.py": source})
    assert loaders_of_torch(tree) == ["engine.slots imports torch"]
