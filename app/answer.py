"""One request's completion while it grows: turns worker events into stream events.

Each choice finishes exactly once. This is plain bookkeeping on the event loop; the caller passes the current
time. Waiting, timers and sending to the worker are the service's task.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from app.generation import ChoiceFinished, Piece, ScoredToken, TextDelta, Usage
from app.messages import FinishReason, Generate, SequenceFinished, Timings, TokenLogprob, TokensReady
from app.metrics import Metrics
from app.text.stream import IncrementalText
from app.text.tokenizer import Tokenizer

# If the choices of a request have different finish reasons, the first of these that occurs is the request's.
_WORST_FIRST: tuple[FinishReason, ...] = ("timeout", "aborted", "length", "stop")


@dataclass(slots=True)
class Choice:
    """State of one choice while it grows.

    `token_ids` and `logprobs` hold tokens that were received but are not part of a `TextDelta` yet, because
    their text is incomplete.
    """

    index: int
    text: IncrementalText
    reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    told: bool = False  # True after the delta that carries the timings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)


class Answer:
    """Builder of one request's completion from the worker's events.

    `continues_prompt` is true for a completion, whose text continues the prompt's. A chat reply starts a new
    text.
    """

    def __init__(self, request: Generate, tokenizer: Tokenizer, metrics: Metrics, continues_prompt: bool) -> None:
        context = request.token_ids if continues_prompt else ()
        texts = [IncrementalText(tokenizer, request.params.stop, context) for _ in range(request.params.n)]
        self._choices = [Choice(index, text) for index, text in enumerate(texts)]
        self._request, self._tokenizer, self._metrics = request, tokenizer, metrics
        self.num_cached_tokens = 0
        self._foretold: tuple[float, float] | None = None  # predicted seconds to the first token, and when predicted

    @property
    def finished(self) -> bool:
        """True when every choice has finished."""
        return all(choice.reason is not None for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        """Number of prompt tokens."""
        return len(self._request.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        """Number of completion tokens received so far, over all choices."""
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def outcome(self) -> FinishReason:
        """Finish reason of the whole request: the worst one of its choices."""
        reasons = {choice.reason for choice in self._choices}
        return next((reason for reason in _WORST_FIRST if reason in reasons), "aborted")

    def foretell(self, seconds: float | None, now: float) -> None:
        """Record the predicted time from `now` to the first token; None means that it is unknown."""
        self._foretold = None if seconds is None else (seconds, now)

    def take(self, event: TokensReady | SequenceFinished, now: float) -> Iterator[Piece]:
        """Yield the stream events that follow from a worker event. Events for a finished choice are ignored.

        If a `TokensReady` yields a `ChoiceFinished`, the choice ended by a stop string. The worker does not know
        of stop strings, so the caller has to abort the choice there.
        """
        choice = self._choices[event.choice]
        if choice.reason is not None:
            return
        before = choice.num_tokens
        self._count(choice, event, now)
        yield from self._grow(choice, event)
        if choice.num_tokens > before:
            self._metrics.completion(choice.num_tokens - before)
        if choice.text.matched_stop is not None:
            yield from self._finish(choice, "stop", now)
        elif isinstance(event, SequenceFinished):
            yield from self._finish(choice, event.reason, now, event.stop_token_id)

    def end(self, reason: FinishReason, now: float) -> Iterator[Piece]:
        """Finish every unfinished choice with the text that it has."""
        for choice in self._choices:
            if choice.reason is None:
                yield from self._finish(choice, reason, now)

    def _count(self, choice: Choice, event: TokensReady | SequenceFinished, now: float) -> None:
        """Count new tokens and report their latencies to the metrics.

        All tokens of one step share one inter-token latency. A stop token produces no text but is counted.
        """
        if event.timings is not None:
            choice.timings = event.timings
            if choice.index == 0:  # the other choices hit the cache because choice 0 filled it
                self.num_cached_tokens = event.timings.cached_tokens
        total = choice.num_tokens + len(event.token_ids)
        if isinstance(event, SequenceFinished):
            total = max(total, event.num_completion_tokens)
        if total == choice.num_tokens:
            return
        if choice.first_token_at is None:
            if self.num_completion_tokens == 0:
                self._metrics.prompt(self.num_prompt_tokens, self.num_cached_tokens)
                if self._foretold is not None:
                    self._metrics.waited(self._foretold[0], now - self._foretold[1])
            choice.first_token_at = now
            self._metrics.first_token(choice.timings, now - self._request.arrived_at)
        elif now != choice.last_token_at:
            self._metrics.next_token(now - choice.last_token_at)
        choice.last_token_at, choice.num_tokens = now, total

    def _grow(self, choice: Choice, event: TokensReady | SequenceFinished) -> Iterator[TextDelta]:
        text = ""
        for place, token_id in enumerate(event.token_ids):
            choice.token_ids.append(token_id)
            if event.logprobs:
                choice.logprobs.append(self._scored(event.logprobs[place]))
            text += choice.text.push(token_id)
            if choice.text.matched_stop is not None:
                choice.num_tokens -= len(event.token_ids) - place - 1  # tokens after the stop string are dropped
                break
        if text:
            yield self._delta(choice, text)

    def _finish(self, choice: Choice, reason: FinishReason, now: float, stop_token_id: int | None = None) -> Iterator[Piece]:
        rest = choice.text.flush()
        if rest or choice.token_ids:
            yield self._delta(choice, rest)
        stop = choice.text.matched_stop
        choice.reason = reason if stop is None else "stop"
        timings = choice.timings
        if choice.first_token_at is not None:
            timings = replace(timings, decode_seconds=now - choice.first_token_at)
            if choice.num_tokens > 1:
                self._metrics.last_token((choice.last_token_at - choice.first_token_at) / (choice.num_tokens - 1))
        usage = Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens)
        yield ChoiceFinished(
            choice.index, choice.reason, usage, choice.num_tokens, timings, stop_token_id if stop is None else stop
        )

    def _delta(self, choice: Choice, text: str) -> TextDelta:
        """Return the text with the tokens received since the last delta.

        A choice's first delta carries its timings.
        """
        timings = None if choice.told else choice.timings
        delta = TextDelta(choice.index, text, tuple(choice.token_ids), tuple(choice.logprobs), timings)
        choice.told = True
        choice.token_ids.clear()
        choice.logprobs.clear()
        return delta

    def _scored(self, logprob: TokenLogprob) -> ScoredToken:
        top = tuple(self._score(token_id, value) for token_id, value in logprob.top)
        return self._score(logprob.token_id, logprob.logprob, top)

    def _score(self, token_id: int, logprob: float, top: tuple[ScoredToken, ...] = ()) -> ScoredToken:
        spelled = self._tokenizer.token_bytes(token_id)
        return ScoredToken(token_id, spelled.decode(errors="replace"), spelled, logprob, top)
