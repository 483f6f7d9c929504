"""Generation with a decoder: one request from its prompt to its last text delta.

`CompletionBuilder` turns worker events into stream events. Each choice finishes exactly once. This is plain
bookkeeping on the event loop, and the caller passes the current time. `generate` waits, sets timers and sends to the
worker.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from app.errors import RequestTimeout
from app.messages import (
    Abort,
    FinishReason,
    Generate,
    LoadedAdapter,
    PromptScored,
    RequestFailed,
    SequenceFinished,
    Timings,
    TokenLogprob,
    TokensReady,
)
from app.metrics.instruments import Exemplar, Metrics
from app.service.admission import Permit
from app.service.engine_client import RequestPipeline, RequestRecord, TimedEvent
from app.service.inputs import prompt_size
from app.service.output import OutputParser
from app.service.prompt import SCORE_BYTES, read_prompt
from app.service.prompt_output import PromptOutput
from app.service.requests import Accepted, ChoiceFinished, GenerationRequest, ScoredToken, StreamEvent, TextDelta, Usage
from app.service.served_model import ServedDecoder
from app.text.detokenizer import IncrementalDetokenizer
from app.text.tokenizer import Tokenizer

# If the choices of a request have different finish reasons, the first of these that occurs is the request's.
_WORST_FIRST: tuple[FinishReason, ...] = ("timeout", "aborted", "length", "stop")


@dataclass(slots=True)
class ChoiceState:
    """State of one choice while it grows.

    `token_ids` and `logprobs` hold tokens that were received but are not part of a `TextDelta` yet, because
    their text is incomplete.
    """

    index: int
    text: IncrementalDetokenizer
    reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    timings_sent: bool = False  # True after the delta that carries the timings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)


class CompletionBuilder:
    """Builder of one request's completion from the worker's events.

    `continues_prompt` is true for a completion, whose text continues the prompt's. A chat reply starts a new
    text. `literals` are the special tokens that are part of the text, by id.
    """

    def __init__(
        self,
        request: Generate,
        tokenizer: Tokenizer,
        metrics: Metrics,
        continues_prompt: bool,
        literals: Mapping[int, str] = MappingProxyType({}),
    ) -> None:
        context, params = request.token_ids if continues_prompt else (), request.params
        texts = [
            IncrementalDetokenizer(tokenizer, params.stop, context, literals, params.include_stop, params.min_tokens)
            for _ in range(params.n)
        ]
        self._choices = [ChoiceState(index, text) for index, text in enumerate(texts)]
        self._request, self._tokenizer, self._metrics = request, tokenizer, metrics
        self.num_cached_tokens = 0
        self.exemplar: Exemplar | None = None  # set before the first event if the request is sampled
        self._predicted_wait: tuple[float, float] | None = (
            None  # predicted seconds to the first token, and when predicted
        )

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
    def first_token(self) -> tuple[float, Timings] | None:
        """When the first token of any choice came, and that choice's timings; None before."""
        begun = [(choice.first_token_at, choice.timings) for choice in self._choices]
        return min(((at, timings) for at, timings in begun if at is not None), key=lambda pair: pair[0], default=None)

    def phase_ends(self) -> dict[str, float]:
        """Return when queue, prefill and decode have ended, as far as they have begun; the decode with the last token."""
        if (first := self.first_token) is None:
            return {}
        first_at, timings = first
        started = self._request.arrived_at + timings.queue_seconds
        ends = {"queue": started, "prefill": started + timings.prefill_seconds}
        last_at = max(choice.last_token_at for choice in self._choices)
        return ends if last_at == first_at else ends | {"decode": last_at}

    @property
    def outcome(self) -> FinishReason:
        """Finish reason of the whole request: the worst one of its choices."""
        reasons = {choice.reason for choice in self._choices}
        return next((reason for reason in _WORST_FIRST if reason in reasons), "aborted")

    def set_predicted_wait(self, seconds: float | None, now: float) -> None:
        """Record the predicted time from `now` to the first token; None means that it is unknown."""
        self._predicted_wait = None if seconds is None else (seconds, now)

    def take(self, event: TokensReady | SequenceFinished, now: float) -> Iterator[StreamEvent]:
        """Yield the stream events that follow from a worker event. Events for a finished choice are ignored.

        If a `TokensReady` yields a `ChoiceFinished`, the choice ended by a stop string. The worker does not know
        of stop strings, so the caller has to abort the choice there.
        """
        choice = self._choices[event.choice]
        if choice.reason is not None:
            return
        before = choice.num_tokens
        self._count(choice, event, now)
        yield from self._append_tokens(choice, event)
        if choice.num_tokens > before:
            self._metrics.completion_tokens(choice.num_tokens - before)
        if choice.text.matched_stop is not None:
            yield from self._finish(choice, "stop", now)
        elif isinstance(event, SequenceFinished):
            yield from self._finish(choice, event.reason, now, event.stop_token_id, event.stop_logprob)

    def end(self, reason: FinishReason, now: float) -> Iterator[StreamEvent]:
        """Finish every unfinished choice with the text that it has."""
        for choice in self._choices:
            if choice.reason is None:
                yield from self._finish(choice, reason, now)

    def _count(self, choice: ChoiceState, event: TokensReady | SequenceFinished, now: float) -> None:
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
            if self._request.params.max_tokens == 0 and event.reason == "length" and choice.index == 0:
                self._metrics.prompt_tokens(self.num_prompt_tokens, self.num_cached_tokens)
        if total == choice.num_tokens:
            return
        if choice.first_token_at is None:
            if self.num_completion_tokens == 0:
                self._metrics.prompt_tokens(self.num_prompt_tokens, self.num_cached_tokens)
                if self._predicted_wait is not None:
                    self._metrics.wait_measured(self._predicted_wait[0], now - self._predicted_wait[1])
            choice.first_token_at = now
            self._metrics.first_token(choice.timings, now - self._request.arrived_at, self.exemplar)
        elif now != choice.last_token_at:
            self._metrics.next_token(now - choice.last_token_at, self.exemplar)
        choice.last_token_at, choice.num_tokens = now, total

    def _append_tokens(self, choice: ChoiceState, event: TokensReady | SequenceFinished) -> Iterator[TextDelta]:
        text = ""
        for index, token_id in enumerate(event.token_ids):
            choice.token_ids.append(token_id)
            if event.logprobs:
                choice.logprobs.append(self._scored_token(event.logprobs[index]))
            text += choice.text.push(token_id)
            if choice.text.matched_stop is not None:
                choice.num_tokens -= len(event.token_ids) - index - 1  # tokens after the stop string are dropped
                break
        if text:
            yield self._delta(choice, text)

    def _finish(
        self,
        choice: ChoiceState,
        reason: FinishReason,
        now: float,
        stop_token_id: int | None = None,
        stop_logprob: TokenLogprob | None = None,
    ) -> Iterator[StreamEvent]:
        rest = choice.text.flush()
        if rest or choice.token_ids:
            yield self._delta(choice, rest)
        stop = choice.text.matched_stop
        choice.reason = reason if stop is None else "stop"
        timings = choice.timings
        if choice.first_token_at is not None:
            timings = replace(timings, decode_seconds=now - choice.first_token_at)
            if choice.num_tokens > 1:
                seconds = choice.last_token_at - choice.first_token_at
                self._metrics.last_token(seconds, choice.num_tokens - 1, self.exemplar)
        usage = Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens)
        matched = stop_token_id if stop is None else stop
        token = self._scored_token(stop_logprob) if stop_logprob is not None and stop is None else None
        yield ChoiceFinished(choice.index, choice.reason, usage, choice.num_tokens, timings, matched, token)

    def _delta(self, choice: ChoiceState, text: str) -> TextDelta:
        """Return the text with the tokens received since the last delta.

        A choice's first delta carries its timings.
        """
        timings = None if choice.timings_sent else choice.timings
        delta = TextDelta(choice.index, text, tuple(choice.token_ids), tuple(choice.logprobs), timings)
        choice.timings_sent = True
        choice.token_ids.clear()
        choice.logprobs.clear()
        return delta

    def _scored_token(self, logprob: TokenLogprob) -> ScoredToken:
        top = tuple(self._score_token(token_id, value) for token_id, value in logprob.top)
        return self._score_token(logprob.token_id, logprob.logprob, top)

    def _score_token(self, token_id: int, logprob: float, top: tuple[ScoredToken, ...] = ()) -> ScoredToken:
        spelled = self._tokenizer.token_bytes(token_id)
        return ScoredToken(token_id, spelled.decode(errors="replace"), spelled, logprob, top)


