"""The version number, read by pyproject.toml, `armature --version`, `/info` and the metrics."""

VERSION = "0.1.0"
