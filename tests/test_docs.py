"""The documentation follows its own rules and agrees with the tree: widths, links, paths, layers, folders and the glossary."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from architecture_tables import LAYERS, PACKAGES

WIDTH = 120
ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    [
        path
        for folder in ("", "docs/", "k8s/", "app/demo/*/", "tests/attack/", "tools/*/")
        for path in ROOT.glob(f"{folder}*.md")
    ],
    key=str,
)
# Written by a command: recorded output may be wider.
GENERATED = {"docs/auto.md", "docs/families.md", "docs/proofs.md", "docs/settings.md"}
# Where a path in the documentation may start.
BASES = ("", "app", "armature_bench", "armature_kernels", "app/backends", "app/engine/decoder", "docs", "k8s")


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def prose(path: Path) -> list[tuple[int, str]]:
    """Return the numbered lines outside code blocks."""
    lines, inside = [], False
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            inside = not inside
        elif not inside:
            lines.append((number, line))
    return lines


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, made as GitHub makes them."""
    headings = (line.lstrip("#").strip() for _, line in prose(path) if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", [page for page in PAGES if name(page) not in GENERATED], ids=name)
def test_lines_are_short(path: Path) -> None:
    """Rows of tables, pictures and links without a space cannot be wrapped."""
    long = [
        number
        for number, line in prose(path)
        if len(line) > WIDTH and not line.startswith(("|", "![")) and "](http" not in line
    ]
    assert not long, f"{name(path)}: lines {long} have more than {WIDTH} columns"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_links_lead_to_a_file_and_a_heading(path: Path) -> None:
    for _, line in prose(path):
        for target, anchor in re.findall(r"\]\(([^)#:\s]*)#([^)\s]+)\)", line):
            page = path.parent / target if target else path
            assert page.exists(), f"{name(path)}: {target} is missing"
            assert anchor in anchors(page), f"{name(path)}: {target}#{anchor} is no heading"


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_named_source_files_exist(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for file in set(re.findall(r"(?<![\w/.$<*-])((?:[\w.-]+/)*[\w-]+\.(?:py|h|c|yaml|toml))(?![\w*])", text)):
        if "/" in file and not file.startswith(("fleet/", "etc/")):
            found = [base for base in BASES if (ROOT / base / file).exists() or (ROOT / base / "csrc" / file).exists()]
            assert found, f"{name(path)} names {file}, which does not exist"


# `armature` on PyPI is another project. A name that goes on is ours: armature-serve, armature_serve-0.1.0.whl.
FOREIGN = re.compile(
    r"\barmature\[|(?:pip3? install|pipx (?:run|install)|uvx|uv (?:add|pip install))\b[^\n`]*[ '\"]armature(?![\w./\[-])"
)


@pytest.mark.parametrize(
    ("text", "foreign"),
    [
        ("pip install 'armature[otel]'", True),
        ("pip install armature && armature serve", True),
        ("pip install -q --pre armature", True),
        ("uvx armature serve", True),
        ("armature[bench]", True),
        ("pip install 'armature-serve[otel]'", False),
        ("pip install armature-serve", False),
        ("pip install ./armature_serve-0.1.0-py3-none-any.whl", False),
        ("uvx --from armature-serve armature-serve serve", False),
        ("pip install /opt/armature/x", False),
        ("armature serve", False),
    ],
)
def test_an_installation_of_the_foreign_package_is_recognised(text: str, foreign: bool) -> None:
    assert any(FOREIGN.search(part) for part in re.split("&&|;|#", text)) == foreign


def test_nothing_says_to_install_the_foreign_package() -> None:
    suffixes = {".py", ".md", ".sh", ".toml", ".yml", ".yaml", ".js", ".html", ".txt", ".service", ""}
    folders = [
        ROOT / each
        for each in (*PACKAGES, "armature", "charts", "docker", "docs", "examples", "k8s", "tools", ".github")
    ]
    files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
    files += [path for path in ROOT.iterdir() if path.is_file()]
    read = [path for path in files if path.suffix in suffixes and path.name != "CHANGELOG.md"]
    assert len(read) > 500
    found = [
        f"{name(path)}: {line.strip()[:100]}"
        for path in read
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines()
        # the shell's `&&` ends what pip installs
        if any(FOREIGN.search(part) for part in re.split("&&|;|#", line))
    ]
    assert found == []


def design() -> str:
    return (ROOT / "docs" / "design.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return design().split(f"\n## {title}\n", 1)[1].split("\n## ", 1)[0]


def test_the_layers_are_those_that_are_checked() -> None:
    rows = re.findall(r"^\| (-?\d+) \| (.+) \|$", section("Layers"), re.MULTILINE)
    written = {(folder, int(number)) for number, cell in rows for folder in re.findall(r"`(\w+)`", cell)}
    assert written == set(LAYERS)


def test_the_folders_are_those_of_the_package() -> None:
    table = section("Folders")
    written = set()
    for cell in re.findall(rf"^\| (`(?:{'|'.join(PACKAGES)})/.+?) \| ", table, re.MULTILINE):
        names = [each.strip("/") for each in re.findall(r"`([\w/]+)`", cell)]
        parent = names[0].rpartition("/")[0]
        written |= {each if each.startswith(PACKAGES) else f"{parent}/{each}" for each in names}
    folders = {name(file.parent) for package in PACKAGES for file in (ROOT / package).rglob("*.py")}
    assert folders - written == set()
    assert {each for each in written if not (ROOT / each).is_dir()} == set()
