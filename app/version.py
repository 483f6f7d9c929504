"""The version, in the one place that pyproject.toml, `armature --version`, `/info` and the metrics read it from."""

VERSION = "0.1.0"
