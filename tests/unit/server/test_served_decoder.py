"""The sampling parameters that a checkpoint prefers."""

from __future__ import annotations

from typing import Any

import pytest

from app.server.served_decoder import sampling_defaults


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {}),
        (
            {"temperature": 0.6, "top_k": 20, "top_p": 1, "eos_token_id": 5},
            {"temperature": 0.6, "top_k": 20, "top_p": 1.0},
        ),
        ({"temperature": None, "repetition_penalty": 1.05}, {"repetition_penalty": 1.05}),
        ({"temperature": 9.0, "min_p": 0.1}, {"min_p": 0.1}),
        ({"temperature": "hot", "top_p": True}, {}),
    ],
)
def test_valid_values_are_kept_and_others_ignored(config: dict[str, Any], expected: dict[str, float]) -> None:
    assert sampling_defaults(config) == expected
