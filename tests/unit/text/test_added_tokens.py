"""What files beside tokenizer.json say of tokens, against transformers on the same directory."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from app.errors import CheckpointInvalid
from app.text.tokenizer import Tokenizer
from app.text.tokenizer_files import FOLLOWED, REFUSED, WITHOUT_EFFECT
from tiny_checkpoints import write_tokenizer
from tiny_encoders import write_encoder

WORD, NEXT = 262, 270  # the id of `the`, and the first id that no token has
TEXTS = (
    "the <|user|> in",
    "x<|user|>y </s> the",
    "the the <s>z",
    " <|assistant|>\n a",
    "[NEW] the [NEW]b",
    "thethe a",
    "Thé THE <|USER|>",
)


def token(content: str, **flags: bool) -> dict[str, Any]:
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}
    return {"content": content, **plain, **flags}


# What tokenizer_config.json says.
CONFIGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "no longer special": {"added_tokens_decoder": {"2": token("<|user|>", special=False)}},
    "spaces around": {"added_tokens_decoder": {"2": token("<|user|>", lstrip=True, rstrip=True)}},
    "spaces before": {"added_tokens_decoder": {"3": token("<|assistant|>", rstrip=True)}},
    "a word": {"added_tokens_decoder": {str(WORD): token("the", special=False)}},
    "a single word": {"added_tokens_decoder": {str(WORD): token("the", special=False, single_word=True)}},
    "a special word": {"added_tokens_decoder": {str(WORD): token("the")}},
    "a new token": {"added_tokens_decoder": {str(NEXT): token("[NEW]", special=False, lstrip=True)}},
    "a new named token": {"pad_token": "[NEW]", "added_tokens_decoder": {str(NEXT): token("[NEW]", special=False)}},
    "a list": {"extra_special_tokens": ["the"]},
    "a dictionary": {"extra_special_tokens": {"image_token": "the"}},
    "the older list": {"additional_special_tokens": ["the"]},
    "a named one of its own": {"image_token": "the"},
    "a named word": {"pad_token": "the"},
    "a named object": {"pad_token": {**token("the", lstrip=True), "__type": "AddedToken"}},
    "split": {"split_special_tokens": True},
    "without effect": {
        "add_prefix_space": True,
        "clean_up_tokenization_spaces": True,
        "add_bos_token": False,
        "add_eos_token": True,
        "do_lower_case": True,
        "legacy": False,
        "padding_side": "left",
        "model_max_length": 2,
    },
}
MAPS = ("a list", "a dictionary", "the older list", "a named one of its own", "a named word", "a named object")


def written(folder: Path, in_config: dict[str, Any], in_map: dict[str, Any]) -> Path:
    write_tokenizer(folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(config | in_config))
    (folder / "special_tokens_map.json").write_text(json.dumps(in_map))
    return folder


def reference(directory: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)


def compare(directory: Path) -> None:
    ours, theirs = Tokenizer(directory), reference(directory)
    for text in TEXTS:
        for adds in (True, False):
            ids = ours.encode(text, adds)
            assert ids == theirs.encode(text, add_special_tokens=adds), text
            for skips in (True, False):
                assert ours.decode(ids, skips) == theirs.decode(ids, skip_special_tokens=skips), text
    found = theirs.added_tokens_decoder.items()
    assert ours.special_tokens == {number: one.content for number, one in found if one.special}


@pytest.mark.parametrize("name", CONFIGS)
def test_tokenizer_config_is_followed(name: str, tmp_path: Path) -> None:
    compare(written(tmp_path, CONFIGS[name], {}))


@pytest.mark.parametrize("name", MAPS)
def test_the_map_of_special_tokens_is_followed(name: str, tmp_path: Path) -> None:
    values = json.loads(json.dumps(CONFIGS[name]).replace('"__type"', '"unused"'))
    for one in filter(lambda value: isinstance(value, dict), values.values()):
        one.pop("unused", None)
    compare(written(tmp_path, {}, values))


def test_the_map_is_not_read_beside_the_list_of_added_tokens(tmp_path: Path) -> None:
    compare(written(tmp_path, {"added_tokens_decoder": {}}, CONFIGS["the older list"]))


def test_a_token_without_an_id_in_any_file_is_a_text(tmp_path: Path) -> None:
    """transformers gives it an id beyond the model's vocabulary."""
    tokenizer = Tokenizer(written(tmp_path, {"pad_token": "[NEW]", "extra_special_tokens": ["[MORE]"]}, {}))
    assert tokenizer.vocab_size == NEXT and tokenizer.decode(tokenizer.encode("[NEW][MORE]")) == "[NEW][MORE]"


