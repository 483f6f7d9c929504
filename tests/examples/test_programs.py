"""examples/vision, recommender and search: exported, served and asked as their files say."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from armature_bench.http.server import running_server

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ADDRESS = "http://127.0.0.1:8000"


def run(name: str, folder: Path, url: str = ADDRESS, *words: str) -> str:
    code = (EXAMPLES / name).read_text(encoding="utf-8")
    assert url == ADDRESS or ADDRESS in code
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code.replace(ADDRESS, url), *words],
        capture_output=True, text=True, check=False, cwd=folder, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def measure(name: str, url: str) -> str:
    """Run the command of the file's description that measures, shortly."""
    (line,) = re.findall(r"^armature (bench .*)$", (EXAMPLES / name).read_text(encoding="utf-8"), re.MULTILINE)
    words = [*line.replace(ADDRESS, url).split(), "--seconds", "0.2", "--concurrency", "1"]
    ran = subprocess.run([sys.executable, "-m", "armature", *words], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.mark.full
async def test_pictures_get_labels(tmp_path: Path) -> None:
    run("vision/export.py", tmp_path)
    Image.linear_gradient("L").convert("RGB").save(tmp_path / "fox.jpg")
    async with running_server(None, ("--threads=1", f"--model={tmp_path / 'vision.pt2'}")) as server:
        best, rows, classes = run("vision/client.py", tmp_path, server.url, "fox.jpg").splitlines()[:3]
        assert "row/s" in measure("vision/export.py", server.url)
    shares = eval(best, {})  # a Python dictionary
    assert sorted(shares) == ["cat", "dog", "fox", "owl"] and sum(shares.values()) == pytest.approx(1)
    one, two = json.loads(rows)
    assert one == two and len(one) == 4
    assert next(iter(shares)) in classes


@pytest.mark.full
async def test_candidates_are_ranked_and_an_unknown_id_is_named(tmp_path: Path) -> None:
    run("recommender/export.py", tmp_path)
    async with running_server(None, ("--threads=1", f"--model={tmp_path / 'recommender.pt2'}")) as server:
        ranked, refused = run("recommender/client.py", tmp_path, server.url).splitlines()
        assert "row/s" in measure("recommender/export.py", server.url)
    assert sorted(json.loads(ranked)) == [1, 20, 300, 4000, 49_999]
    assert re.search(r"cannot compute these inputs: .*(index|range)", refused)


@pytest.mark.full
@pytest.mark.skipif(find_spec("faiss") is None, reason="faiss-cpu is not installed")
async def test_a_search_finds_its_own_text_first(tmp_path: Path) -> None:
    async with running_server(None, ("--threads=1", "--model=bert")) as server:
        assert run("search/search.py", tmp_path, server.url).startswith("[('A fox in the snow.', 1.0)")
