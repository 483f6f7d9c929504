"""Reads the files of a checkpoint's tokenizer, or makes their content from a GGUF file."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from app.errors import CheckpointInvalid
from app.weights.files import MAX_JSON_BYTES, file_in, join_names, read_text, readable_or_invalid
from app.weights.gguf.reader import find_gguf, read_gguf
from app.weights.gguf.tokenizer import convert_tokenizer

log = logging.getLogger(__name__)

# The named special tokens that chat templates may use, with transformers' names.
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")
# What tokenizer_config.json may say besides, and special_tokens_map.json. `*_token` are tokens that are special.
FOLLOWED = frozenset(NAMED_TOKENS) | frozenset(
    "additional_special_tokens extra_special_tokens model_specific_special_tokens added_tokens_decoder chat_template"
    " tokenizer_class model_input_names split_special_tokens do_lower_case strip_accents tokenize_chinese_chars"
    " model_max_length".split()
)
# tokenizer.json decides what the second group is about, as in transformers where that file is: its post-processor adds
# tokens, its normalizer and its splits are those that were trained with. The cleaning of spaces is for WordPiece, whose
# decoder in tokenizer.json does it; transformers leaves it out for BPE too. The third group is for slow tokenizers.
WITHOUT_EFFECT = frozenset(
    "name_or_path auto_map processor_class tokenizer_file special_tokens_map_file vocab_file backend files_loaded is_local"
    " local_files_only device_map response_template response_schema chat_control_tokens use_default_system_prompt"
    " padding_side truncation_side max_length max_len stride truncation_strategy pad_to_multiple_of pad_token_type_id init_inputs"
    " fix_mistral_regex verbose"
    " add_bos_token add_eos_token add_prefix_space trim_offsets clean_up_tokenization_spaces legacy from_slow unk_id"
    " spaces_between_special_tokens"
    " never_split do_basic_tokenize sp_model_kwargs errors merges vocab remove_space keep_accents clean_text wordpieces_prefix".split()
)
# Values that change texts or ids in a way that is not offered, by name, with the ones that do not.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output": (False, None)
}
MAX_TOKENIZER_BYTES = 512 * 2**20  # tokenizer.json with 250,000 tokens has 35 MB


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What a checkpoint says about its tokenizer.

    `tokenizer` is the text of a tokenizer.json and `config` the content of tokenizer_config.json, with named tokens of
    special_tokens_map.json that it leaves out. `added` are the ids of added_tokens.json of older checkpoints.
    `eos_token_ids` end a completion besides the `eos_token`. Messages name the file `origin`. `has_segments`: an
    encoder gets a number for the segment of each token (`token_type_ids`).
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
    """Read a directory or GGUF file. Raises `CheckpointInvalid` if a file is missing, damaged or not supported."""
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
    _check_keys(config)
    segments = _has_segments(config, _read_object(file_in(directory, "config.json")))
    named = _read_object(file_in(directory, "special_tokens_map.json"))
    says_all = "added_tokens_decoder" in config  # files of newer versions; null then means that there is none
    if not says_all:  # then transformers takes all of the map
        lists = {name: value for name, value in named.items() if name not in NAMED_TOKENS and name not in config}
        config |= {name: value for name, value in lists.items() if name.endswith(("_token", "_special_tokens"))}
    wanted = [name for name in NAMED_TOKENS if name not in config or (config[name] is None and not says_all)]
    config |= {name: named[name] for name in wanted if named.get(name)}
    return TokenizerFiles(text, config, _read_all_eos_ids(directory), path, segments, _read_added(directory))


def _check_keys(config: Mapping[str, Any]) -> None:
    """Refuse settings of tokenizer_config.json that are not offered (`CheckpointInvalid`), and log unknown names."""
    for name, allowed in REFUSED.items():
        if config.get(name) not in allowed:
            raise CheckpointInvalid(f"tokenizer_config.json: {name} is {str(config[name])[:80]}, which is not offered.")
    known = FOLLOWED | WITHOUT_EFFECT | REFUSED.keys()
    unknown = sorted(name for name in config if name not in known and not name.endswith("_token"))
    if unknown:
        log.info(
            "tokenizer_config.json: not known here and without effect: %s", join_names([one[:80] for one in unknown])
        )


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


_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# Classes of transformers that make the normalizer from tokenizer_config.json, and the names in both.
_BERT_CLASSES = frozenset(
    f"{stem}Tokenizer"
    for stem in "Bert DistilBert Electra MPNet MobileBert ConvBert SqueezeBert RetriBert LayoutLM Lxmert Splinter Funnel".split()
)
_BERT_NORMALIZER: Mapping[str, str] = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}


def named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the named tokens; each is stored as a string or as an object with `content`."""
    entries = {name: config.get(name) for name in NAMED_TOKENS}
    contents = {name: token.get("content") if isinstance(token, dict) else token for name, token in entries.items()}
    return {name: content for name, content in contents.items() if isinstance(content, str)}


