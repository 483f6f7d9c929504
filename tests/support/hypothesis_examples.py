"""Number of hypothesis examples per test: a quarter, and all of them in `make fuzz`, which sets FUZZ_EXAMPLES.

Examples are derandomized, so every run of one state of the code tries the same.
"""

from __future__ import annotations

import os

FUZZ_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "0"))


def examples(in_full: int) -> int:
    """Return `in_full` in `make fuzz`, else a quarter of it, but at least 10."""
    return in_full if FUZZ_EXAMPLES else min(in_full, max(in_full // 4, 10))
