"""The async face of the engine: admits, tokenises, hands to the worker thread and turns its events into pieces of text.

Lives on the event loop and knows no HTTP, no tensor and no dialect. The words it speaks are in `app/generation.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.generation import GenerationRequest, Piece
from app.messages import Command, Event, Snapshot
from app.metrics import Metrics
from app.text.chat import ChatTemplate
from app.text.tokenizer import Tokenizer


class WorkerPort(Protocol):
    """What the service sees of the worker: a mailbox and a few words about its state, readable from any thread."""

    @property
    def alive(self) -> bool: ...
    @property
    def ready(self) -> bool: ...
    @property
    def stage(self) -> str: ...
    @property
    def snapshot(self) -> Snapshot: ...
    def put(self, command: Command) -> None: ...


@dataclass(frozen=True, slots=True)
class Limits:
    """What the plan allows. `request_timeout_seconds` counts from arrival to the last token."""

    max_model_len: int
    max_running_seqs: int
    max_waiting_requests: int
    request_timeout_seconds: float
    vocab_size: int = 0  # ids the embedding knows; may be more than the tokenizer has
    tokenizer_threads: int = 2


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What the service needs of a loaded checkpoint. `chat` is None where it has no chat template."""

    name: str
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    limits: Limits


class Service:
    """Bound to the event loop that called `start`. Until `serve` was called and the worker is ready every request is refused as `NotReady`."""

    def __init__(self, worker: WorkerPort, metrics: Metrics) -> None: ...

    def serve(self, model: ServedModel) -> None:
        """Names the loaded model; from any thread, once, before the worker says ready."""

    async def start(self) -> None:
        """Binds to the running loop."""

    async def stop(self) -> None:
        """New requests get `ServiceStopping`; those still open end with it too. Does not touch the worker."""

    def drain(self) -> None:
        """New requests get `ServiceStopping`; open ones go on."""

    @property
    def alive(self) -> bool: ...

    @property
    def ready(self) -> bool: ...

    @property
    def stage(self) -> str:
        """Where loading is, for people: `ready`, `stopping`, or the worker's own words."""

    @property
    def snapshot(self) -> Snapshot: ...

    @property
    def num_open(self) -> int:
        """Requests admitted and not yet ended."""

    @property
    def model(self) -> ServedModel:
        """The loaded model; raises `NotReady` until there is one."""

    def on_events(self, events: Sequence[Event]) -> None:
        """The worker thread's callback, once a step."""

    def on_worker_exit(self) -> None:
        """The worker thread's last call: whatever is open fails with `StepFailed`."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[Piece]:
        """An async generator: `Accepted`, then deltas and one `ChoiceFinished` for each choice. Raises a `RequestError` at any piece.

        Whoever leaves early calls `aclose()` (`contextlib.aclosing`); cancelling the awaiting task does the same. Both send `Abort`.
        """

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    async def tokenize_chat(self, messages: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> list[int]: ...

    async def detokenize(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...
