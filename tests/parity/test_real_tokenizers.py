"""Tokenizers of real models (`make real-formats`) against transformers: ids of difficult texts, and the texts back.

The reference is transformers' class for any tokenizer.json. Its classes for single models make some of these files anew and
then give other ids than the file (llama2: runs of spaces).
"""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from app.text.bounds import CHUNK_CHARACTERS
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer
from app.weights.gguf.reader import GgufModel
from app.weights.gguf.tokenizer import convert_tokenizer
from hypothesis_examples import examples

real_formats = pytest.importorskip("real_formats", reason="the module that finds the files of `make real-formats`")

pytestmark = pytest.mark.full  # the files are large: each takes seconds to load

NAMES = ("deepseek_v3", "gemma3", "gptoss", "llama2", "llama3_1", "qwen3")
PRE = {"deepseek_v3": "deepseek-v3", "gptoss": "gpt-4o", "llama3_1": "llama-bpe", "qwen3": "qwen2"}
TEXTS = (
    "",
    " ",
    "\n",
    "  leading and trailing  ",
    "a\n\nb\t c \r\n\r\n  \u3000 d\u00a0e\u2028f",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 🇩🇪🇫🇷 e\u0301 ẅ ǆ",
    "中文字符，日本語のテキスト。한국어 ไทย हिन्दी 𠀀𪚥",
    "שלום עולם مرحبا بالعالم \u202bRTL\u202c",
    "\x00\x01\x07\x1b[0m\x7f\x85\u200b\ufeff\u00ad\U000e0001",
    "don't WON'T I'LL 'S it’s",
    "ｆｕｌｌ ﬁ ½ ① ² ℵ",
    "1234567890 3.14 1e10 0x1F ١٢٣",
    "def f(x):\n    return x**2  # comment\n\tif True:\n\t\tpass\n",
    "https://example.com/?q=a%20b&c=d#e {\"k\": [1, null]} <div class='x'>",
    "Ünïcödé ÀÉÎ ß ſ İ ı Ǆ Ω",
    "\ue000\U000f0000\U0010fffd",
    "x" * 3000,
    " " * 700,
    "\n" * 700,
    "🤯" * 300,
    "ab " * 1500,
)


@cache
def loaded(name: str) -> tuple[Tokenizer, Any]:
    import transformers

    directory = real_formats.real_tokenizer(name)
    return Tokenizer(directory), transformers.PreTrainedTokenizerFast.from_pretrained(directory, local_files_only=True)


def compare(name: str, text: str) -> list[int]:
    ours, theirs = loaded(name)
    for adds in (True, False):
        assert ours.encode(text, adds) == theirs.encode(text, add_special_tokens=adds), ascii(text[:80])
    ids = ours.encode(text, add_special_tokens=False)
    for skips in (True, False):
        assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips), ascii(text[:80])
    return ids


def as_kept(name: str, text: str) -> str:
    """What is left of a text: Qwen's normalizer composes characters."""
    return unicodedata.normalize("NFC", text) if name == "qwen3" else text


def streamed(tokenizer: Tokenizer, ids: list[int]) -> str:
    stream = IncrementalDetokenizer(tokenizer)
    return "".join([*map(stream.push, ids), stream.flush()])


@pytest.mark.parametrize("name", NAMES)
def test_ids_of_difficult_texts_and_the_texts_back(name: str) -> None:
    ours, _ = loaded(name)
    for text in TEXTS:
        ids = compare(name, text)
        assert ours.decode(ids, skip_special_tokens=False).encode() == as_kept(name, text).encode()
        assert streamed(ours, ids).encode() == ours.decode(ids).encode()


@pytest.mark.parametrize("name", NAMES)
def test_added_tokens_within_texts(name: str) -> None:
    """Each next to letters, spaces and each other, and cut off."""
    ours, _ = loaded(name)
    known = [*ours.added_tokens.values()]
    for token in [*known[:40], *known[-40:]]:
        for text in (f"a{token}b", f" {token} \n{token}{token}", f"{token[:-1]} {token[1:]}"):
            ids = compare(name, text)
            assert streamed(ours, ids) == ours.decode(ids)


@pytest.mark.parametrize("name", NAMES)
def test_named_tokens_are_those_of_transformers(name: str) -> None:
    ours, theirs = loaded(name)
    assert (ours.bos_token_id, theirs.eos_token_id in ours.eos_token_ids) == (theirs.bos_token_id, True)
    assert ours.special_tokens.keys() >= {one for one in theirs.all_special_ids if one is not None}


@pytest.mark.cases(ci=3)
@pytest.mark.parametrize("name", NAMES)
def test_long_texts_are_tokenized_in_parts_as_whole(name: str) -> None:
    for unit in ("The quick brown fox. ", "中文 ", "\n", " ", "a", "🤯 x\n\n"):
        compare(name, unit * (CHUNK_CHARACTERS // len(unit) + 1000))


@pytest.mark.parametrize("name", NAMES)
def test_random_texts(name: str) -> None:
    @given(st.text(max_size=60))
    @settings(max_examples=examples(200), database=None)
    def check(text: str) -> None:
        compare(name, text)

    check()


@cache
def from_gguf(name: str) -> tokenizers.Tokenizer:
    """The tokenizer as a GGUF file has it: tokens, types and merges."""
    state = json.loads((Path(real_formats.real_tokenizer(name)) / "tokenizer.json").read_text(encoding="utf-8"))
    added = {one["id"]: one for one in state["added_tokens"]}
    by_id = {number: token for token, number in state["model"]["vocab"].items()}
    by_id |= {number: one["content"] for number, one in added.items()}
    tokens = tuple(by_id.get(number, f"[UNUSED{number}]") for number in range(max(by_id) + 1))
    types = tuple(
        (3 if added[n]["special"] else 4) if n in added else 1 if n in by_id else 5 for n in range(len(tokens))
    )
    merges = tuple(one if isinstance(one, str) else " ".join(one) for one in state["model"]["merges"])
    values = {"model": "gpt2", "pre": PRE[name], "tokens": tokens, "token_type": types, "merges": merges}
    values["add_bos_token"] = False
    model = GgufModel(Path(f"{name}.gguf"), {f"tokenizer.ggml.{key}": value for key, value in values.items()}, {})
    return tokenizers.Tokenizer.from_str(json.dumps(convert_tokenizer(model).tokenizer))


@pytest.mark.cases(ci=2)
@pytest.mark.parametrize("name", PRE)
def test_a_gguf_file_gives_the_ids_of_the_model(name: str) -> None:
    ours, _ = loaded(name)
    converted, known = from_gguf(name), [*ours.added_tokens.values()]
    for text in (*TEXTS, *(f"a {token}b{token} " for token in known[:40])):
        assert converted.encode(text, add_special_tokens=False).ids == ours.encode(text, False), ascii(text[:80])
