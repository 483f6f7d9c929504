"""The law of the layers as code that reads code: each rule takes a source tree and yields a sentence for every fault it finds.

`test_architecture.py` holds the real tree against it, and plants a fault of each kind to see that it is found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from house_tables import (
    BANNED_NAMES,
    BESIDE,
    CATCH_ALL_PLACES,
    DEVICE_PLACES,
    DEVICE_WORDS,
    ISLAND,
    LAYERS,
    LIBRARIES,
    MAX_CATCH_ALLS,
)

MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60


@dataclass(frozen=True)
class Module:
    """One source file: `name` is dotted and relative to app/, as `engine.worker`; `path` is relative to the root."""

    name: str
    path: Path
    text: str

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    def layer(self) -> float | None:
        return next((layer for pattern, layer in LAYERS if fnmatch(self.name, pattern)), None)

    def imports(self) -> Iterator[tuple[int, str]]:
        """Line and dotted name of all that is imported, `from a import b` as `a.b`."""
        for node in ast.walk(self.syntax):
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = ["app", *self.name.split(".")[: -node.level]] if node.level else []
                source = ".".join([*package, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


@dataclass(frozen=True)
class Tree:
    """A checkout's Python files."""

    root: Path

    @cached_property
    def app(self) -> dict[str, Module]:
        """Modules of app/ by name; packages' own files are under `<package>.__init__`."""
        modules = (self._module(path) for path in sorted((self.root / "app").rglob("*.py")))
        return {module.name: module for module in modules}

    @cached_property
    def files(self) -> list[Path]:
        return sorted(path for top in ("app", "tests", "tools") for path in (self.root / top).rglob("*.py"))

    def _module(self, path: Path) -> Module:
        name = ".".join(path.relative_to(self.root / "app").with_suffix("").parts)
        return Module(name, path.relative_to(self.root), path.read_text(encoding="utf-8"))

    def code(self) -> Iterator[Module]:
        """Every module but the packages' own files."""
        return (module for module in self.app.values() if not module.name.endswith("__init__"))

    def ours(self, module: Module) -> Iterator[tuple[int, Module]]:
        """Line and module of all imports of our own."""
        for line, name in module.imports():
            if name == "app" or name.startswith("app."):
                inner = name.removeprefix("app.")
                target = self.app.get(inner) or self.app.get(inner.rpartition(".")[0])
                if target is not None:
                    yield line, target


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def imports_point_down(tree: Tree) -> Iterator[str]:
    for module in tree.code():
        layer = module.layer()
        if layer is None:
            yield f"{module.path}: stands in no layer; give it one in tests/house.py and in docs/design.md"
            continue
        for line, target in tree.ours(module):
            below = target.layer()
            if below is not None and not _may_import(layer, below):
                yield f"{module.at(line)}: {module.name} (layer {layer:g}) imports {target.name} (layer {below:g})"


def _may_import(layer: float, below: float) -> bool:
    if layer == ISLAND or below == ISLAND:
        return layer == below or layer in (BESIDE, 7.2)  # the command line starts benches, and inside shares their arithmetic
    if below == BESIDE:
        return layer in (BESIDE, 7.2)
    return below <= layer


def no_circles(tree: Tree) -> Iterator[str]:
    edges = {module.name: {target.name for _, target in tree.ours(module)} - {module.name} for module in tree.code()}
    done: set[str] = set()

    def walk(name: str, road: tuple[str, ...]) -> Iterator[str]:
        if name in road:
            yield "imports in a circle: " + " > ".join((*road[road.index(name) :], name))
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                yield from walk(target, (*road, name))
            done.add(name)

    for name in sorted(edges):
        yield from walk(name, ())


def packages_are_empty(tree: Tree) -> Iterator[str]:
    for module in tree.app.values():
        if module.name.endswith("__init__") and module.text.strip():
            yield f"{module.path}: is not empty"


def libraries_stay_in_their_places(tree: Tree) -> Iterator[str]:
    for module in tree.code():
        for line, name in module.imports():
            library = name.partition(".")[0]
            if library in LIBRARIES and not matches(module.name, LIBRARIES[library]):
                yield f"{module.at(line)}: imports {library}, which only {', '.join(LIBRARIES[library]) or 'tests'} may"


def device_words_stay_in_their_places(tree: Tree) -> Iterator[str]:
    for module in tree.code():
        if matches(module.name, DEVICE_PLACES):
            continue
        attributes = ((node.lineno, ast.unparse(node)) for node in ast.walk(module.syntax) if isinstance(node, ast.Attribute))
        for line, name in (*module.imports(), *attributes):
            for word in DEVICE_WORDS:
                if name == word or name.startswith(f"{word}."):
                    yield f"{module.at(line)}: says {word}, which only {', '.join(DEVICE_PLACES)} may"


def blind_catches_are_named(tree: Tree) -> Iterator[str]:
    caught: list[str] = []
    for module in tree.code():
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ExceptHandler) and _catches_all(node.type):
                caught.append(module.at(node.lineno))
                if not matches(module.name, CATCH_ALL_PLACES):
                    yield f"{module.at(node.lineno)}: catches everything, which only {', '.join(CATCH_ALL_PLACES)} may"
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("suppress") and any(map(_catches_all, node.args)):
                yield f"{module.at(node.lineno)}: suppresses everything"
    if len(caught) > MAX_CATCH_ALLS:
        yield f"everything is caught in {len(caught)} places, {MAX_CATCH_ALLS} are allowed: {', '.join(caught)}"


def _catches_all(caught: ast.expr | None) -> bool:
    elements = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(item is None or ast.unparse(item) in ("Exception", "BaseException") for item in elements)


def names_say_something(tree: Tree) -> Iterator[str]:
    for module in tree.code():
        if any(_banned(part) for part in module.name.split(".")):
            yield f"{module.path}: its name says nothing"
        if module.name.rpartition(".")[2] in sys.stdlib_module_names:
            yield f"{module.path}: shares its name with the standard library"
        for node in ast.walk(module.syntax):
            if isinstance(node, ast.ClassDef) and _banned(node.name):
                yield f"{module.at(node.lineno)}: the name of {node.name} says nothing"


def _banned(name: str) -> bool:
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return any(word.lower() in BANNED_NAMES or word.lower().removesuffix("s") in BANNED_NAMES for word in words)


def files_are_short(tree: Tree) -> Iterator[str]:
    for path in tree.files:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{path.relative_to(tree.root)}: has {lines} lines, {MAX_FILE_LINES} are allowed"


def functions_are_short(tree: Tree) -> Iterator[str]:
    for path in tree.files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > MAX_FUNCTION_LINES:
                    yield f"{path.relative_to(tree.root)}:{node.lineno}: {node.name} has {lines} lines, {MAX_FUNCTION_LINES} are allowed"


RULES = (
    imports_point_down,
    no_circles,
    packages_are_empty,
    libraries_stay_in_their_places,
    device_words_stay_in_their_places,
    blind_catches_are_named,
    names_say_something,
    files_are_short,
    functions_are_short,
)
