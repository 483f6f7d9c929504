"""What the kernels say about their arguments is about arguments that they have."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")

import armature_kernels.triton as package
from armature_kernels.triton import launch

FOLDER = Path(package.__path__[0])
MODULES = sorted(path.stem for path in FOLDER.glob("*.py") if "triton.jit(" in path.read_text(encoding="utf-8"))


def strange_names(source: str, namespace: dict[str, object]) -> list[str]:
    """Return names in options of `triton.jit` that are no parameters: Triton ignores them, and compiles while serving."""
    found = []
    for function in ast.walk(ast.parse(source)):
        for call in getattr(function, "decorator_list", ()):
            for option in call.keywords if isinstance(call, ast.Call) else ():
                names = eval(compile(ast.Expression(option.value), "option", "eval"), namespace)
                parameters = {one.arg for one in function.args.args}  # type: ignore[attr-defined]
                found += [name for name in names if name not in parameters]
    return found


@pytest.mark.parametrize("module", MODULES)
def test_every_argument_that_an_option_names_exists(module: str) -> None:
    namespace = vars(importlib.import_module(f"armature_kernels.triton.{module}"))
    assert strange_names((FOLDER / f"{module}.py").read_text(encoding="utf-8"), namespace) == []


def kernels_that_read_first(source: str) -> list[str]:
    """Return kernels of dependent launches that may read or write before they wait for the kernels before them.

    Only `_load_words` may be called before: the words of weights are constants.
    """
    found = []
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef) and "DEPENDENT" in {one.arg for one in function.args.args}:
            statements = [ast.unparse(one) for one in function.body[1 if ast.get_docstring(function) else 0 :]]
            waits = (
                statements.index("wait_for_inputs(DEPENDENT)") if "wait_for_inputs(DEPENDENT)" in statements else None
            )
            before = " ".join(statements[:waits]).replace("_load_words(", "")
            if function.name != "wait_for_inputs" and (waits is None or re.search(r"\b_?(load|store|atomic)", before)):
                found.append(function.name)
    return found


def test_every_dependent_kernel_waits_first() -> None:
    sources = [path.read_text(encoding="utf-8") for path in FOLDER.glob("*.py")]
    assert any("DEPENDENT" in source for source in sources)
    assert [name for source in sources for name in kernels_that_read_first(source)] == []
    late = "@jit\ndef f(x, DEPENDENT):\n    'Doc.'\n    y = load(x)\n    wait_for_inputs(DEPENDENT)"
    assert kernels_that_read_first(late) == ["f"]


def test_a_name_that_is_no_argument_is_found() -> None:
    assert MODULES and strange_names("@f.jit(do_not_specialize=('a', 'b'))\ndef f(b): ...", {}) == ["a"]


@pytest.mark.parametrize(
    ("arch", "driver", "expected"), [(90, 12_030, True), (100, 13_000, True), (89, 13_000, False), (90, 12_020, False)]
)
def test_launches_depend_where_graphs_capture_them(
    arch: int, driver: int, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    active = SimpleNamespace(get_current_target=lambda: SimpleNamespace(arch=arch))
    monkeypatch.setattr(launch.triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(launch.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(torch._C, "_cuda_getDriverVersion", lambda: driver, raising=False)
    found = launch.launch_options.__wrapped__()
    assert found == {"DEPENDENT": expected, "launch_pdl": expected}
