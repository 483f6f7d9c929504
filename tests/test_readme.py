"""The README is held to its word: its examples run against a server, its commands exist, and the docs' tree is the tree."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.arguments import BENCHES
from app.bench.server import serving

ADDRESS = "http://127.0.0.1:8000"


def blocks(root: Path, language: str) -> list[str]:
    text = (root / "README.md").read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.slow
async def test_every_example_runs_against_the_demo(root: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the examples are curl's")
    chats, natives, texts = blocks(root, "bash")
    (client_code,) = blocks(root, "python")
    examples = [("bash", "-ec", chats), ("bash", "-ec", natives), (sys.executable, "-c", client_code)]
    async with serving(None, ("--threads=1",)) as server:
        chat, native, client = [run(*command, block.replace(ADDRESS, server.url)) for *command, block in examples]
    async with serving(None, ("--threads=1", "--model=bert")) as server:
        told = run("bash", "-ec", texts.replace(ADDRESS, server.url))
    decode = json.JSONDecoder().raw_decode
    vectors, end = decode(told)
    ranks, more = decode(told[end:])
    assert len(vectors["data"]) == 2
    assert ranks["results"][0]["index"] == 0
    assert decode(told[end + more :])[0]["outputs"][0]["name"] == "embedding"
    assert chat.endswith("data: [DONE]\n\n")
    assert '"delta"' in chat
    generated = json.JSONDecoder().raw_decode(native)[0]
    assert len(generated["token_ids"]) == 20
    assert "armature_requests_total" in native
    assert len(client.split()) > 10, "a story has words"


def run(*command: str) -> str:
    result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_speaks_to_where_make_serve_listens(root: Path) -> None:
    for block in blocks(root, "bash") + blocks(root, "python"):
        assert ADDRESS in block
        assert block.count("http://") == block.count(ADDRESS)


def test_every_make_target_that_the_docs_name_exists(root: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for path in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        named = set(re.findall(r"`(?:[A-Z]+=\S+ )?make ([a-z0-9]+)`|^make ([a-z0-9]+)", path.read_text(), re.MULTILINE))
        assert {name for pair in named for name in pair if name} <= targets, path.name


def test_every_command_that_the_docs_name_exists(root: Path) -> None:
    for path in (root / "README.md", *(root / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"`armature bench ([a-z]+)", text)) <= BENCHES.keys() | {"compare"}
    readme = (root / "README.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in readme.splitlines() if line.startswith("| `armature bench")]
    assert {name for row in rows for name in re.findall(r"`(?:armature bench )?([a-z]+)[^`]*`", row)} == BENCHES.keys()


def test_every_link_leads_somewhere(root: Path) -> None:
    for path in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} points to {target}"


def test_the_tree_names_every_file_once(root: Path) -> None:
    assert sorted(named_in(root)) == sorted(files_in(root))


FOLDERS = ("app/kernels/csrc/", "app/demo/llama/", "app/demo/bert/")


def files_in(root: Path) -> Iterator[str]:
    """Files of app/ but packages' own and what is built; the C sources and the demos stand as folders."""
    for path in (root / "app").rglob("*"):
        name = path.relative_to(root).as_posix()
        if "__pycache__" in name or path.name.startswith("libarmature.") or path.name == "__init__.py" or not path.is_file():
            continue
        if not name.startswith(FOLDERS):
            yield name
    yield from FOLDERS


def named_in(root: Path) -> Iterator[str]:
    """Paths that the tree draws; each has a phrase."""
    text = (root / "docs" / "tree.md").read_text(encoding="utf-8")
    (tree,) = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    folders: list[str] = []
    for line in tree.splitlines()[1:]:
        found = re.match(r"((?:│   )*)[├└]── (\S+)\s+(\S.*)", line)
        assert found is not None, f"no phrase: {line}"
        depth, name = len(found[1]) // 4, found[2]
        folders = folders[:depth]
        path = "".join(["app/", *folders, name])
        if not name.endswith("/"):
            yield path
        else:
            folders.append(name)
            if path in FOLDERS:
                yield path
