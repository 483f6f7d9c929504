"""Reads JSON files of a checkpoint; errors name the file.

Errors of the operating system are left to the caller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.copies import remedy, under_way


def read_object(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file.

    Raises:
        CheckpointInvalid: The file does not exist, or is not a JSON object.
    """
    values = read_json(file)
    if not isinstance(values, dict):
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not a JSON object.")
    return values


def read_optional(file: Path) -> Mapping[str, Any]:
    """Return the JSON object in a file; empty if the file does not exist."""
    return read_object(file) if file.exists() else {}


def read_json(file: Path) -> Any:
    """Return the JSON value in a file.

    Raises:
        CheckpointInvalid: The file does not exist, or is not JSON.
    """
    if not file.is_file():
        raise CheckpointInvalid(
            f"{file.parent} has no {file.name}; a checkpoint is the whole directory as transformers saves it.{under_way(file.parent)}"
        )
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{file.name} in {file.parent} is not JSON: {error}. {remedy(file)}") from error
