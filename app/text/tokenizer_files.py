"""Reads the files of a checkpoint's tokenizer, or makes their content from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.files import MAX_JSON_BYTES, file_in, read_text, readable_or_invalid
from app.weights.gguf.reader import find_gguf, read_gguf
from app.weights.gguf.tokenizer import convert_tokenizer

# The named special tokens that chat templates may use, with transformers' names.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
MAX_TOKENIZER_BYTES = 512 * 2**20  # tokenizer.json with 250,000 tokens has 35 MB


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer.

    `tokenizer` is the text of a tokenizer.json and `config` the content of tokenizer_config.json, with named tokens of
    special_tokens_map.json that it leaves out. `added` are ids of further tokens, which older checkpoints have in
    added_tokens.json. `eos_token_ids` are the tokens that end a completion besides the `eos_token`. `origin` is the
    file that messages name. `has_segments` is True if an encoder gets a number for the segment of each token
    (`token_type_ids`).
    """

    tokenizer: str
    config: Mapping[str, Any]
    eos_token_ids: frozenset[int]
    origin: Path
    has_segments: bool = False
    added: Mapping[str, int] = field(default_factory=dict)


# Classes of transformers 5 that return token_type_ids (`model_input_names` in models/*/tokenization_*.py), without
# `Fast`. Some are other names of BertTokenizer.
_SEGMENT_CLASSES = frozenset(
    f"{stem}Tokenizer"
    for stem in "Bert Canine ConvBert Deberta DebertaV2 Electra FNet LayoutLM LayoutLMv2 Lxmert MarkupLM MobileBert SqueezeBert "
    "Tapas".split()
)
# Kinds of models whose tokenizer is BertTokenizer if no file names a class (transformers' tokenization_auto.py).
_BERT_TOKENIZED = frozenset({"bert", "convbert", "distilbert", "electra", "nomic_bert"})


def _has_segments(tokenizer_config: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if transformers' tokenizer of this checkpoint returns token types.

    `model_input_names` says so, else the class that is named, else the kind of model.
    """
    inputs = tokenizer_config.get("model_input_names")
    if isinstance(inputs, list):
        return "token_type_ids" in inputs
    named = tokenizer_config.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None:
        return config.get("model_type") in _BERT_TOKENIZED
    return str(named).removesuffix("Fast") in _SEGMENT_CLASSES


def read_tokenizer_files(location: Path) -> TokenizerFiles:
    """Return what a checkpoint's directory or GGUF file says about its tokenizer.

    Raises:
        CheckpointInvalid: A file is missing, damaged or not supported.
    """
    gguf = find_gguf(location) if location.is_file() else None
    if gguf is None:
        return _read_directory(location)
    with readable_or_invalid(gguf):
        converted = convert_tokenizer(read_gguf(gguf))
    return TokenizerFiles(json.dumps(converted.tokenizer), converted.config, converted.eos_token_ids, gguf)


def _read_directory(directory: Path) -> TokenizerFiles:
    path = file_in(directory, "tokenizer.json")
    try:
        text = read_text(path, MAX_TOKENIZER_BYTES)
    except FileNotFoundError as error:
        hint = "Save the tokenizer in its fast form: transformers' AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)."
        raise CheckpointInvalid(f"{path} is missing. {hint}") from error
    except OSError as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    config = _read_object(file_in(directory, "tokenizer_config.json"))
    segments = _has_segments(config, _read_object(file_in(directory, "config.json")))
    named = _read_object(file_in(directory, "special_tokens_map.json"))
    says_all = "added_tokens_decoder" in config  # files of newer versions; null then means that there is none
    wanted = [name for name in NAMED_TOKENS if name not in config or (config[name] is None and not says_all)]
    config |= {name: named[name] for name in wanted if named.get(name)}
    return TokenizerFiles(text, config, _read_all_eos_ids(directory), path, segments, _read_added(directory))


def _read_added(directory: Path) -> dict[str, int]:
    path = file_in(directory, "added_tokens.json")
    added = _read_object(path)
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in added.values()):
        raise CheckpointInvalid(f"{path} must have an id for each token.")
    return added


def _read_all_eos_ids(directory: Path) -> frozenset[int]:
    """Return the end-of-text ids of `generation_config.json`, or else of `config.json`.

    Instruct checkpoints use any of them.
    """
    return _read_eos_ids(file_in(directory, "generation_config.json")) or _read_eos_ids(
        file_in(directory, "config.json")
    )


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object from a file; empty if the file does not exist."""
    try:
        value = json.loads(read_text(path, MAX_JSON_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointInvalid(f"{path} must hold a JSON object, not a {type(value).__name__}.")
    return value


def _read_eos_ids(path: Path) -> frozenset[int]:
    """Return the ids of `eos_token_id` in a config file, which may be one id, a list or absent."""
    value = _read_object(path).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in ids):
        raise CheckpointInvalid(f"eos_token_id in {path} must be an id or a list of ids, not {value!r}.")
    return frozenset(ids)