def apply_other_files(inner: tokenizers.Tokenizer, files: TokenizerFiles) -> None:
    """Add tokens, and change the flags of those that are there.

    A token gets an id only from a file: one that the vocabulary lacks and that no file gives an id is left out, since
    the model has no row for it. Raises `CheckpointInvalid` if a file gives a token another id than tokenizer.json.
    """
    named = set(named_tokens(files.config).values())
    _apply_decoder(inner, files, named)
    _apply_added_json(inner, files, named)
    added = {token.content for token in inner.get_added_tokens_decoder().values()}
    for token in _special_tokens(files.config):
        if token.content not in added and inner.token_to_id(token.content) is not None:
            inner.add_tokens([token])
            added.add(token.content)
    special = {token.content for token in inner.get_added_tokens_decoder().values() if token.special}
    inner.add_special_tokens([one for one in sorted(named - special) if inner.token_to_id(one) is not None])
    inner.encode_special_tokens = files.config.get("split_special_tokens") is True
    _apply_bert_normalizer(inner, files.config)


def _apply_decoder(inner: tokenizers.Tokenizer, files: TokenizerFiles, named: set[str]) -> None:
    """Apply `added_tokens_decoder`: tokens by id, with flags that replace tokenizer.json's."""
    entries = files.config.get("added_tokens_decoder")
    if entries is None:
        return
    where = f"{files.origin.parent}/tokenizer_config.json: added_tokens_decoder"
    if not isinstance(entries, dict) or not all(number.isdecimal() for number in entries):
        raise CheckpointInvalid(f"{where} must have tokens by their ids.")
    there = {_flags(token) for token in inner.get_added_tokens_decoder().values()}
    for number, entry in sorted(entries.items(), key=lambda item: int(item[0])):
        token = _token(entry, where)
        if token.content in named and not token.special:
            token = AddedToken(token.content, **{**_options(token), "special": True})
        if _flags(token) not in there:
            inner.add_tokens([token])
        if inner.token_to_id(token.content) != int(number):
            raise CheckpointInvalid(
                f"{where}: {token.content[:80]!r} has the id {number}, and by tokenizer.json it has"
                f" {inner.token_to_id(token.content)}. Take both files from the same version of the model."
            )


def _apply_added_json(inner: tokenizers.Tokenizer, files: TokenizerFiles, named: set[str]) -> None:
    """Apply added_tokens.json of older checkpoints: a token that tokenizer.json lacks, if it gets the file's id."""
    for content, token_id in sorted(files.added.items(), key=lambda item: item[1]):
        if inner.token_to_id(content) is None and token_id == inner.get_vocab_size(with_added_tokens=True):
            inner.add_tokens([AddedToken(content, special=content in named, normalized=content not in named)])


def _special_tokens(config: Mapping[str, Any]) -> Iterator[AddedToken]:
    """Yield the tokens that are special by their place in tokenizer_config.json."""
    for name, value in config.items():
        if name in ("extra_special_tokens", "additional_special_tokens", "model_specific_special_tokens"):
            listed = list(value.values()) if isinstance(value, dict) else value if isinstance(value, list) else []
        else:
            listed = [value] if name.endswith("_token") else []
        for one in listed:
            if isinstance(one, str) and one:
                yield AddedToken(one, special=True, normalized=False)
            elif isinstance(one, dict) and isinstance(one.get("content"), str) and one["content"]:
                yield _token({**one, "special": True}, f"tokenizer_config.json: {name[:80]}")


def _token(entry: Any, where: str) -> AddedToken:
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        raise CheckpointInvalid(f"{where} must have objects with the content of a token.")
    options = {flag: entry[flag] for flag in _FLAGS if flag in entry}
    if not all(isinstance(value, bool) for value in options.values()):
        raise CheckpointInvalid(f"{where}: the flags of {entry['content'][:80]!r} must be true or false.")
    return AddedToken(entry["content"], **options)


def _options(token: AddedToken) -> dict[str, bool]:
    return {flag: getattr(token, flag) for flag in _FLAGS}


def _flags(token: AddedToken) -> tuple[Any, ...]:
    return (token.content, *_options(token).values())


def _apply_bert_normalizer(inner: tokenizers.Tokenizer, config: Mapping[str, Any]) -> None:
    """Change the normalizer of BERT as transformers' classes do if tokenizer_config.json says otherwise."""
    given = {ours: config[name] for name, ours in _BERT_NORMALIZER.items() if isinstance(config.get(name), bool)}
    named = str(config.get("tokenizer_class")).removesuffix("Fast")
    if named not in _BERT_CLASSES or not given or inner.normalizer is None:
        return
    state = json.loads(inner.normalizer.__getstate__())
    if state.get("type") == "BertNormalizer":
        options = {name: value for name, value in state.items() if name != "type"} | given
        inner.normalizer = tokenizers.normalizers.BertNormalizer(**options)
