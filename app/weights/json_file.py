"""A JSON object out of a checkpoint's file, or a refusal that names the file; what the operating system refuses is the caller's to tell."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.copies import remedy, under_way


def read_object(file: Path) -> Mapping[str, Any]:
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not a JSON object.")
    return values


def read_optional(file: Path) -> Mapping[str, Any]:
    """Empty where there is no such file."""
    return read_object(file) if file.exists() else {}


def read_json(file: Path) -> Any:
    if not file.is_file():
        raise CheckpointInvalid(
            f"{file.parent} has no {file.name}; a checkpoint is the whole directory as transformers saves it.{under_way(file.parent)}"
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not JSON: {error}. {remedy(file)}") from error
