"""Selects the texts of a step and its time, so that neither long nor short requests wait for each other. Counts only.

Nothing is padded, so texts of any length may share a step without extra cost; but all texts of a step end together.
Therefore half of a step belongs to the oldest request. The rest goes to requests in arrival order, except that larger
requests yield to smaller ones: requests that fit in one step wait only for each other and for half of what is larger.
(With the smallest first among them too, p99 was 8 times p50 with 32 clients.)

`BatchingDelay` decides how long a step waits for more texts, from the measured step times; without measurements there
is no wait. Waiting for new clients does not make anything faster, since other requests arrive while a step runs
(tests/unit/engine/encoder/test_batching_delay_simulated.py simulates this). Clients that were just answered are
different. Each sends its next request a moment later, just too late for the step that then begins, so two such clients
would always alternate in separate steps.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Generic, Protocol, TypeVar

from app.engine.scheduler.policy import size_class
from app.hardware.step_times import StepTimes
from app.messages import Array, Encode, Text
from app.metrics.steps import StepStats, StepTimeModel

FLOAT_BYTES = 4
TextLength = tuple[int, int]  # (tokens of a text, its negative index), so that the first of equal texts sorts last
_RECENT_RETURNS = 8
_RECENT_ENDS = 4
_MIN_SAVING_RATIO = 4  # waiting pays as long as a return takes no more than a quarter of what it saves
_RETURN_TIMES_TO_WAIT = 2  # number of usual return times to wait
_GOOD_STEPS = 32  # steps, after which the limit is doubled; a step that then fails is repeated, and no request fails


class TakenText(Protocol):
    @property
    def num_tokens(self) -> int: ...


TakenT = TypeVar("TakenT", bound=TakenText)


class SharesStep(Protocol[TakenT]):
    @property
    def longest(self) -> int:
        """Tokens of the longest text that is left, which a step cannot split."""

    def size_class(self, step_tokens: int) -> int: ...

    def take(self, capacity: TextCapacity) -> list[TakenT]: ...


@dataclass(frozen=True, slots=True)
class TextCapacity:
    tokens: int
    texts: int

    def remaining_after(self, spans: Collection[TakenText]) -> TextCapacity:
        return TextCapacity(self.tokens - sum(span.num_tokens for span in spans), self.texts - len(spans))


def share_step(requests: Sequence[SharesStep[TakenT]], capacity: TextCapacity) -> list[TakenT]:
    """Take the texts of a step from at least one request; the oldest is first.

    Half of the step belongs to the oldest request, and in any case its longest text. The rest goes to requests of the
    smallest size class, in order of arrival. The predicted wait uses the same rule.
    """
    oldest = requests[0]
    half = TextCapacity(capacity.tokens // 2, max(capacity.texts // 2, 1))
    taken = oldest.take(TextCapacity(max(half.tokens, oldest.longest), half.texts))
    whole, capacity = capacity.tokens, capacity.remaining_after(taken)
    for request in sorted(requests, key=lambda request: request.size_class(whole)):
        if capacity.tokens <= 0 or capacity.texts <= 0:
            break
        more = request.take(capacity)
        capacity = capacity.remaining_after(more)
        taken += more
    return taken


@dataclass(slots=True, eq=False)
class EncodeState:
    """An `Encode` request in the engine. `left` has its texts still to be computed, the longest last.

    `alone`: a step with it has failed, so it runs without others, to find the request that causes the failure.
    """

    message: Encode
    remaining: list[TextLength]
    num_tokens: int
    tokens_left: int
    results: dict[int, dict[str, bytes]] = field(default_factory=dict)  # key: index of the text
    started_at: float | None = None
    runs_alone: bool = False

    @classmethod
    def from_message(cls, message: Encode) -> EncodeState:
        left = sorted((len(text.token_ids), -index) for index, text in enumerate(message.texts))
        num_tokens = sum(tokens for tokens, _ in left)
        return cls(message, left, num_tokens, num_tokens)

    @property
    def longest(self) -> int:
        return self.remaining[-1][0] if self.remaining else 0

    @property
    def is_done(self) -> bool:
        return len(self.results) == len(self.message.texts)

    def size_class(self, step_tokens: int) -> int:
        return size_class(self.tokens_left, step_tokens)

    def take(self, capacity: TextCapacity) -> list[TextSpan]:
        """Take the texts that fit, the longest first: shorter ones fit more easily into later steps."""
        taken: list[TextSpan] = []
        while capacity.texts > 0 and (at := bisect_right(self.remaining, (capacity.tokens, 0))) > 0:
            tokens, index = self.remaining.pop(at - 1)
            capacity = TextCapacity(capacity.tokens - tokens, capacity.texts - 1)
            self.tokens_left -= tokens
            taken.append(TextSpan(self, -index, tokens))
        return taken

    def spans(self) -> list[TextSpan]:
        return [TextSpan(self, index, len(text.token_ids)) for index, text in enumerate(self.message.texts)]

    def put_back(self, spans: Iterable[TextSpan]) -> None:
        self.remaining = sorted([*self.remaining, *((span.num_tokens, -span.index) for span in spans)])
        self.tokens_left = sum(tokens for tokens, _ in self.remaining)

    def arrays(self) -> dict[str, Array]:
        """Return all requested outputs with texts in order. Call it when the request is done."""
        return {name: self._array(name) for name in self.message.outputs}

    def _array(self, name: str) -> Array:
        parts = [self.results[index][name] for index in range(len(self.message.texts))]
        each_token = name == "last_hidden_state"
        rows = self.num_tokens if each_token else len(parts)
        joined = parts[0] if len(parts) == 1 else b"".join(parts)
        return Array("FP32", (rows, len(joined) // FLOAT_BYTES // rows), joined)


@dataclass(frozen=True, slots=True)
class TextSpan:
    request: EncodeState
    index: int
    num_tokens: int

    @property
    def text(self) -> Text:
        return self.request.message.texts[self.index]


class Queued(Protocol):
    """A request in an engine: an `Encode` or another message, and what is left of it to compute."""

    started_at: float | None

    @property
    def message(self) -> Any: ...

    @property
    def tokens_left(self) -> int: ...


QueuedT = TypeVar("QueuedT", bound=Queued)


class RequestQueue(Generic[QueuedT]):
    """Open requests, the oldest first. The requests of a batch stay here until they are done or removed."""

    def __init__(self) -> None:
        self._requests: dict[str, QueuedT] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    @property
    def oldest(self) -> QueuedT:
        return next(iter(self._requests.values()))

    @property
    def requests(self) -> Collection[QueuedT]:
        return self._requests.values()

    @property
    def num_tokens(self) -> int:
        return sum(request.tokens_left for request in self._requests.values())

    def push(self, request: QueuedT) -> QueuedT:
        self._requests[request.message.request_id] = request
        return request

    def remove(self, request_id: str) -> QueuedT | None:
        return self._requests.pop(request_id, None)


class TextQueue(RequestQueue[EncodeState]):
    def add(self, message: Encode) -> EncodeState:
        return self.push(EncodeState.from_message(message))

    def take(self, capacity: TextCapacity) -> tuple[TextSpan, ...]:
        """Take the next batch, with the longest text that is left of the oldest request, whatever its length."""
        # all texts of the others are in flight
        left = [request for request in self._requests.values() if request.remaining]
        if not left:
            return ()
        alone = next((request for request in left if request.runs_alone), None)
        if alone is not None:
            return tuple(alone.take(TextCapacity(max(capacity.tokens, alone.longest), capacity.texts)))
        return tuple(share_step(left, capacity))


class BatchingDelay:
    """The batching delay of one engine, whose steps are planned for at most `target_tokens` tokens."""

    def __init__(self, target_tokens: int, model: StepTimeModel | None = None, *, oldest_first: bool = False) -> None:
        self.target_tokens, self._oldest_first = target_tokens, oldest_first
        self.model = model or StepTimeModel()
        self._returns: deque[tuple[float, int]] = deque(
            maxlen=_RECENT_RETURNS
        )  # (seconds from an answer to the next request, tokens of that request)
        # end times of steps that answered a request, and after which no request has arrived yet
        self._ends: deque[float] = deque(maxlen=_RECENT_ENDS)
        self._answered_at = 0.0  # time at which the last step answered requests
        self._expected_returns = 0  # requests that this step answered, minus those that arrived since

    @property
    def step_times(self) -> StepTimes | None:
        return self.model.step_times(self.target_tokens, oldest_first=self._oldest_first)

    def observe(self, step: StepStats) -> None:
        self.model.observe(step)

    def observe_answers(self, at: float, requests: int) -> None:
        self._answered_at, self._expected_returns = at, requests
        self._ends.append(at)

    def observe_arrival(self, at: float, tokens: int) -> None:
        """Record a request, which may have arrived during a step, before other steps ended."""
        self._expected_returns -= at >= self._answered_at
        before = [end for end in self._ends if end <= at]
        if before:
            self._returns.append((at - before[-1], tokens))
            self._ends = deque((end for end in self._ends if end > at), maxlen=_RECENT_ENDS)

    def batching_delay_seconds(self, tokens: int, now: float) -> float:
        """Return the seconds that the next step may wait for more texts than the `tokens` that are queued.

        Two steps cost more than one with the texts of both, since part of a step's cost is fixed. If clients return
        much faster than that difference, waiting for them pays. The wait ends when as many requests have arrived as
        were answered. A request to an engine that was idle for longer does not wait.
        """
        if tokens >= self.target_tokens or self._expected_returns <= 0 or len(self._returns) < _RECENT_RETURNS:
            return 0.0
        until = self._answered_at + _RETURN_TIMES_TO_WAIT * median(seconds for seconds, _ in self._returns)
        if until <= now or (step_times := self.step_times) is None:
            return 0.0
        together = min(tokens + int(median(each for _, each in self._returns)), self.target_tokens)
        saved = step_times.encode(tokens) + step_times.encode(together - tokens) - step_times.encode(together)
        return until - now if _MIN_SAVING_RATIO * (until - self._answered_at) <= _RETURN_TIMES_TO_WAIT * saved else 0.0


class TextBudget:
    """The batch limit of one engine. Texts are never divided, so the smallest step is one text."""

    def __init__(self, most_texts: int) -> None:
        self._most_texts = most_texts
        self._reduced: TextCapacity | None = None  # None: as planned
        self._good_steps = 0

    def capacity(self, target_tokens: int) -> TextCapacity:
        if self._reduced is None:
            return TextCapacity(target_tokens, self._most_texts)
        return TextCapacity(min(self._reduced.tokens, target_tokens), min(self._reduced.texts, self._most_texts))

    def shrink(self, spans: Collection[TextSpan]) -> bool:
        """Halve the limit after these texts needed too much memory. Return False if there is only one text."""
        if len(spans) < 2:
            return False
        self._reduced, self._good_steps = TextCapacity(sum(span.num_tokens for span in spans) // 2, len(spans) // 2), 0
        return True

    def succeeded(self, target_tokens: int) -> None:
        if self._reduced is None:
            return
        self._good_steps += 1
        if self._good_steps < _GOOD_STEPS:
            return
        more = TextCapacity(2 * self._reduced.tokens, 2 * self._reduced.texts)
        self._reduced, self._good_steps = more, 0
        if more.tokens >= target_tokens and more.texts >= self._most_texts:
            self._reduced = None
