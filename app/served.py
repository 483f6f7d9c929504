"""Description of a loaded checkpoint for the service, by kind: decoder, encoder or exported program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from app import scores
from app.errors import WrongModelKind
from app.messages import Array, Signature
from app.models.encoder_config import EncoderConfig
from app.text.chat import ChatTemplate
from app.text.tokenizer import Tokenizer

Kind = Literal["decoder", "encoder", "program"]
LEAST_HELD_BYTES = 2**28  # about a hundred images, or what a small machine leaves to its allocator
HELD_SHARE = 32  # 1/32 of memory: half of what the plan leaves in addition to weights and activations


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that the plan sets.

    `request_timeout_seconds` counts from arrival to the last token. `vocab_size` is the number of rows of the
    embedding. `max_held_bytes` bounds the texts, tensors and results of all open requests together.
    """

    max_model_len: int
    max_running_seqs: int
    max_waiting_requests: int
    request_timeout_seconds: float
    vocab_size: int
    tokenizer_threads: int = 2
    max_held_bytes: int = LEAST_HELD_BYTES


@dataclass(frozen=True, slots=True)
class ServedDecoder:
    """A model that generates text. `chat` is None if it has no chat template."""

    name: str
    limits: Limits
    tokenizer: Tokenizer
    chat: ChatTemplate | None

    @property
    def kind(self) -> Kind:
        """Always `decoder`."""
        return "decoder"


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    """A model that returns embeddings, or scores for `labels`."""

    name: str
    limits: Limits
    tokenizer: Tokenizer
    config: EncoderConfig

    @property
    def kind(self) -> Kind:
        """Always `encoder`."""
        return "encoder"

    @property
    def labels(self) -> tuple[str, ...]:
        """Names of the classification labels; empty for an embedding model."""
        return self.config.labels

    @property
    def sizes(self) -> Mapping[str, int]:
        """Outputs of the model with their last dimension, the default output first."""
        sizes = {
            "embedding": self.config.embedding_size,
            "logits": len(self.labels),
            "last_hidden_state": self.config.hidden_size,
        }
        return {name: sizes[name] for name in self.config.outputs}

    def scores(self, logits: Array) -> Array:
        """Return scores for logits [texts, labels]: probabilities, or the logits if the checkpoint says so."""
        return scores.scores(logits, self.config.scores)


@dataclass(frozen=True, slots=True)
class ServedProgram:
    """An exported program with named input and output tensors."""

    name: str
    limits: Limits
    signature: Signature

    @property
    def kind(self) -> Kind:
        """Always `program`."""
        return "program"


ServedModel = ServedDecoder | ServedEncoder | ServedProgram


def wrong_kind(model: ServedModel) -> WrongModelKind:
    """Return the error that says what this kind of model cannot do, and which routes it has."""
    return WrongModelKind(f"{model.name!r} {_WRONG[model.kind]}", field="model")


_WRONG: Mapping[Kind, str] = {
    "decoder": (
        "generates text and makes no embeddings or scores: use /v1/chat/completions, /v1/completions or /generate, or serve an encoder."
    ),
    "encoder": (
        "is an encoder and generates no text: use /v1/embeddings, /v1/rerank, /v1/classify or /embed, or serve a decoder."
    ),
    "program": "is an exported program with tensors of its own names: use /v2/models/{name}/infer, the Open Inference Protocol.",
}
