"""The sampling parameters that a checkpoint prefers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.server.startup import FOLLOWED, REFUSED, WITHOUT_EFFECT, _generation_config, sampling_defaults
from app.weights.checkpoint import open_checkpoint
from tiny_checkpoints import write_checkpoint


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


@pytest.mark.parametrize("name", REFUSED)
def test_ways_of_sampling_that_are_not_offered_are_refused_by_name(name: str) -> None:
    with pytest.raises(CheckpointInvalid, match=f"generation_config.json: {name} is .*, which is not offered"):
        sampling_defaults({name: [[3, 4]]})
    for neutral in (*REFUSED[name], None):
        assert sampling_defaults({name: neutral}) == {}


def test_every_name_of_transformers_is_known() -> None:
    from transformers import GenerationConfig

    known = FOLLOWED.keys() | REFUSED.keys() | WITHOUT_EFFECT
    assert set(vars(GenerationConfig())) - known == set()
    assert not FOLLOWED.keys() & WITHOUT_EFFECT and not REFUSED.keys() & WITHOUT_EFFECT


def test_unknown_names_are_told(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        assert sampling_defaults({"chat_format": "chatml", "do_sample": True}) == {}
    assert "without effect: chat_format" in caplog.text


def test_older_checkpoints_have_the_parameters_in_config_json(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, temperature=0.3, typical_p=1.0)
    assert sampling_defaults(_generation_config(open_checkpoint(directory))) == {}
    (directory / "generation_config.json").unlink()
    assert sampling_defaults(_generation_config(open_checkpoint(directory))) == {"temperature": 0.3}