EventQueue = asyncio.Queue[TimedEvent]
COUNTED_CHARACTERS = 2**16  # of a text that counts among the bytes that open requests hold


async def generate(
    pipeline: RequestPipeline,
    model: ServedDecoder,
    request: GenerationRequest,
    record: RequestRecord,
    adapter: LoadedAdapter | None = None,
) -> AsyncGenerator[StreamEvent, None]:
    """Yield all stream events of one request, computed with an adapter; `Service.generate` documents them."""
    with pipeline.admission.permit() as permit:
        prompt = await pipeline.read(prompt_size(request), read_prompt, model, request)
        record.reserve(prompt.most_tokens(model.limits.max_model_len))
        name = pipeline.client.name(request.request_id)
        grammar = await pipeline.compile(model, prompt.grammar_source)
        command = prompt.command(name, record.arrived_at, adapter, grammar, request.cache_salt)
        size = prompt_size(request)
        if prompt.num_scores or size > COUNTED_CHARACTERS:
            permit.hold(prompt.num_scores * SCORE_BYTES + size)
        completion = CompletionBuilder(
            command, model.tokenizer, pipeline.metrics, request.messages is None, prompt.literals
        )
        record.count_tokens = lambda: (completion.num_prompt_tokens, completion.num_completion_tokens)
        if record.trace is not None:
            record.trace.note_sampling(command.params)
            record.phase_ends, completion.exemplar = completion.phase_ends, record.exemplar
        parser = OutputParser(request, model, prompt)
        with _submitted(pipeline, completion, command, permit, pipeline.deadline(record)) as event_queue:
            record.accepted = True
            yield Accepted(command.token_ids)
            shown = PromptOutput(request, model, command)
            for delta in shown.start():
                yield delta
            while not completion.finished:
                timed_event = await event_queue.get()
                if timed_event is not None and isinstance(timed_event[0], PromptScored):
                    for delta in shown.take(timed_event[0]):
                        yield delta
                    continue
                for event in _stream_events(pipeline, completion, command, timed_event):
                    _note_first_token(record, completion)
                    for parsed in parser.parse(event):
                        yield parsed
        pipeline.admission.observe(
            completion.num_prompt_tokens, completion.num_cached_tokens, completion.num_completion_tokens
        )
        record.outcome = completion.outcome


