"""The runner of the peers' test suites: its table, its report, and the documents that schemas are tried with."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from tokenizers import Tokenizer

from tools.peers.suites.__main__ import report, requirements_of
from tools.peers.suites.checkpoints import endless_checkpoint, long_checkpoint
from tools.peers.suites.files import SUITES
from tools.peers.suites.outcomes import TABLE
from tools.peers.suites.schemas import in_order
from tools.peers.suites.sources import node_versions, python_versions


def test_the_table_names_files_that_run_and_gives_reasons() -> None:
    table: dict[str, Any] = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    assert table.keys() <= SUITES.keys()
    for suite, files in table.items():
        assert set(files) - {"*"} <= set(SUITES[suite].files)
        for reasons in files.values():
            assert all(start and reason for start, reason in reasons.items())


@pytest.mark.parametrize(("num_passed", "status"), [(9, 0), (8, 1)])
def test_a_suite_below_its_target_fails(num_passed: int, status: int, capsys: pytest.CaptureFixture[str]) -> None:
    outcomes = ["passed"] * num_passed + ["failed"] * (10 - num_passed) + ["not applicable"] * 5
    lines = [{"suite": "s", "file": "f", "test": "t", "outcome": each, "reason": "why"} for each in outcomes]
    assert report(lines, failures=True) == status
    said = capsys.readouterr().out
    assert f"{num_passed * 10}%" in said
    assert said.count("f::t: why") == 10 - num_passed


def test_versions_of_what_was_installed(tmp_path: Path) -> None:
    package = tmp_path / "@scope" / "client" / "package.json"
    package.parent.mkdir(parents=True)
    package.write_text('{"version": "3.1.4"}')
    assert node_versions(tmp_path, ["@scope/client@3", "absent"]) == {"@scope/client": "3.1.4"}
    assert node_versions(None, ["client"]) == {}
    metadata = tmp_path / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (metadata / "client-2.7.dist-info").mkdir(parents=True)
    (metadata / "client-2.7.dist-info" / "METADATA").write_text("Name: client\nVersion: 2.7\n")
    assert python_versions(tmp_path, ["client[extra]>=2", "absent"]) == {"client": "2.7"}


def test_requirements_are_read_from_their_file() -> None:
    names = requirements_of(SUITES["clients"])
    assert "anthropic" in names
    assert not any(name.startswith(("#", "-")) for name in names)
    assert requirements_of(SUITES["chroma"]) == ["chromadb"]


def test_documents_get_the_schemas_order() -> None:
    schema = {
        "$defs": {"part": {"properties": {"y": {}, "x": {}}}},
        "allOf": [{"properties": {"b": {"items": {"$ref": "#/$defs/part"}}}}],
        "properties": {"a": {}},
    }
    document = {"z": 0, "b": [{"x": 1, "y": 2}], "a": 3}
    assert json.dumps(in_order(document, [schema], schema)) == '{"b": [{"y": 2, "x": 1}], "a": 3, "z": 0}'


def test_an_endless_checkpoint_leaves_the_original_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    base.mkdir()
    (base / "config.json").write_text('{"vocab_size": 9, "eos_token_id": 1}')
    (base / "tokenizer_config.json").write_text('{"eos_token": "<e>", "chat_template": "a"}')
    copy = endless_checkpoint(base, tmp_path, 0.5, "b")
    assert json.loads((copy / "config.json").read_text())["eos_token_id"] == 8
    assert json.loads((copy / "generation_config.json").read_text()) == {"eos_token_id": 8, "temperature": 0.5}
    assert json.loads((copy / "tokenizer_config.json").read_text()) == {"chat_template": "b"}
    assert '"eos_token_id": 1' in (base / "config.json").read_text()
    assert endless_checkpoint(base, tmp_path) != copy
    longer = long_checkpoint(base, tmp_path, 99)
    assert json.loads((longer / "config.json").read_text())["max_position_embeddings"] == 99
    assert json.loads((longer / "tokenizer_config.json").read_text())["model_max_length"] == 99


def test_a_small_vocabulary_is_filled_up(tmp_path: Path) -> None:
    demo = Path(__file__).resolve().parents[3] / "app" / "demo" / "llama"
    copy = endless_checkpoint(demo, tmp_path, vocab_size=2100)
    assert json.loads((copy / "config.json").read_text())["vocab_size"] == 2100
    tokenizer = Tokenizer.from_file(str(copy / "tokenizer.json"))
    assert (tokenizer.get_vocab_size(), tokenizer.id_to_token(2099)) == (2100, "<|unused 2099|>")
    name = "model.embed_tokens.weight"
    given, filled = (load_file(folder / "model.safetensors")[name] for folder in (demo, copy))
    assert filled[:2048].equal(given) and filled.shape[0] == 2100 and not filled[2048:].any()
    assert endless_checkpoint(demo, tmp_path, vocab_size=2000) != copy
