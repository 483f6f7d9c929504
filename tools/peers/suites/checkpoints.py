"""Copies of a checkpoint with the options that peers give to their servers and ours reads from the checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any


def endless_checkpoint(
    base: Path, work: Path, temperature: float | None = None, template: str | None = None, vocab_size: int = 0
) -> Path:
    """Return a copy of `base` in `work` with texts that do not end, a default temperature and a chat template.

    The small models of the peers' tests do not end a text within some dozen tokens, and tests count on that. So the end
    token of the copy is one that the model never writes. A vocabulary that is smaller than `vocab_size` is filled up
    with tokens that have embeddings of 0: tests name ids that the vocabularies of the peers' models have.
    """
    folder = _folder(work, str(base), temperature, template, vocab_size)
    if not folder.exists():
        shutil.copytree(base, folder)
        shape = _read(base / "config.json")
        end = {"eos_token_id": shape["vocab_size"] - 1}
        _write(folder / "config.json", shape | end)
        _write(folder / "generation_config.json", end | ({} if temperature is None else {"temperature": temperature}))
        words = _read(base / "tokenizer_config.json")
        words.pop("eos_token", None)
        _write(folder / "tokenizer_config.json", words | ({} if template is None else {"chat_template": template}))
        if template is not None:
            (folder / "chat_template.jinja").unlink(missing_ok=True)
        if vocab_size > shape["vocab_size"]:
            _fill_vocabulary(folder, shape["vocab_size"], vocab_size)
    return folder


def long_checkpoint(base: Path, work: Path, context: int) -> Path:
    """Return a copy of `base` in `work` with a longer context, for tests that do not look at what the model says."""
    folder = _folder(work, str(base), context)
    if not folder.exists():
        shutil.copytree(base, folder)
        for file, key in (("config.json", "max_position_embeddings"), ("tokenizer_config.json", "model_max_length")):
            _write(folder / file, _read(base / file) | {key: context})
    return folder


def _folder(work: Path, *options: object) -> Path:
    return work / "checkpoints" / hashlib.sha256(json.dumps(options).encode()).hexdigest()[:12]


def _fill_vocabulary(folder: Path, given: int, wanted: int) -> None:
    """Add tokens to a checkpoint with tied embeddings."""
    from safetensors.torch import load_file, save_file  # only this copy needs torch

    weights = load_file(folder / "model.safetensors")
    embeddings = weights["model.embed_tokens.weight"]
    filled = embeddings.new_zeros(wanted, embeddings.shape[1])
    filled[:given] = embeddings
    weights["model.embed_tokens.weight"] = filled
    save_file(weights, folder / "model.safetensors")
    _write(folder / "config.json", _read(folder / "config.json") | {"vocab_size": wanted})
    words = _read(folder / "tokenizer.json")
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    words["added_tokens"] += [{"id": token, "content": f"<|unused {token}|>"} | flags for token in range(given, wanted)]
    _write(folder / "tokenizer.json", words)


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