REFUSALS: dict[str, tuple[dict[str, Any], str]] = {
    "another id": (
        {"added_tokens_decoder": {"7": token("the")}},
        "'the' has the id 7, and by tokenizer.json it has 262",
    ),
    "an id with a gap": (
        {"added_tokens_decoder": {"300": token("[NEW]")}},
        "has the id 300, and by tokenizer.json it has 270",
    ),
    "no id": ({"added_tokens_decoder": {"x": token("the")}}, "must have tokens by their ids"),
    "no object": ({"added_tokens_decoder": ["the"]}, "must have tokens by their ids"),
    "no content": ({"added_tokens_decoder": {"2": {"special": True}}}, "objects with the content of a token"),
    "no flag": ({"added_tokens_decoder": {"2": {**token("<|user|>"), "special": 1}}}, "flags of '<|user|>' must be"),
    "spoiled text": (
        {"clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": True},
        "corrupt_output is True, which is not offered",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_files_that_contradict_each_other_are_refused(name: str, tmp_path: Path) -> None:
    values, sentence = REFUSALS[name]
    with pytest.raises(CheckpointInvalid, match=re.escape(sentence)):
        Tokenizer(written(tmp_path, values, {}))


@pytest.mark.parametrize("lowers", [True, False])
@pytest.mark.parametrize("accents", [True, False, None])
def test_the_normalizer_of_bert_follows_the_config(lowers: bool, accents: bool | None, tmp_path: Path) -> None:
    """As transformers' class, whatever tokenizer.json has."""
    directory = write_encoder(tmp_path, "BertModel")
    inner = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    inner.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=not lowers)
    inner.save(str(directory / "tokenizer.json"))
    config = json.loads((directory / "tokenizer_config.json").read_text())
    named = {"tokenizer_class": "BertTokenizer", "do_lower_case": lowers, "strip_accents": accents}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | named))
    ours, theirs = Tokenizer(directory), reference(directory)
    for text in ("The FOX said héllo", "Hello 中world", "gréén WOOD"):
        assert ours.encode(text) == theirs.encode(text), text


def test_every_name_that_transformers_takes_is_known() -> None:
    """The arguments of its base classes, and those of the classes that published files name most."""
    import transformers
    from transformers import tokenization_utils_base, tokenization_utils_tokenizers

    read = re.compile(r"""kwargs\.(?:pop|get|setdefault)\(\s*"(\w+)"|init_kwargs\["(\w+)"\]""")
    names: set[str] = set()
    for base in (tokenization_utils_base.PreTrainedTokenizerBase, tokenization_utils_tokenizers.TokenizersBackend):
        for function in (base.__init__, base._from_pretrained.__func__):
            names |= {one or other for one, other in read.findall(inspect.getsource(function))}
    for stem in ("Llama", "Gemma", "Qwen2", "GPT2", "Bert", "Roberta", "XLMRoberta", "Cohere", "GPTNeoX", "MPNet"):
        names |= set(inspect.signature(getattr(transformers, f"{stem}Tokenizer").__init__).parameters)
    # Not in files: what the classes hand to each other.
    names -= {
        "self",
        "args",
        "kwargs",
        "tokenizer_object",
        "gguf_file",
        "post_processor",
        "tokenizer_padding",
        "tokenizer_truncation",
    }
    names -= {
        "_json_truncation",
        "_json_padding",
        "_spm_precompiled_charsmap",
        "tokenizer",
        "added_tokens_file",
        "fast_tokenizer_file",
    }
    names -= {
        "additional_special_token",
        "token",
        "trust_remote_code",
        "_commit_hash",
        "extra_special_tokens_file",
        "_from_auto",
    }
    known = FOLLOWED | WITHOUT_EFFECT | REFUSED.keys()
    assert {name for name in names if name not in known and not name.endswith("_token")} == set()
