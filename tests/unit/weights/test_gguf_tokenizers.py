"""Tokenizers made from the vocabulary of GGUF files: each kind against a plain reference, on random text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from app.errors import CheckpointInvalid
from app.weights.gguf.reader import GgufModel
from app.weights.gguf.tokenizer import SPLITS, convert_tokenizer

SPACE = "\u2581"
# Tokens with scores. Lower ids of equal score merge first, and the higher score wins over the longer token.
SCORED = {
    "<unk>": 0.0, "<s>": 0.0, "</s>": 0.0, **{f"<0x{byte:02X}>": 0.0 for byte in range(256)}, "<end_of_turn>": 0.0,
    SPACE + "t": -1.0, "he": -2.0, SPACE + "the": -3.0, "er": -4.0, "in": -5.0, SPACE + "in": -2.5, "th": -6.0, "the": -7.0,
    "ei": -1.5, "ir": -8.0, "rn": -1.25,  # which of them is merged decides: no token holds two of them
    **{letter: -100.0 - place for place, letter in enumerate(SPACE + "abcdefghijklmnopqrstuvwxyzé")},
}  # fmt: skip
TOKENS = tuple(SCORED)
# Names below `tokenizer.ggml` that are read, and those that change nothing here: other tokens than a text's ends, whose
# names the templates of `app/text` know, and what other kinds of tokenizers need.
FOLLOWED = frozenset(
    "model pre tokens token_type scores merges bos_token_id eos_token_id eot_token_id eom_token_id unknown_token_id"
    " padding_token_id add_bos_token add_eos_token add_space_prefix remove_extra_whitespaces precompiled_charsmap"
    " add_sep_token".split()
)
WITHOUT_EFFECT = frozenset(
    "token_type_count seperator_token_id mask_token_id cls_token_id fim_pre_token_id fim_suf_token_id fim_mid_token_id"
    " fim_pad_token_id fim_rep_token_id fim_sep_token_id prefix_token_id suffix_token_id middle_token_id".split()
)


def scored(**changes: Any) -> GgufModel:
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, "<end_of_turn>": 3}
    values = {
        "model": "llama",
        "tokens": TOKENS,
        "scores": tuple(SCORED.values()),
        "token_type": tuple(6 if token.startswith("<0x") else kinds.get(token, 1) for token in TOKENS),
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        **changes,
    }
    return GgufModel(Path("tiny.gguf"), {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {})


def byte_level(pre: str, **changes: Any) -> GgufModel:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    values = {"model": "gpt2", "pre": pre, "tokens": (*letters, "<s>", "1234"), "merges": (), "bos_token_id": 256}
    values |= {"token_type": (1,) * 256 + (3, 1), **changes}
    return GgufModel(Path("tiny.gguf"), {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {})


def made(model: GgufModel) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(convert_tokenizer(model).tokenizer))


def merged(text: str) -> list[int]:
    """Sentencepiece's algorithm: join the neighbours whose token has the highest score, the leftmost first."""
    symbols = list(SPACE + text.replace(" ", SPACE))
    while True:
        known = [
            (SCORED[symbols[at] + symbols[at + 1]], -at)
            for at in range(len(symbols) - 1)
            if symbols[at] + symbols[at + 1] in SCORED
        ]
        if not known:
            break
        at = -max(known)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    ids = dict(zip(TOKENS, range(len(TOKENS)), strict=True))
    return [
        one
        for symbol in symbols
        for one in ([ids[symbol]] if symbol in ids else [3 + byte for byte in symbol.encode()])
    ]


@given(st.text(alphabet="theirn aé中🎉", max_size=24).filter(bool))
def test_scores_are_merged_as_sentencepiece_does(text: str) -> None:
    tokenizer = made(scored())
    ids = tokenizer.encode(text).ids
    assert ids == [1, *merged(text)]
    assert tokenizer.decode(ids) == text


def test_ends_and_beginnings_are_those_of_the_file() -> None:
    converted = convert_tokenizer(scored())
    assert converted.eos_token_ids == {2, TOKENS.index("<end_of_turn>")}
    assert converted.config == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    changed = made(scored(add_bos_token=False, add_eos_token=True, add_space_prefix=False))
    assert changed.encode("the").tokens == ["the", "</s>"]
    assert changed.decode(changed.encode(" in").ids) == " in"


def test_messages_of_gpt_oss_do_not_end_its_turn() -> None:
    """llama.cpp decides it by the same tokens."""
    letters, ends = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()), ("<|return|>", "<|call|>", "<|end|>")
    types = (1,) * 256 + (3,) * 3
    whole = byte_level("gpt-4o", tokens=(*letters, *ends), token_type=types, eos_token_id=256)
    assert convert_tokenizer(whole).eos_token_ids == {256, 257}
    phi = byte_level("gpt-4o", tokens=(*letters, "<s>", "<|call|>", "<|end|>"), token_type=types, eos_token_id=256)
    assert convert_tokenizer(phi).eos_token_ids == {256, 257, 258}


def words(pre: str, text: str) -> list[str]:
    """The words that a text is split into before its merges, as text."""
    tokenizer = made(byte_level(pre))
    split = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:end] for _, (start, end) in split]


