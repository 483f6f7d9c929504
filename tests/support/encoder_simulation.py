"""An `EncoderEngine` with a runner that computes nothing: each row names its text, so a mix-up is detected."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from app.engine.encoder.batching import BatchingDelay, TextSpan
from app.engine.encoder.engine import EncoderEngine, EncoderLimits
from app.messages import ArraysReady, Encode, Event, RequestFailed, Text

BUDGET, MAX_LEN, MAX_TEXTS = 64, 48, 8
POISON = 13  # a token that no step survives


class Wanting(RuntimeError):
    """There is not enough memory."""


class FakeRunner:
    """Of a text: its first token and its length as `embedding`, each of its tokens as `last_hidden_state`.

    `overlaps`: as on a device, where two batches at the most are under way; each is computed when it is waited for. What is `broken` says
    so then, what has more tokens than there is `memory` for at once.
    """

    model_seconds = 0.0
    is_native = False

    def __init__(self, overlaps: bool = False, memory: int | None = None) -> None:
        self.broken = False
        self.overlaps, self.memory = overlaps, memory
        self.batches: list[tuple[TextSpan, ...]] = []  # that were begun with
        self.wanting: list[int] = []  # tokens of those that there was no memory for
        self.current_stage: list[tuple[TextSpan, ...]] = []

    def launch(self, spans: Sequence[TextSpan]) -> tuple[TextSpan, ...]:
        tokens = sum(span.num_tokens for span in spans)
        if self.memory is not None and tokens > self.memory:
            self.wanting.append(tokens)
            raise Wanting(f"{tokens} tokens")
        assert len(self.current_stage) < (2 if self.overlaps else 1), "room for so many"
        self.batches.append(tuple(spans))
        self.current_stage.append(tuple(spans))
        return self.current_stage[-1]

    def wait(self, flight: tuple[TextSpan, ...]) -> list[dict[str, bytes]]:
        assert flight is self.current_stage[0], "in the order of launching"
        if self.broken or any(POISON in span.text.token_ids for span in flight):
            self.current_stage.clear()  # nobody waits for the next one either
            raise RuntimeError("this step is broken")
        del self.current_stage[0]
        return [rows_of(span.text) for span in flight]

    def survives(self, error: Exception) -> bool:
        return isinstance(error, Wanting)


def rows_of(text: Text) -> dict[str, bytes]:
    ids = text.token_ids
    return {
        "embedding": struct.pack("<2f", ids[0], len(ids)),
        "last_hidden_state": struct.pack(f"<{len(ids)}f", *ids),
    }


class EncoderSimulation:
    """Steps, and hears what everyone is told; each only once."""

    def __init__(
        self, budget: int = BUDGET, pace: BatchingDelay | None = None, runner: FakeRunner | None = None
    ) -> None:
        self.now = 0.0
        self.runner = runner or FakeRunner()
        limits = EncoderLimits(MAX_LEN, MAX_TEXTS, ("embedding", "last_hidden_state"))
        self.engine = EncoderEngine(self.runner, limits, pace or BatchingDelay(budget), lambda: self.now)
        self.budget = budget
        self.told: dict[str, ArraysReady | RequestFailed] = {}

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            assert isinstance(event, ArraysReady | RequestFailed)
            assert event.request_id not in self.told, "everyone ends once"
            self.told[event.request_id] = event

    def step(self) -> None:
        """As the worker does it: a step that raises is followed by `fail`."""
        self.now += 1.0
        try:
            events = self.engine.step()
        except RuntimeError:
            self.runner.current_stage.clear()
            events = self.engine.fail()
        self.hear(events)


def encode(
    name: str, *lengths: int, outputs: tuple[str, ...] = ("embedding",), first: int = 100, at: float = 0.0
) -> Encode:
    """Texts of such lengths, whose tokens count up from `first`, so that no two of a test are the same."""
    texts = tuple(
        Text(tuple(range(first + 50 * number, first + 50 * number + length))) for number, length in enumerate(lengths)
    )
    return Encode(name, texts, outputs, arrived_at=at)
