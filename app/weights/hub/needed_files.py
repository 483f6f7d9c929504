"""Which files of a model on the hub serving needs: what `weights/checkpoint.py` and `text/` read, and nothing else.

A model that cannot be served is refused by the names of its files, before its weights are fetched.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from fnmatch import fnmatch
from pathlib import Path

from app.errors import CheckpointInvalid
from app.weights.checkpoint import INDEX, PICKLE_PATTERNS, SINGLE_FILE, shard_names
from app.weights.files import join_names
from app.weights.hub.names import HubName
from app.weights.sentence_transformers import MODULES, read_modules

CONFIG = "config.json"
# Files that say which others are needed; they are fetched first.
METADATA = (CONFIG, MODULES, INDEX)
_TOKENIZER = "tokenizer.json"
_TEXT_FILES = (
    _TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
)
_GGUF_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")  # one of several files, as llama.cpp splits


def needed_files(name: HubName, listing: Collection[str], snapshot: Path) -> list[str]:
    """Return the files that serving a model needs, in the order of fetching.

    Args:
        name: The model.
        listing: The paths of all its files on the hub.
        snapshot: The folder into which they are fetched. While some of `METADATA` is missing there, only that is
            returned.

    Raises:
        CheckpointInvalid: Files are missing, or are of a kind that is not served.
    """
    if name.file:
        return _gguf_files(name, listing)
    if CONFIG not in listing:
        return [_only_program(name, listing)]
    metadata = [file for file in METADATA if file in listing]
    if not all((snapshot / file).exists() for file in metadata):
        return metadata
    if _TOKENIZER not in listing:
        raise CheckpointInvalid(f"{name} has no {_TOKENIZER}, which serving needs.")
    texts = [
        file
        for pattern in _TEXT_FILES
        for file in sorted(listing)
        if fnmatch(file, pattern) and file.count("/") == pattern.count("/")
    ]
    folders = [one.folder for one in read_modules(snapshot) if one.folder] if MODULES in listing else []
    configs = [file for folder in folders if (file := f"{folder}/{CONFIG}") in listing]
    weights = [file for folder in folders for file in _weights(name, listing, folder)]
    return [*metadata, *texts, *configs, *weights, *_model_weights(name, listing, snapshot)]


def _matches(file: str, pattern: str) -> bool:
    """Return True if a file's path matches a pattern, whose stars stand for names within a folder."""
    return fnmatch(file, pattern) and file.count("/") == pattern.count("/")


def _model_weights(name: HubName, listing: Collection[str], snapshot: Path) -> list[str]:
    if INDEX in listing:
        files = shard_names(snapshot)
        missing = [file for file in files if file not in listing]
        if missing:
            raise CheckpointInvalid(f"{name}: {INDEX} names files that the hub does not have: {join_names(missing)}.")
        return files
    files = _weights(name, listing, "")
    if not files:
        raise CheckpointInvalid(f"{name} has no weights: no *.safetensors file.{_gguf_note(name, listing)}")
    return files


def _weights(name: HubName, listing: Collection[str], folder: str) -> list[str]:
    """Return the file with the weights of a folder; empty if it has none, as a pooling module."""
    own = sorted(file for file in listing if file.rpartition("/")[0] == folder)
    tensors = [file for file in own if file.endswith(".safetensors")]
    single = f"{folder}/{SINGLE_FILE}" if folder else SINGLE_FILE
    if single in tensors:
        return [single]
    if len(tensors) > 1:
        raise CheckpointInvalid(f"{name} has {len(tensors)} *.safetensors files and no {INDEX} to join them.")
    pickles = [file for file in own if any(fnmatch(Path(file).name, pattern) for pattern in PICKLE_PATTERNS)]
    if pickles and not tensors:
        raise CheckpointInvalid(
            f"{name} has pickled weights only ({join_names(pickles)}), which can run code when read: they are not fetched."
            " Look for a revision (@refs/pr/N) or another model with *.safetensors files."
        )
    return tensors


def _only_program(name: HubName, listing: Collection[str]) -> str:
    programs = [file for file in listing if fnmatch(file, "*.pt2") and "/" not in file]
    if len(programs) == 1:
        return programs[0]
    if "adapter_config.json" in listing:
        raise CheckpointInvalid(
            f"{name} is an adapter, which is not served alone: give its base model with --model, and --lora NAME=DIR with its directory."
        )
    raise CheckpointInvalid(f"{name} has no {CONFIG}, so it is no model that is served.{_gguf_note(name, listing)}")


def _gguf_note(name: HubName, listing: Collection[str]) -> str:
    found = sorted(file for file in listing if file.endswith(".gguf"))
    return f" Of its GGUF files one is given as {name}:{found[0]} (it has {join_names(found)})." if found else ""


def _gguf_files(name: HubName, listing: Collection[str]) -> list[str]:
    """Return the GGUF file of the name, and the other parts if it is one of several."""
    if name.file not in listing:
        found = sorted(file for file in listing if file.endswith(".gguf"))
        has = f"it has {join_names(found)}" if found else "it has no GGUF file"
        raise CheckpointInvalid(f"{name.repo_id} has no file {name.file}: {has}.")
    part = _GGUF_PART.fullmatch(name.file)
    if part is None:
        return [name.file]
    stem, count = part["stem"], part["count"]
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]