_GPT2 = ["I", "'ll", " pay", " $", "12345", ".", "\n", "\n", "OK", " \u00e9\u4e2d"]
_DIGITS = ["I", "'ll", " pay", " $", "1", "2", "3", "4", "5", ".", "\n", "\n", "OK", " \u00e9\u4e2d"]
_LLAMA3 = ["I", "'ll", " pay", " $", "123", "45", ".\n\n", "OK", " \u00e9\u4e2d"]
_QWEN2 = ["I", "'ll", " pay", " $", "1", "2", "3", "4", "5", ".\n\n", "OK", " \u00e9\u4e2d"]
WORDS = {
    **dict.fromkeys(("gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "refact", "starcoder", "command-r"), _DIGITS),
    **dict.fromkeys(
        (
            "llama-bpe",
            "llama3",
            "llama-v3",
            "falcon3",
            "falcon-h1",
            "pixtral",
            "smaug-bpe",
            "dbrx",
            "glm4",
            "chatglm-bpe",
        ),
        _LLAMA3,
    ),
    **dict.fromkeys(("qwen2", "qwen35", "deepseek-r1-qwen", "tekken"), _QWEN2),
    "gpt-4o": ["I'll", " pay", " $", "123", "45", ".\n\n", "OK", " \u00e9\u4e2d"],
    "seed-coder": ["I", "'ll", " pay", " $", "1", "2", "3", "4", "5", ".", "\n\n", "OK", " \u00e9\u4e2d"],
    "deepseek-llm": ["I", "'", "ll", " pay", " $", "1", "2", "3", "4", "5", ".", "\n", "\n", "OK", " \u00e9", "\u4e2d"],
    "deepseek-coder": [
        "I",
        "'",
        "ll",
        " pay",
        " $",
        "1",
        "2",
        "3",
        "4",
        "5",
        ".",
        "\n",
        "\n",
        "OK",
        " \u00e9",
        "\u4e2d",
    ],
    "deepseek-v3": ["I", "'ll", " pay", " $", "123", "45", ".\n\n", "OK", " \u00e9", "\u4e2d"],
}


@pytest.mark.parametrize("pre", SPLITS)
def test_text_is_split_as_the_models_do(pre: str) -> None:
    assert words(pre, "I'll pay $12345.\n\nOK \u00e9\u4e2d") == WORDS[pre]


def test_a_word_that_is_a_token_is_not_split_where_the_model_does_so() -> None:
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    tokens = (*letters, "<s>", "abc")
    assert made(byte_level("llama-bpe", tokens=tokens)).encode("abc").tokens == ["<s>", "abc"]
    assert made(byte_level("qwen2", tokens=tokens)).encode("abc").tokens == ["a", "b", "c"]


REFUSALS: dict[str, tuple[GgufModel, str]] = {
    "no scores": (scored(scores=None), "scores are missing"),
    "few scores": (scored(scores=(1.0,)), "scores must be one number for each token"),
    "merges": (byte_level("gpt-2", merges=("a b c",)), "merges must be pairs of tokens"),
    "no merges": (byte_level("gpt-2", merges=None), "merges must be a list of strings"),
    "beginning": (byte_level("gpt-2", bos_token_id=999), "bos_token_id must be an integer of 0 to 257"),
    "unknown split": (
        byte_level("viking"),
        "tokenizer.ggml.pre is 'viking', which says how text is split; supported are gpt-2",
    ),
    "no split": (byte_level("default"), "pre is 'default': the program that wrote the file did not know"),
    "spaces": (scored(remove_extra_whitespaces=True), "remove_extra_whitespaces asks for removing spaces"),
    "characters": (scored(precompiled_charsmap=(1, 2, 3, 4)), "precompiled_charsmap asks for a table"),
    "separator": (byte_level("gpt-2", add_sep_token=True), "add_sep_token asks for a separator"),
    "flag": (byte_level("gpt-2", add_bos_token=1), "add_bos_token must be true or false"),
}


def test_every_name_of_llama_cpp_is_known() -> None:
    from gguf.constants import Keys

    prefix = "tokenizer.ggml."
    names = {one.removeprefix(prefix) for one in vars(Keys.Tokenizer).values() if str(one).startswith(prefix)}
    assert names - FOLLOWED - WITHOUT_EFFECT == set()
    neutral = {"remove_extra_whitespaces": False, "precompiled_charsmap": (), "add_sep_token": False}
    assert made(scored(**neutral)).encode("the").ids == made(scored()).encode("the").ids


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    model, sentence = REFUSALS[name]
    with pytest.raises(CheckpointInvalid) as caught:
        convert_tokenizer(model)
    assert sentence in caught.value.message and "tiny.gguf" in caught.value.message


def test_gemma4_merges_the_listed_pairs_of_whole_texts() -> None:
    letters = (SPACE, *"abehnt\n")
    tokens = ("<pad>", "<eos>", "<bos>", *letters, *(f"<0x{byte:02X}>" for byte in range(256)))
    tokens += ("th", "the", f"a{SPACE}the", f"a{SPACE}", "\n\n", "<turn|>", "<|tool_response>")
    kinds = {"<pad>": 3, "<eos>": 3, "<bos>": 3, "<turn|>": 3, "<|tool_response>": 4}
    values = {
        "model": "gemma4",
        "tokens": tokens,
        "scores": (0.0,) * len(tokens),
        "token_type": tuple(6 if token.startswith("<0x") else kinds.get(token, 1) for token in tokens),
        "merges": ("t h", "th e", f"a {SPACE}", f"a{SPACE} the", "\n \n"),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "add_space_prefix": False,
        "add_bos_token": True,
    }
    model = GgufModel(Path("tiny.gguf"), {f"tokenizer.ggml.{name}": value for name, value in values.items()}, {})
    tokenizer, converted = made(model), convert_tokenizer(model)
    assert tokenizer.encode("ba then\n\né<turn|>").tokens == [
        *("<bos>", "b", f"a{SPACE}the", "n", "\n\n", "<0xC3>", "<0xA9>", "<turn|>")
    ]
    assert tokenizer.decode(tokenizer.encode("ba then é").ids) == "ba then é"
    assert converted.eos_token_ids == {1, tokens.index("<turn|>"), tokens.index("<|tool_response>")}
