"""A change touches as few files as `docs/design.md` says: existing examples, found by the patterns of its table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

COSTS = [
    # What was added, the pattern of its places, the files it may be in, and folders that only report on it.
    ("the setting speculation", r"(settings|plan\.steps)\.speculation\b|^    speculation: ", 3, ("bench",)),
    (
        "the setting itl_target_ms",
        r"settings\.itl_target_ms|plan\.steps\.itl_target_seconds|^    itl_target_\w+: ",
        3,
        (),
    ),
    ("the setting deterministic", r"(settings|plan\.steps)\.deterministic\b|^    deterministic: ", 5, ()),
    ("the setting kv_precision", r"(settings|plan\.weights)\.kv_precision\b|^    kv_precision: ", 5, ("bench", "cli")),
    ("a metric of steps", r"step_stalls", 1, ()),
    ("a metric of requests", r"_tpot_seconds|last_token\(", 2, ()),
    ("a gauge", r"armature_step_age_seconds", 1, ()),
]


@pytest.mark.parametrize("added, pattern, most, outside", COSTS, ids=[cost[0] for cost in COSTS])
def test_a_change_touches_few_files(added: str, pattern: str, most: int, outside: tuple[str, ...], root: Path) -> None:
    app = root / "app"
    found = [
        str(file.relative_to(app))
        for file in sorted(app.rglob("*.py"))
        if file.relative_to(app).parts[0] not in outside and re.search(pattern, file.read_text(), re.MULTILINE)
    ]
    assert 0 < len(found) <= most, (added, found)
