"""The examples of the README and of examples/ run against a server, and every command, target and link of the docs exists."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from armature_bench.flags import BENCHES
from armature_bench.http.server import running_server

ADDRESS = "http://127.0.0.1:8000"
REQUESTS, CLIENTS = "examples/requests", "examples/clients"


def text(root: Path, *names: str) -> list[str]:
    """Return files of the examples."""
    return [(root / name).read_text(encoding="utf-8") for name in names]


def readme_block(root: Path) -> str:
    """Return the README's one request."""
    (block,) = re.findall(r"^```bash\n(.*?)^```", text(root, "README.md")[0], re.MULTILINE | re.DOTALL)
    return str(block)


@pytest.mark.full
async def test_every_example_runs_against_the_demo(root: Path, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the examples are curl's")
    libraries = text(root, f"{CLIENTS}/openai_sdk.py", f"{CLIENTS}/ollama_client.py")
    bert_clients = text(root, f"{REQUESTS}/rerank.py", f"{REQUESTS}/vector.py")

    def run(example: str, url: str) -> str:
        shell = not example.startswith('"""')
        return output(["bash", "-ec"] if shell else [sys.executable, "-c"], example.replace(ADDRESS, url), tmp_path)

    async with running_server(None, ("--threads=1",)) as server:
        names = ("native.sh", "story.py", "structured.py", "llama_cpp.sh")
        examples = [readme_block(root), *text(root, *(f"{REQUESTS}/{name}" for name in names))]
        chat, native, client, typed, completed = [run(example, server.url) for example in examples]
        said = [run(example, server.url) for example in libraries if find_spec(imported(example))]
    async with running_server(None, ("--threads=1", "--model=bert")) as server:
        texts, encoders = text(root, f"{REQUESTS}/encoder.sh", f"{REQUESTS}/encoder_dialects.sh")
        told = run(texts, server.url)
        bare, typed_vectors, best, scores, states, decoded, counted = (
            run(encoders.replace("\ncurl", "\necho\ncurl"), server.url).strip().splitlines()
        )
        said += [run(example, server.url) for example in bert_clients if find_spec(imported(example))]
    decode = json.JSONDecoder().raw_decode
    assert len(json.loads(bare)) == 2
    assert len(json.loads(typed_vectors)["embeddings"]["ubinary"][0]) * 8 == len(json.loads(bare)[0])
    assert [each["index"] for each in json.loads(best)["results"]] == [0]
    assert len(json.loads(scores)["data"]) == 2
    assert len(json.loads(states)["data"][0]["data"][0]) == len(json.loads(bare)[0])
    assert len(json.loads(decoded)) == 1
    assert json.loads(counted)["model_stats"][0]["name"] == "bert"
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
    assert "legs=" in typed and "find {" in typed
    assert '"tokens_predicted":' in completed and '"total_slots":' in completed
    assert all(text.strip() for text in said)


def imported(block: str) -> str:
    """Return the first module that a block of Python imports."""
    return str(re.findall(r"^(?:import|from) (\w+)", block, re.MULTILINE)[0])


def output(command: list[str], code: str, folder: Path) -> str:
    environment = os.environ | {"HF_HUB_OFFLINE": "0"}  # the hub's client then speaks to the server, which is no hub
    result = subprocess.run(
        [*command, code],
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
        env=environment,
        cwd=folder,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_every_example_speaks_to_where_make_serve_listens(root: Path) -> None:
    files = [file for folder in (REQUESTS, CLIENTS) for file in (root / folder).iterdir() if file.is_file()]
    assert len(files) > 15
    for example in (readme_block(root), *(file.read_text(encoding="utf-8") for file in files)):
        assert ADDRESS in example
        assert example.count("http://") == example.count(ADDRESS)


def test_every_make_target_that_the_docs_name_exists(root: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (root / "Makefile").read_text(), re.MULTILINE))
    for path in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        named = set(
            re.findall(r"`(?:[A-Z]+=\S+ )?make ([a-z0-9-]+)`|^make ([a-z0-9-]+)", path.read_text(), re.MULTILINE)
        )
        assert {name for pair in named for name in pair if name} <= targets, path.name


def test_every_command_that_the_docs_name_exists(root: Path) -> None:
    for path in (root / "README.md", *(root / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        assert set(re.findall(r"`armature bench ([a-z]+)", text)) <= BENCHES.keys() | {"compare"}
    commands = (root / "docs" / "commands.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in commands.splitlines() if line.startswith("| `armature bench")]
    assert {name for row in rows for name in re.findall(r"`(?:armature bench )?([a-z]+)[^`]*`", row)} == BENCHES.keys()


def test_every_link_leads_somewhere(root: Path) -> None:
    for path in (root / "README.md", root / "CONTRIBUTING.md", *(root / "docs").glob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text(encoding="utf-8")):
            assert (path.parent / target).exists(), f"{path.name} points to {target}"
