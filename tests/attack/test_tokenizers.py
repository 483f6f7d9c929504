"""Damaged and hostile tokenizers are refused at the start with a sentence, within limits of time and memory."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.server.engine_host import read_tokenizer
from app.server.startup import warn_of_unknown_tokens
from app.settings import DEMO_DIRECTORY
from app.text import tokenizer_check
from app.text.tokenizer_check import MAX_GROWTH, NOTES, check_tokenizer, fault_of, fault_of_tokenizer, growth_fault
from app.text.tokenizer_files import read_tokenizer_files
from app.weights.checkpoint import open_checkpoint
from small_tokenizers import FORMS, write_tokenizer
from tiny_checkpoints import write_checkpoint

DEMO = json.loads((DEMO_DIRECTORY / "tokenizer.json").read_text(encoding="utf-8"))


def replace_all(pattern: Mapping[str, str], content: str, times: int) -> dict[str, Any]:
    rule = {"type": "Replace", "pattern": pattern, "content": content}
    return {"type": "Sequence", "normalizers": [rule] * times}


DOUBLING = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}


def split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def template(token: str, ids: list[int]) -> dict[str, Any]:
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokens = {token: {"id": token, "ids": ids, "tokens": [token] * len(ids)}} if ids else {}
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}],
        "special_tokens": tokens,
    }


HOSTILE: dict[str, tuple[dict[str, Any], str]] = {
    "doubling": ({"normalizer": replace_all({"String": "a"}, "aa", 60)}, "its normalizer may write 1.15e.18 characters"),
    "doubling tokens": ({"decoder": {"type": "Sequence", "decoders": [DOUBLING] * 60}}, "its decoder may write"),
    "doubling by an expression": ({"normalizer": replace_all({"Regex": "."}, "aa", 9)}, "its normalizer may write 512"),
    "one long replacement": ({"normalizer": replace_all({"String": "a"}, "b" * 999, 1)}, "its normalizer may write 999"),
    "an empty expression": ({"normalizer": replace_all({"Regex": ""}, "a", 1)}, "index out of bounds"),
    "a broken expression": ({"normalizer": replace_all({"Regex": "("}, "a", 1)}, "Oniguruma"),
    "backtracking": ({"pre_tokenizer": split("(a+)+$")}, "retry-limit"),
    "an unknown token of a template": ({"post_processor": template("zz", [])}, "zz|no entry"),
    "a template's id": ({"post_processor": template("zz", [99_999])}, "adds the token 99999, which its vocabulary"),
    "an id of BERT": (
        {"post_processor": {"type": "BertProcessing", "sep": ["[SEP]", 99_999], "cls": ["[CLS]", 4]}}, "adds the token 99999"),
    "a charsmap that is damaged": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}}, "charsmap"),
    "a charsmap without an end": ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "/////w=="}}, "MiB of memory"),
    "another type": ({"model": {"type": "Nothing"}}, "model|variant|data did not match"),
}  # fmt: skip


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_tokenizer_is_refused_with_a_sentence(name: str, tmp_path: Path) -> None:
    changes, reason = HOSTILE[name]
    (tmp_path / "tokenizer.json").write_text(json.dumps(DEMO | changes))
    with pytest.raises(
        CheckpointInvalid, match=rf"^{tmp_path}/tokenizer.json is not a tokenizer that can be used: .*({reason})"
    ):
        check_tokenizer(read_tokenizer_files(tmp_path), tmp_path)
    assert not (tmp_path / NOTES).exists()


@pytest.mark.parametrize("text", ["", "[", "[]", "1", "{}", '"\\ud800"', "[" * 100_000, "null"])
def test_what_is_no_tokenizer_is_refused(text: str) -> None:
    assert fault_of_tokenizer(text.encode("utf-8", "surrogatepass"))


@pytest.mark.parametrize("form", FORMS)
def test_usual_tokenizers_pass(form: str, tmp_path: Path) -> None:
    files = read_tokenizer_files(write_tokenizer(tmp_path, FORMS[form]()))
    assert fault_of(files.tokenizer) == ""


def test_rules_that_replace_a_text_by_a_few_characters_pass() -> None:
    for pattern, content, times in (
        ({"String": " "}, "\u2581", 1),
        ({"Regex": " {2,}"}, " ", 3),
        ({"String": "``"}, '"', 9),
    ):
        assert growth_fault({"normalizer": replace_all(pattern, content, times)}) == ""
    assert growth_fault({"normalizer": replace_all({"String": "a"}, "a" * MAX_GROWTH, 1)}) == ""
    assert growth_fault({"normalizer": replace_all({"String": "a"}, "a" * (MAX_GROWTH + 1), 1)}) != ""
    assert growth_fault([]) == growth_fault({}) == ""


def test_limits_of_time_and_memory_end_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.dumps(DEMO).encode()
    monkeypatch.setattr(tokenizer_check, "_MEMORY_BYTES", 2**20)
    monkeypatch.setattr(tokenizer_check, "_MEMORY_FACTOR", 0)
    assert "memory" in fault_of_tokenizer(content)
    monkeypatch.undo()
    slow = json.dumps(DEMO | {"normalizer": replace_all({"Regex": "(a|a)*(b|b)*(c|c)*"}, "", 20_000)}).encode()
    monkeypatch.setattr(tokenizer_check, "_CPU_SECONDS", 1)
    monkeypatch.setattr(tokenizer_check, "_CPU_SECONDS_PER_MIB", 0)
    assert "1 s of CPU time" in fault_of_tokenizer(slow)


def test_a_tokenizer_that_passed_is_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = open_checkpoint(write_checkpoint(tmp_path / "model"))
    assert read_tokenizer(checkpoint, tmp_path / "cache") is not None
    tried: list[bytes] = []
    monkeypatch.setattr(tokenizer_check, "fault_of_tokenizer", lambda content: tried.append(content) or "")
    read_tokenizer(checkpoint, tmp_path / "cache")
    assert not tried
    read_tokenizer(checkpoint, None)
    (note,) = (tmp_path / "cache" / NOTES).iterdir()
    note.chmod(0o666)  # others could have written it
    read_tokenizer(checkpoint, tmp_path / "cache")
    note.unlink(missing_ok=True)
    os.mkfifo(note)
    read_tokenizer(checkpoint, tmp_path / "cache")
    assert len(tried) == 3


def test_tokens_that_the_model_does_not_know_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    directory = write_checkpoint(tmp_path / "model")
    state = json.loads((directory / "tokenizer.json").read_text())
    vocab_size = open_checkpoint(directory).decoder.vocab_size
    added = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    missing = (
        vocab_size
        - len(state["model"]["vocab"])
        - len([one for one in state["added_tokens"] if one["id"] >= len(state["model"]["vocab"])])
    )
    names = [f"<unused{number}>" for number in range(missing)] + ["<image>"]
    start = vocab_size - missing
    state["added_tokens"] += [{"id": start + at, "content": name, **added} for at, name in enumerate(names)]
    (directory / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = read_tokenizer(open_checkpoint(directory))
    assert tokenizer is not None
    warn_of_unknown_tokens(tokenizer, vocab_size)
    assert "the tokenizer has 1 tokens that the model does not know, such as '<image>'" in caplog.text
