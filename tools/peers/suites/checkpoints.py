"""Copies of a checkpoint with the options that peers give to their servers and ours reads from the checkpoint."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any


def endless_checkpoint(base: Path, work: Path, temperature: float | None = None, template: str | None = None) -> Path:
    """Return a copy of `base` in `work` whose texts do not end, with a default temperature and a chat template.

    The small models of the peers' tests do not end a text within some dozen tokens, and tests count on that. So the end
    token of the copy is one that the model never writes.
    """
    name = hashlib.sha256(json.dumps([str(base), temperature, template]).encode()).hexdigest()[:12]
    folder = work / "checkpoints" / name
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
    return folder


def _read(file: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return content


def _write(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content), encoding="utf-8")
