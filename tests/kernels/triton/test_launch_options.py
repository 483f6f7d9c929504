"""What the kernels say about their arguments is about arguments that they have."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import armature_kernels.triton as package

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


def test_a_name_that_is_no_argument_is_found() -> None:
    assert MODULES and strange_names("@f.jit(do_not_specialize=('a', 'b'))\ndef f(b): ...", {}) == ["a"]
