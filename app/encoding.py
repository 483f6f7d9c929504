"""The words between the service and the faces for encoders and exported programs: what a client asks for, and the arrays that answer it.

Plain frozen values in our own vocabulary, as `generation.py` has them for decoders.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.generation import Usage
from app.messages import Array, Text, Timings
from app.metrics import Api

# A text, two that are read as one (a query and a document), or ids as they are: no special token is added to them.
TextInput = str | tuple[str, str] | Text


@dataclass(frozen=True, slots=True)
class EncodingRequest:
    """Texts for an encoder. `outputs` are some of the model's: `embedding`, `logits`, `last_hidden_state`.

    `request_id` is what the client sees; it need not be unique. A text that is too long is refused, or cut where `truncate` is set: at its
    end, or at its start where `keeps_end`. `normalize` None: as the checkpoint says. `dimensions` None: all. `prompt` is the name of one
    that the checkpoint has, put before each text; None: its default. The first `num_queries` are
    queries and the others documents: each have their own prompt where the checkpoint has one. `field` is what the dialect calls the texts.
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
    """`arrays` by output as in `messages.ArraysReady`; `lengths` are the tokens of each text, in order."""

    arrays: Mapping[str, Array]
    timings: Timings
    lengths: tuple[int, ...]

    @property
    def usage(self) -> Usage:
        return Usage(sum(self.lengths))


@dataclass(frozen=True, slots=True)
class InferenceRequest:
    """Named tensors for an exported program, already held against its signature; `outputs` are the names wanted back."""

    inputs: Mapping[str, Array]
    outputs: tuple[str, ...]
    api: Api
    request_id: str


@dataclass(frozen=True, slots=True)
class Inferred:
    """`arrays` by output, as many rows as the inputs had."""

    arrays: Mapping[str, Array]
    timings: Timings
