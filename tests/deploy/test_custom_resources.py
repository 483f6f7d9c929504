"""Every custom resource matches the definition of its kind; Kubernetes itself does not check its fields here."""

from __future__ import annotations

from pathlib import Path

import pytest

from external_tools import Manifest, built
from tests.deploy.custom_resources import complaints_of_definition, complaints_of_models, strict

OURS = tuple(f"../tests/deploy/overlays/{name}" for name in ("gateway", "keda", "kserve", "kserve-llm"))
MODELLED = {"ScaledObject", "Gateway", "HTTPRoute"}
DEFINED = {"InferencePool", "ClusterServingRuntime", "InferenceService", "LLMInferenceService"}


def custom(kinds: set[str]) -> list[Manifest]:
    """Each once, though several overlays may have it."""
    found = {
        (each["kind"], each["metadata"]["name"]): each
        for folder in OURS
        for each in built(folder)
        if each["kind"] in kinds
    }
    return list(found.values())


@pytest.mark.full
def test_types_and_validators_have_nothing_to_say(tmp_path: Path) -> None:
    """Once for all, since the compiler takes seconds to start."""
    ours = custom(MODELLED)
    assert {each["kind"] for each in ours} == MODELLED
    assert complaints_of_models(ours, tmp_path) == ""


@pytest.mark.full
@pytest.mark.parametrize("kind", sorted(DEFINED))
def test_nothing_is_said_that_the_definition_does_not_know(tmp_path: Path, kind: str) -> None:
    found = custom({kind})
    assert found
    assert complaints_of_definition(found, tmp_path) == ""


def test_a_strict_definition_refuses_what_it_does_not_name_and_leaves_open_what_is_open() -> None:
    text = {
        "type": "object",
        "properties": {"text": {"type": "string"}, "unused": {"type": "string"}},
        "required": ["text"],
    }
    definition = {
        "type": "object",
        "properties": {
            "open": {**text, "x-kubernetes-preserve-unknown-fields": True},
            "many": {"type": "array", "items": text},
            "map": {"type": "object", "additionalProperties": text},
        },
    }
    value = {"open": {"text": "", "more": 1}, "many": [{"text": ""}], "map": {"a": {"text": ""}}, "unknown": 1}
    closed = {**text, "properties": {"text": {"type": "string"}}, "additionalProperties": False}
    made = strict(definition, [value])
    assert made["additionalProperties"] is False
    assert set(made["properties"]) == {"open", "many", "map"}
    assert "additionalProperties" not in made["properties"]["open"]
    assert made["properties"]["many"]["items"] == made["properties"]["map"]["additionalProperties"] == closed
