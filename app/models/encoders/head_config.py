"""Reads the classification head of an encoder: its layers, the names of labels, and the function of logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from app.errors import CheckpointInvalid
from app.models.config_reader import ConfigReader
from app.models.encoders.config import DenseActivation, HeadConfig, ScoreFunction
from app.models.encoders.families import EncoderClass

# Last part of a torch module's path in sentence-transformers files -> activation.
TORCH_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "Tanh": "tanh",
    "Identity": "identity",
    "ReLU": "relu",
    "GELU": "gelu",
    "SiLU": "silu",
}
_CONFIG_ACTIVATIONS: Mapping[str, DenseActivation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "tanh": "tanh",
}
# Activation of the first layer of a family's head, by the kind of head.
_HEAD_ACTIVATIONS: Mapping[str, DenseActivation] = {"tanh": "tanh", "relu": "relu", "gelu": "gelu"}
# Kinds of problems, as transformers' configuration_utils.py checks them.
_PROBLEMS = (None, "regression", "single_label_classification", "multi_label_classification")
_DEFAULT_LABELS = 2  # default of transformers


def read_head(kind: EncoderClass, config: ConfigReader) -> HeadConfig:
    """Return the head of the family's ForSequenceClassification."""
    if kind.stem == "EuroBert":
        return HeadConfig(
            pooling=_pooling(config, {"bos": "cls", "mean": "mean", "late": "late"}, "late"), activation="gelu"
        )
    if kind.family is None:
        return HeadConfig(pooling="last", dense=False, bias=False)
    if kind.family.head == "normed":
        bias, activation = config.boolean("classifier_bias", False), _activation(config)
        return HeadConfig(_pooling(config, {"cls": "cls", "mean": "mean"}, "cls"), True, bias, activation, norm=True)
    return HeadConfig(activation=_HEAD_ACTIVATIONS[kind.family.head])


def _pooling(
    config: ConfigReader, known: Mapping[str, Literal["cls", "mean", "late"]], default: str
) -> Literal["cls", "mean", "late"]:
    name = config.text("classifier_pooling", default)
    if name not in known:
        raise CheckpointInvalid(f"config.json: classifier_pooling {name!r} is not known; known are {', '.join(known)}.")
    return known[name]


def _activation(config: ConfigReader) -> DenseActivation:
    name = config.text("classifier_activation", "gelu")
    if name not in _CONFIG_ACTIVATIONS:
        raise CheckpointInvalid(
            f"config.json: classifier_activation {name!r} is not known; known are {', '.join(_CONFIG_ACTIVATIONS)}."
        )
    return _CONFIG_ACTIVATIONS[name]


def read_labels(config: ConfigReader) -> tuple[str, ...]:
    """Return the label names by number from `id2label`, or LABEL_0 and so on as in transformers."""
    named = config.section("id2label").values
    if not named:
        return tuple(f"LABEL_{number}" for number in range(config.integer("num_labels", _DEFAULT_LABELS)))
    labels = [named.get(str(number)) for number in range(len(named))]
    if not all(isinstance(label, str) for label in labels):
        raise CheckpointInvalid(f"config.json: id2label must name the labels 0 to {len(named) - 1} by strings.")
    return tuple(str(label) for label in labels)


def read_score_function(config: ConfigReader, num_labels: int) -> ScoreFunction:
    """Return the function that turns logits into scores.

    A single label gets the function that the checkpoint names. Otherwise `problem_type` decides: the values of a
    regression are the scores, one label and several independent ones get a sigmoid, and others a softmax.

    Source: transformers' pipelines/text_classification.py.
    """
    named = config.section("sentence_transformers").values.get("activation_fn")
    named = config.values.get("sbert_ce_default_activation_function") if named is None else named
    if num_labels == 1 and named is not None:
        return score_function(named)
    problem = config.values.get("problem_type")
    if problem not in _PROBLEMS:
        known = ", ".join(filter(None, _PROBLEMS))
        raise CheckpointInvalid(f"config.json: problem_type {problem!r} is not known; known are {known}.")
    if problem == "regression":
        return "identity"
    return "sigmoid" if num_labels == 1 or problem == "multi_label_classification" else "softmax"


def score_function(path: Any) -> ScoreFunction:
    """Return the score function for the name of a torch module."""
    name = str(path).rpartition(".")[2]
    if name not in ("Sigmoid", "Identity", "Softmax"):
        raise CheckpointInvalid(
            f"The score function {path!r} of this cross-encoder is not supported; supported are Sigmoid, Identity and Softmax."
        )
    return "sigmoid" if name == "Sigmoid" else "identity" if name == "Identity" else "softmax"
