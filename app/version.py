"""The version number, read by pyproject.toml, `armature --version`, `/info` and the metrics."""

from __future__ import annotations

VERSION = "0.1.0"
