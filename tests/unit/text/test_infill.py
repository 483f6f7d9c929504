"""Formats of fill-in-the-middle models by the names of their tokens, and prompts that are too long."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.text.infill import InfillPrompt, find_infill_format, shorten_infill
from app.text.tokenizer import Tokenizer
from small_tokenizers import byte_level, write_tokenizer

FAMILIES = {
    "Qwen": ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    "StarCoder": ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    "DeepSeek": ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    "CodeLlama": ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
}


def with_tokens(directory: Path, *names: str) -> Tokenizer:
    inner = byte_level()
    inner.add_special_tokens(list(names))
    return Tokenizer(write_tokenizer(directory, inner))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_known_by_its_tokens(tmp_path: Path, family: str) -> None:
    tokenizer = with_tokens(tmp_path, *FAMILIES[family])
    found = find_infill_format(tokenizer)
    assert found is not None
    prompt = InfillPrompt(tokenizer.encode("the fox", False), tokenizer.encode(" hello", False))
    text = tokenizer.decode(found.prompt_ids(prompt, [1]), skip_special_tokens=False)
    before, after, middle = FAMILIES[family]
    assert text == f"<s>{before}the fox{after} hello{middle}"


def test_two_of_three_tokens_are_no_format(tmp_path: Path) -> None:
    assert find_infill_format(with_tokens(tmp_path, *FAMILIES["Qwen"][:2], "<fim_middle>")) is None


def test_other_files_come_first_and_their_token_ends_the_middle(tmp_path: Path) -> None:
    tokenizer = with_tokens(tmp_path, *FAMILIES["Qwen"], "<|file_sep|>", "<|fim_pad|>")
    found = find_infill_format(tokenizer)
    assert found is not None
    ids = found.file_ids(tokenizer, "a.py", "x")
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|file_sep|>a.py\nx\n"
    assert found.end_ids == (tokenizer.token_id("<|fim_pad|>"), tokenizer.token_id("<|file_sep|>"))
    assert found.prompt_ids(InfillPrompt([5], [6], ids))[: len(ids)] == ids
    plain = find_infill_format(with_tokens(tmp_path, *FAMILIES["Qwen"]))
    assert plain is not None
    assert tokenizer.decode(plain.file_ids(tokenizer, "a.py", "x")) == "\n\n--- a.py ---\n\nx"


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (30, ([1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16], [21, 22, 23])),
        (15, ([1, 2, 3, 4, 5, 6, 7, 8], [11, 12, 13, 14, 15, 16], [23])),
        (10, ([1, 2, 3, 4, 5, 6, 7, 8], [11, 12], [])),
        (8, ([3, 4, 5, 6, 7, 8], [11, 12], [])),
        (0, ([], [], [])),
    ],
)
def test_what_is_nearest_to_the_gap_is_kept(room: int, expected: tuple[list[int], list[int], list[int]]) -> None:
    kept = shorten_infill(InfillPrompt(range(1, 9), range(11, 17), range(21, 24)), room)
    assert (list(kept.prefix_ids), list(kept.suffix_ids), list(kept.file_ids)) == expected
