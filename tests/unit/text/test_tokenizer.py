"""The tokenizer of a checkpoint directory: equal to transformers', with refusals that say what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Inner
from tokenizers import models

from app.errors import CheckpointInvalid, InvalidRequest
from app.text.tokenizer import Tokenizer
from small_tokenizers import FORMS, byte_level, sentence_piece, write_tokenizer

TEXT = "Once upon a time, naïve 東京 🙂ᚠ"


def opened(directory: Path, inner: Inner, **config: Any) -> Tokenizer:
    return Tokenizer(write_tokenizer(directory, inner, **config))


@pytest.mark.parametrize("flags", [{}, {"add_bos_token": True}, {"add_bos_token": False}, {"add_eos_token": True}])
@pytest.mark.parametrize("form", FORMS)
def test_ids_are_those_of_transformers(form: str, flags: dict[str, bool], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = opened(tmp_path, FORMS[form](), tokenizer_class="PreTrainedTokenizerFast", **flags)
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        assert ours.encode(TEXT, special) == reference.encode(TEXT, add_special_tokens=special)
    ids = ours.encode(TEXT + "</s>")
    for skip in (True, False):
        decoded = reference.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert ours.decode(ids, skip_special_tokens=skip) == decoded


def test_the_post_processor_adds_the_first_token(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, sentence_piece())
    assert tokenizer.encode("the fox")[0] == tokenizer.bos_token_id == 1
    assert tokenizer.encode("the fox", add_special_tokens=False) == tokenizer.encode("the fox")[1:]


def test_truncation_and_padding_of_the_training_are_off(tmp_path: Path) -> None:
    inner = byte_level()
    inner.enable_truncation(4)
    inner.enable_padding(length=64)
    plain = byte_level().encode(TEXT).ids
    assert opened(tmp_path, inner).encode(TEXT) == plain
    assert len(opened(tmp_path, inner).encode("a")) == 1


@pytest.mark.parametrize(
    "generation, config, expected",
    [
        (None, None, {2}),
        (None, 3, {2, 3}),
        ([3, 1], 7, {1, 2, 3}),
        (0, None, {0, 2}),
    ],
)
def test_ids_that_end_a_text(generation: Any, config: Any, expected: set[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": config}), encoding="utf-8")
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}), encoding="utf-8")
    assert opened(tmp_path, byte_level()).eos_token_ids == expected


def test_named_tokens_may_be_objects(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, byte_level(), bos_token={"content": "<s>", "special": True}, pad_token=None)
    assert dict(tokenizer.named_tokens) == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


NAMED: dict[str, Any] = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (None, ("<s>", "</s>")),
        ({}, ("<s>", "</s>")),
        ({"bos_token": "<|end|>"}, ("<|end|>", "</s>")),
        ({"bos_token": None}, ("<s>", "</s>")),
        ({"bos_token": None, "added_tokens_decoder": {}}, (None, "</s>")),
    ],
)
def test_named_tokens_may_be_in_a_file_of_their_own(
    config: dict[str, Any] | None, expected: tuple[str | None, str], tmp_path: Path
) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(NAMED), encoding="utf-8")
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.named_tokens.get("bos_token"), tokenizer.named_tokens.get("eos_token")) == expected
    assert tokenizer.bos_token_id == tokenizer.token_id(expected[0]) and tokenizer.eos_token_ids == {2}


@pytest.mark.parametrize("text", ["<s>the fox</s>", "the<tool>fox", "the <pad> fox"])
def test_tokens_that_other_files_add_are_those_of_transformers(text: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    inner = json.loads(byte_level().to_str())
    inner["added_tokens"] = [one for one in inner["added_tokens"] if one["content"] == "<unk>"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(inner), encoding="utf-8")
    added = {"<tool>": len(inner["model"]["vocab"]), "<pad>": len(inner["model"]["vocab"]) + 1}
    (tmp_path / "added_tokens.json").write_text(json.dumps(added), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "bos_token": "<s>",
        "eos_token": "</s>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    ours, reference = Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path)
    ids = ours.encode(text, add_special_tokens=False)
    assert ids == reference.encode(text, add_special_tokens=False)
    assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_ids_of_added_tokens_must_be_ids(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "added_tokens.json").write_text('{"<tool>": "340"}', encoding="utf-8")
    with pytest.raises(CheckpointInvalid, match=r"added_tokens\.json must have an id"):
        Tokenizer(tmp_path)


def test_a_checkpoint_without_tokenizer_config_serves(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids) == (None, frozenset())
    assert tokenizer.vocab_size == 340


@pytest.mark.parametrize("form", ["byte_level", "sentence_piece"])
def test_bytes_of_tokens_joined_are_the_text(form: str, tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, FORMS[form]())
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode().removeprefix(" ") == TEXT
    assert tokenizer.token_bytes(2) == b"</s>"
    assert tokenizer.token_bytes(99999) == b""


def test_special_and_unknown_ids_have_no_text(tmp_path: Path) -> None:
    tokenizer = opened(tmp_path, byte_level())
    assert [tokenizer.has_text(token_id) for token_id in (0, 2, 50, 99999)] == [False, False, True, False]


def test_a_lone_surrogate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="there is a lone surrogate at character 1"):
        opened(tmp_path, byte_level()).encode("a\ud800")


def test_a_text_outside_a_closed_vocabulary_is_refused(tmp_path: Path) -> None:
    closed = opened(tmp_path, Inner(models.WordLevel({"a": 0}, unk_token="[UNK]")))
    with pytest.raises(InvalidRequest, match="cannot encode"):
        closed.encode("b")


@pytest.mark.parametrize(
    "content", [b"", b"{}", b'{"model": 3}', b"\xff\xfe", b'{"version": "1.0", "model": {"type": "Novel"}}']
)
def test_a_broken_tokenizer_is_refused_by_its_path(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_a_missing_tokenizer_is_refused_with_the_way_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointInvalid, match=r"tokenizer\.json is missing.*save_pretrained"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize(
    "name, content, sentence",
    [
        ("tokenizer_config.json", "[1]", "must hold a JSON object"),
        ("tokenizer_config.json", "{", "cannot be read"),
        ("generation_config.json", '{"eos_token_id": "two"}', "must be an id or a list of ids"),
        ("generation_config.json", '{"eos_token_id": [true]}', "must be an id or a list of ids"),
    ],
)
def test_broken_configs_are_refused(name: str, content: str, sentence: str, tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level())
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(CheckpointInvalid, match=sentence):
        Tokenizer(tmp_path)
