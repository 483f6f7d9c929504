"""Architecture rules as code: each rule takes a source tree and yields one sentence for each violation.

`test_architecture.py` checks the real tree against them, and plants one violation of each kind to see that the rule finds it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path

from architecture_tables import (
    CATCH_ALL_MODULES,
    CLIENT,
    CLIENT_IMPORTERS,
    CLIENT_LAYERS,
    DEVICE_FOLDERS,
    DEVICE_NAMES,
    LAYERS,
    LIBRARIES,
    MAX_CATCH_ALLS,
    MAX_FILE_LINES,
    PACKAGES,
)


@dataclass(frozen=True)
class Module:
    """One source file: `path` is relative to the root, `name` dotted; app/engine/worker.py is `engine.worker`."""

    name: str
    path: Path
    text: str

    @cached_property
    def syntax(self) -> ast.Module:
        return ast.parse(self.text)

    @property
    def folder(self) -> str:
        """Top folder of app/, a module at its top, or another package."""
        return self.name.partition(".")[0]

    def layer(self) -> int | None:
        return dict(LAYERS).get(self.folder)

    def is_in(self, folder: str) -> bool:
        return self.name == folder or self.name.startswith(f"{folder}.")

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the syntax tree."""
        return list(ast.walk(self.syntax))

    @cached_property
    def imports(self) -> list[tuple[int, str]]:
        """The line and dotted name of everything imported, `from a import b` as `a.b`."""
        return list(self._imports())

    def _imports(self) -> Iterator[tuple[int, str]]:
        for node in self.nodes:
            if isinstance(node, ast.Import):
                yield from ((node.lineno, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                package = [*self.path.parts[: -node.level]] if node.level else []
                source = ".".join([*package, *([node.module] if node.module else [])])
                yield from ((node.lineno, f"{source}.{alias.name}") for alias in node.names)

    def at(self, line: int) -> str:
        return f"{self.path}:{line}"


@dataclass(frozen=True)
class Tree:
    """The Python files of a checkout."""

    root: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Modules of the packages by name; a package's own file has the name `<package>.__init__`."""
        modules = (self._module(path) for top in PACKAGES for path in sorted((self.root / top).rglob("*.py")))
        return {module.name: module for module in modules}

    @cached_property
    def files(self) -> list[Path]:
        return sorted(path for top in (*PACKAGES, "tests", "tools") for path in (self.root / top).rglob("*.py"))

    def _module(self, path: Path) -> Module:
        name = ".".join(path.relative_to(self.root).with_suffix("").parts).removeprefix("app.")
        return Module(name, path.relative_to(self.root), path.read_text(encoding="utf-8"))

    def code(self) -> Iterator[Module]:
        """Yield every module except the packages' own files."""
        return (module for module in self.modules.values() if not module.name.endswith("__init__"))

    def internal_imports(self, module: Module) -> Iterator[tuple[int, Module]]:
        """Yield the line and the module of every import from the packages."""
        for line, name in module.imports:
            if name.partition(".")[0] in PACKAGES:
                inner = name.removeprefix("app.")
                target = self.modules.get(inner) or self.modules.get(inner.rpartition(".")[0])
                if target is not None:
                    yield line, target


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Return True if a dotted name matches one of the patterns."""
    return any(fnmatch(name, pattern) for pattern in patterns)


def imports_point_down(tree: Tree) -> Iterator[str]:
    """Folders import only their own layer and lower ones."""
    for module in tree.code():
        if module.layer() is None and not module.is_in(CLIENT):
            yield f"{module.path}: {module.folder} has no layer; add it to tests/support/architecture_tables.py and docs/design.md"
            continue
        for line, target in tree.internal_imports(module):
            if not _may_import(module, target):
                yield f"{module.at(line)}: {module.name} may not import {target.name}"


def _may_import(module: Module, target: Module) -> bool:
    own, below = _client_layer(module), _client_layer(target) if target.is_in(CLIENT) else target.layer()
    if target.is_in(CLIENT):
        return module.folder in CLIENT_IMPORTERS or (module.is_in(CLIENT) and (own or 0) >= (below or 0))
    if module.is_in(CLIENT):
        return own is not None and below is not None and below <= own
    own = module.layer()
    return below is None or own is None or below <= own


def _client_layer(module: Module) -> int | None:
    """Return the highest layer that a module of the benchmarks may import, if it may import any."""
    return next((layer for name, layer in CLIENT_LAYERS if module.is_in(name)), None)


def no_import_cycles(tree: Tree) -> Iterator[str]:
    """No module imports itself through others; the same holds for the top folders."""
    modules = {
        module.name: {target.name for _, target in tree.internal_imports(module)} - {module.name}
        for module in tree.code()
    }
    folders: dict[str, set[str]] = defaultdict(set)
    for module in tree.code():
        folders[module.folder] |= {target.folder for _, target in tree.internal_imports(module)} - {module.folder}
    yield from _cycles(modules)
    yield from _cycles(folders)


def _cycles(edges: dict[str, set[str]]) -> Iterator[str]:
    done: set[str] = set()

    def walk(name: str, path: tuple[str, ...]) -> Iterator[str]:
        if name in path:
            yield "import cycle: " + " > ".join((*path[path.index(name) :], name))
        elif name not in done:
            for target in sorted(edges.get(name, ())):
                yield from walk(target, (*path, name))
            done.add(name)

    for name in sorted(edges):
        yield from walk(name, ())


def packages_only_describe(tree: Tree) -> Iterator[str]:
    """A package's own file holds one docstring and no code."""
    for module in tree.modules.values():
        if module.name.endswith("__init__") and (
            ast.get_docstring(module.syntax) is None or len(module.syntax.body) > 1
        ):
            yield f"{module.path}: must hold a docstring that describes the folder, and nothing else"


def libraries_stay_in_their_folders(tree: Tree) -> Iterator[str]:
    """Some libraries are imported in a few places only."""
    for module in tree.code():
        for line, name in module.imports:
            library = name.partition(".")[0]
            if library in LIBRARIES and not matches(module.name, LIBRARIES[library]):
                yield f"{module.at(line)}: imports {library}, which only {', '.join(LIBRARIES[library]) or 'tests'} may"


def devices_stay_in_their_folders(tree: Tree) -> Iterator[str]:
    """Only the folders about hardware name a kind of device."""
    for module in tree.code():
        if matches(module.name, DEVICE_FOLDERS):
            continue
        attributes = ((node.lineno, ast.unparse(node)) for node in module.nodes if isinstance(node, ast.Attribute))
        for line, name in (*module.imports, *attributes):
            for word in DEVICE_NAMES:
                if name == word or name.startswith(f"{word}."):
                    yield f"{module.at(line)}: uses {word}, which only {', '.join(DEVICE_FOLDERS)} may"


def blind_excepts_are_listed(tree: Tree) -> Iterator[str]:
    """`except Exception` occurs only in the listed places."""
    caught: list[str] = []
    for module in tree.code():
        for node in module.nodes:
            if isinstance(node, ast.ExceptHandler) and _catches_all(node.type):
                caught.append(module.at(node.lineno))
                if not matches(module.name, CATCH_ALL_MODULES):
                    yield f"{module.at(node.lineno)}: catches everything, which only {', '.join(CATCH_ALL_MODULES)} may"
            elif (
                isinstance(node, ast.Call)
                and ast.unparse(node.func).endswith("suppress")
                and any(map(_catches_all, node.args))
            ):
                yield f"{module.at(node.lineno)}: suppresses everything"
    if len(caught) > MAX_CATCH_ALLS:
        yield f"everything is caught in {len(caught)} places, {MAX_CATCH_ALLS} are allowed: {', '.join(caught)}"


def _catches_all(caught: ast.expr | None) -> bool:
    elements = caught.elts if isinstance(caught, ast.Tuple) else [caught]
    return any(item is None or ast.unparse(item) in ("Exception", "BaseException") for item in elements)


def class_names_are_unique(tree: Tree) -> Iterator[str]:
    """No two classes share a name."""
    places: dict[str, list[str]] = defaultdict(list)
    for module in tree.code():
        for node in module.syntax.body:
            if isinstance(node, ast.ClassDef):
                places[node.name].append(module.at(node.lineno))
    for name, found in places.items():
        if len(found) > 1:
            yield f"{' and '.join(found)}: share the class name {name}"


def files_are_short(tree: Tree) -> Iterator[str]:
    """No file is longer than the limit."""
    for path in tree.files:
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines > MAX_FILE_LINES:
            yield f"{path.relative_to(tree.root)}: has {lines} lines, {MAX_FILE_LINES} are allowed"


RULES = (
    imports_point_down,
    no_import_cycles,
    packages_only_describe,
    libraries_stay_in_their_folders,
    devices_stay_in_their_folders,
    blind_excepts_are_listed,
    class_names_are_unique,
    files_are_short,
)