def _note_first_token(record: RequestRecord, completion: CompletionBuilder) -> None:
    if record.first_token_seconds is None and (first := completion.first_token) is not None:
        record.first_token_seconds = first[0] - record.arrived_at
        record.queue_seconds, record.cached_tokens = first[1].queue_seconds, completion.num_cached_tokens


@contextmanager
def _submitted(
    pipeline: RequestPipeline, completion: CompletionBuilder, command: Generate, permit: Permit, deadline: float
) -> Iterator[EventQueue]:
    """Send the request to the worker and yield the queue of its events. If the block ends early, abort the request."""
    event_queue: EventQueue = asyncio.Queue()
    with pipeline.client.register(command.request_id, event_queue.put_nowait, permit, deadline):
        completion.set_predicted_wait(pipeline.admission.send(len(command.token_ids)), pipeline.clock())
        pipeline.worker.put(command)
        try:
            yield event_queue
        finally:
            if not completion.finished:
                pipeline.worker.put(Abort(command.request_id))


def _stream_events(
    pipeline: RequestPipeline, completion: CompletionBuilder, command: Generate, timed_event: TimedEvent
) -> Iterator[StreamEvent]:
    if timed_event is None:
        final_events = list(completion.end("timeout", pipeline.clock()))
        if not completion.num_completion_tokens:
            raise RequestTimeout("The request timed out before its first token.")
        yield from final_events
        return
    event, now = timed_event
    if isinstance(event, RequestFailed):
        raise event.error.with_traceback(None)
    assert isinstance(event, TokensReady | SequenceFinished), "other events do not belong to a choice"
    for stream_event in completion.take(event, now):
        if isinstance(stream_event, ChoiceFinished) and isinstance(event, TokensReady):
            pipeline.worker.put(Abort(command.request_id, reason="stop", choice=stream_event.choice))
        yield stream_event
