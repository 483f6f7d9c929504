"""Chat templates and tokenizers of real models, which `make real-formats` gets. Tests that need an absent one are skipped."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.real_formats import default_directory

_TEMPLATES = default_directory() / "templates"


def real_templates() -> dict[str, Path]:
    """Return the files of all templates by their names; empty if there are none."""
    return {path.stem: path for path in sorted(_TEMPLATES.glob("*.jinja"))}


def real_template(name: str) -> str:
    """Return the source of a template, or skip the test."""
    path = _TEMPLATES / f"{name}.jinja"
    if not path.exists():
        pytest.skip(f"no template {name}: `make real-formats`")
    return path.read_text(encoding="utf-8")


def real_tokenizer(name: str) -> Path:
    """Return the directory of a tokenizer, or skip the test."""
    path = default_directory() / "tokenizers" / name
    if not path.is_dir():
        pytest.skip(f"no tokenizer {name}: `make real-formats`")
    return path
