"""One request's answer as it grows: the worker's events become pieces of text, and each choice ends exactly once.

Plain bookkeeping on the event loop, told the time; waiting, timers and the way to the worker are the service's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from app.generation import ChoiceFinished, Piece, ScoredToken, TextDelta, Usage
from app.messages import FinishReason, Generate, SequenceFinished, Timings, TokenLogprob, TokensReady
from app.metrics import Metrics
from app.text.stream import IncrementalText
from app.text.tokenizer import Tokenizer

# Of several choices with different endings the request's own is the first of these: what went least as it was meant to.
_WORST_FIRST: tuple[FinishReason, ...] = ("timeout", "aborted", "length", "stop")


@dataclass(slots=True)
class Choice:
    """One choice while it grows. What has been taken and not told waits in `token_ids` and `logprobs` for its text."""

    index: int
    text: IncrementalText
    reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    told: bool = False  # a delta has carried the timings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)


class Answer:
    """`continues_prompt`: the text goes on where the prompt ends, as a completion does; a chat's answer begins a text."""

    def __init__(self, request: Generate, tokenizer: Tokenizer, metrics: Metrics, continues_prompt: bool) -> None:
        context = request.token_ids if continues_prompt else ()
        texts = [IncrementalText(tokenizer, request.params.stop, context) for _ in range(request.params.n)]
        self._choices = [Choice(index, text) for index, text in enumerate(texts)]
        self._request, self._tokenizer, self._metrics = request, tokenizer, metrics
        self.num_cached_tokens = 0
        self._foretold: tuple[float, float] | None = None  # seconds to the first token, and when that was said

    @property
    def finished(self) -> bool:
        return all(choice.reason is not None for choice in self._choices)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._request.token_ids)

    @property
    def num_completion_tokens(self) -> int:
        return sum(choice.num_tokens for choice in self._choices)

    @property
    def outcome(self) -> FinishReason:
        """How the request as a whole has ended."""
        reasons = {choice.reason for choice in self._choices}
        return next((reason for reason in _WORST_FIRST if reason in reasons), "aborted")

    def foretell(self, seconds: float | None, now: float) -> None:
        """What the first token will take from now; None: nobody knows."""
        self._foretold = None if seconds is None else (seconds, now)

    def take(self, event: TokensReady | SequenceFinished, now: float) -> Iterator[Piece]:
        """The pieces that an event leads to. What still comes for a choice that has ended is passed over.

        A choice whose `ChoiceFinished` answers a `TokensReady` ended by a stop string, of which the worker does not know.
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
        """Ends every choice that has not ended, with what it has."""
        for choice in self._choices:
            if choice.reason is None:
                yield from self._finish(choice, reason, now)

    def _count(self, choice: Choice, event: TokensReady | SequenceFinished, now: float) -> None:
        """Notes when tokens came and tells the metrics: those of one step came after one wait. A stop token is no text, and counts."""
        if event.timings is not None:
            choice.timings = event.timings
            if choice.index == 0:  # the others find their prompt in the cache because choice 0 has read it
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
                choice.num_tokens -= len(event.token_ids) - place - 1  # a stop string before the last: the rest never was
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
        """The text with the tokens taken since the last one; a choice's first carries its timings."""
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
