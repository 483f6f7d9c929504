"""Adds to a tokenizer.json what the checkpoint's other files say of its tokens, as transformers 5 does."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import tokenizers
from tokenizers import AddedToken

from app.errors import CheckpointInvalid
from app.text.tokenizer_files import NAMED_TOKENS, TokenizerFiles

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

    A token gets an id only from a file: one that the vocabulary lacks and that no file gives an id is left out, since the
    model has no row for it.

    Raises:
        CheckpointInvalid: A file gives a token another id than tokenizer.json.
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
    """Apply `added_tokens_decoder`: tokens by id, whose flags replace those of tokenizer.json."""
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
    """Apply added_tokens.json of older checkpoints: a token that tokenizer.json lacks, if it gets the id of the file."""
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
