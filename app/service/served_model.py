"""Description of a loaded checkpoint for the service, by kind (decoder, encoder or exported program), and its scores.

An encoder's vectors and logits are converted to scores in FP32.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy
from numpy.typing import NDArray

from app.errors import WrongModelKind
from app.messages import MAX_LOGPROBS, Array, Signature
from app.models.encoders.config import EncoderConfig
from app.models.program_graph import ProgramSizes
from app.models.transformers_tasks import TaskConfig
from app.service.pictures import ChatPictureReader
from app.text.chat import ChatTemplate
from app.text.grammar import GrammarCompiler
from app.text.reasoning import ReasoningFormat
from app.text.source_text import SourceText
from app.text.tokenizer import Tokenizer
from app.text.tool_formats import TOOL_FORMATS, ToolFormat
from app.weights.program_description import ProgramDescription

ModelKind = Literal["decoder", "encoder", "program", "tasks"]

MIN_HELD_BYTES = 2**28  # about a hundred images, or what a small machine leaves to its allocator

# Memory that the tokenizers library takes for a byte of text: 130 to 155 bytes were measured, by vocabulary and text.
TOKENIZER_BYTES = 160
# Bytes of a text for each token of the context that are tokenized on every machine: English has 4 to 5.
MIN_BYTES_PER_TOKEN = 8
MEAN_BYTES_PER_TOKEN = 4
HELD_BYTES_DIVISOR = 32  # 1/32 of memory: half of what the plan leaves in addition to weights and activations


@dataclass(frozen=True, slots=True)
class ServingLimits:
    """Limits that the plan sets.

    `request_timeout_seconds` counts from arrival to the last token. `vocab_size` is the number of rows of the
    embedding. `max_held_bytes` bounds the texts, tensors and results of all open requests together. `max_logprobs`
    bounds the log-probabilities at each token; -1: all. `has_priorities`: clients may order their requests.
    """

    max_model_len: int
    max_running_seqs: int
    max_waiting_requests: int
    request_timeout_seconds: float
    vocab_size: int
    tokenizer_threads: int = 2
    max_held_bytes: int = MIN_HELD_BYTES
    max_logprobs: int = MAX_LOGPROBS
    has_priorities: bool = False

    @property
    def max_text_bytes(self) -> int:
        """Bytes that one call of the tokenizer may take.

        All threads together then take at most `max_held_bytes`, or what the longest context needs.
        """
        share = self.max_held_bytes // (self.tokenizer_threads * TOKENIZER_BYTES)
        return max(MIN_BYTES_PER_TOKEN * self.max_model_len, share)


@dataclass(frozen=True, slots=True)
class ServedDecoder:
    """A model that generates text. `chat` is None without a template, `reasoning_format` without reasoning.

    `sampling_defaults` are the parameters of `SamplingParams` that the checkpoint prefers. `source` is there if an
    encoder reads the prompt. Without `pictures`, `no_pictures` says why none can be read.
    """

    name: str
    limits: ServingLimits
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    sampling_defaults: Mapping[str, Any] = field(default_factory=dict)
    grammars: GrammarCompiler | None = None
    tool_format: ToolFormat = TOOL_FORMATS["hermes"]
    reasoning_format: ReasoningFormat | None = None
    pictures: ChatPictureReader | None = None
    no_pictures: str = "this server's models read text"
    source: SourceText | None = None

    @property
    def context(self) -> int:
        """The tokens of prompt and completion together; of a model with an encoder, of the source and one more."""
        most = self.limits.max_model_len
        return most if self.source is None else min(most - 1, self.source.max_source_len + 1)

    def close(self) -> None:
        """End the processes of the chat template and of grammars."""
        for owner in (self.chat, self.grammars):
            if owner is not None:
                owner.close()

    @property
    def kind(self) -> ModelKind:
        return "decoder"


@dataclass(frozen=True, slots=True)
class ServedEncoder:
    """A model that returns embeddings, or scores for `labels`."""

    name: str
    limits: ServingLimits
    tokenizer: Tokenizer
    config: EncoderConfig

    @property
    def kind(self) -> ModelKind:
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
        return logits_to_scores(logits, self.config.scores)


@dataclass(frozen=True, slots=True)
class ServedProgram:
    """An exported program with named input and output tensors. `sizes` None: inputs may have any free sizes.

    `platform` is its format, by Triton's names.
    """

    name: str
    limits: ServingLimits
    signature: Signature
    sizes: ProgramSizes | None = None
    description: ProgramDescription = field(default_factory=ProgramDescription)
    platform: str = "pytorch_export"

    @property
    def kind(self) -> ModelKind:
        return "program"


@dataclass(frozen=True, slots=True)
class ServedTasks:
    """A model that does tasks besides generation, which transformers computes."""

    name: str
    limits: ServingLimits
    config: TaskConfig

    @property
    def kind(self) -> ModelKind:
        return "tasks"

    @property
    def tasks(self) -> tuple[str, ...]:
        return self.config.tasks

    def expected_tokens(self, num_bytes: int) -> int:
        """Return about how many tokens inputs of so many bytes are, by which waits are predicted."""
        return min(self.limits.max_model_len, 1 + num_bytes // MEAN_BYTES_PER_TOKEN)


ServedModel = ServedDecoder | ServedEncoder | ServedProgram | ServedTasks


def wrong_kind_error(model: ServedModel) -> WrongModelKind:
    """Return the error that says what this kind of model cannot do, and which routes it has."""
    return WrongModelKind(f"{model.name!r} {_WRONG[model.kind]}", field="model")


_WRONG: Mapping[ModelKind, str] = {
    "decoder": (
        "generates text and makes no embeddings or scores: use /v1/chat/completions, /v1/completions or /generate, or serve an encoder."
    ),
    "encoder": (
        "is an encoder and generates no text: use /v1/embeddings, /v1/rerank, /v1/classify or /embed, or serve a decoder."
    ),
    "tasks": "does tasks that are neither generation nor embeddings: use /pipeline/{task}; GET /v2/models/{name} has its tasks.",
    "program": "is an exported program with tensors of its own names: use /v2/models/{name}/infer, the Open Inference Protocol.",
}

FloatArray = NDArray[numpy.float32]

ScoreFunction = Literal["softmax", "sigmoid", "identity"]


def to_numpy(array: Array) -> FloatArray:
    """Return an FP32 array as a numpy array of its shape, without a copy."""
    return numpy.frombuffer(array.data, dtype="<f4").reshape(array.shape)


def logits_to_scores(logits: Array, meaning: ScoreFunction) -> Array:
    """Return scores for logits [texts, labels], in the same shape.

    With `softmax` each row sums to 1; with `sigmoid` each score is in [0, 1]; with `identity` the logits are returned.
    """
    return Array("FP32", logits.shape, apply_score_function(to_numpy(logits), meaning).astype("<f4").tobytes())


def apply_score_function(logits: FloatArray, meaning: ScoreFunction) -> FloatArray:
    if meaning == "identity":
        return logits
    if meaning == "sigmoid":
        sigmoid: FloatArray = 1 / (1 + numpy.exp(-logits.clip(-80, 80)))
        return sigmoid
    exponentials: FloatArray = numpy.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: FloatArray = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return probabilities


def paired_similarities(queries: FloatArray, documents: FloatArray) -> FloatArray:
    """Return the cosine similarity of each document [n, size] to its query [n, size], or to the only one [1, size].

    The vectors need not have unit length. A zero vector has similarity 0 to every other.
    """
    similarities: FloatArray = (normalize(queries) * normalize(documents)).sum(axis=-1)
    return similarities


def normalize(vectors: FloatArray) -> FloatArray:
    lengths = numpy.sqrt((vectors * vectors).sum(axis=-1, keepdims=True))
    normalized: FloatArray = vectors / lengths.clip(1e-12)
    return normalized
