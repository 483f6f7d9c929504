"""The checkpoint that `make real-model` writes; tests that need it are skipped by name without it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.real_model import default_directory


def real_model() -> Path:
    """Return the directory of SmolLM2-135M-Instruct, or skip the test."""
    directory = default_directory()
    if not (directory / "model.safetensors").exists():
        pytest.skip("the real model is not here: `make real-model` writes it")
    return directory
