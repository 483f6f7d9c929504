"""Number of hypothesis examples per test: all of them in continuous integration, a quarter on a developer's machine."""

from __future__ import annotations

import os

IN_CI = os.environ.get("CI", "") == "true"


def examples(in_ci: int) -> int:
    """Return `in_ci` if the environment has CI=true, else a quarter of it, but at least 10."""
    return in_ci if IN_CI else min(in_ci, max(in_ci // 4, 10))
