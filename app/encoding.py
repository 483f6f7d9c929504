"""Types between the service and the API dialects for encoders and exported programs.

They are the requests and the arrays returned, all plain frozen values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.generation import Usage
from app.messages import Array, Text, Timings
from app.metrics import Api

# A text, a pair that is read as one (a query and a document), or token ids, to which no special tokens are added.
TextInput = str | tuple[str, str] | Text


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """Texts for an encoder. `outputs` are some of the model's: `embedding`, `logits`, `last_hidden_state`.

    `request_id` is what the client sees; it need not be unique. A text that is too long is refused, or truncated
    if `truncate` is set: at its end, or at its start if `keeps_end`. `normalize` None means as the checkpoint
    says, `dimensions` None means all. `prompt` names one of the checkpoint's prompts, which is put before each
    text; None means its default. The first `num_queries` texts are queries and the others documents; each kind
    gets its own prompt if the checkpoint has one. `field` is the dialect's name for the texts, used in error
    messages.
    """

    inputs: tuple[TextInput, ...]
    outputs: tuple[str, ...]
    api: Api
    request_id: str
    truncate: bool = False
    keeps_end: bool = False
    normalize: bool | None = None
    dimensions: int | None = None
    prompt: str | None = None
    num_queries: int = 0
    field: str = "input"


@dataclass(frozen=True, slots=True)
class Encoded:
    """Result of an `EncodingRequest`.

    `arrays` maps an output to its array as in `messages.ArraysReady`. `lengths` are the token counts of the
    texts, in order.
    """

    arrays: Mapping[str, Array]
    timings: Timings
    lengths: tuple[int, ...]

    @property
    def usage(self) -> Usage:
        """Token counts for the response."""
        return Usage(sum(self.lengths))


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Named tensors for an exported program, already checked against its signature.

    `outputs` are the requested names.
    """

    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    api: Api
    request_id: str


@dataclass(frozen=True, slots=True)
class Inferred:
    """Result of an `InferenceRequest`: `arrays` maps an output to its array, with as many rows as the inputs."""

    arrays: Mapping[str, Array]
    timings: Timings
