"""Generation with a decoder: an open request whose choices grow by the worker's events."""

from __future__ import annotations

import secrets
import string
from dataclasses import dataclass, field, replace
from typing import Protocol

from app.errors import RequestError, RequestTimeout
from app.messages import (
    Abort,
    Event,
    FinishReason,
    LoadedAdapter,
    PromptScored,
    RequestFailed,
    SequenceFinished,
    Timings,
    TokenLogprob,
    TokenScore,
    TokensReady,
)
from app.service.engine_client import EngineClient, OpenRequest, TimedEvent
from app.service.prompt import SCORE_BYTES, Prompt, is_read_at_once, prompt_size, read_prompt
from app.service.requests import (
    Accepted,
    ChoiceFinished,
    ClientRequest,
    DirectOutput,
    GenerationRequest,
    PromptToken,
    ScoredToken,
    StreamEvent,
    TextDelta,
    Usage,
)
from app.service.served_model import ServedDecoder
from app.text.detokenizer import IncrementalDetokenizer
from app.text.harmony import HarmonyParser
from app.text.reasoning import ReasoningParser
from app.text.tokenizer import Tokenizer
from app.text.tool_calls import ParsedText, ToolCallParser

# If the choices of a request have different finish reasons, the first of these that occurs is the request's.
_WORST_FIRST: tuple[FinishReason, ...] = ("timeout", "aborted", "length", "stop")
COUNTED_CHARACTERS = 2**16  # of a text that counts among the bytes that open requests hold
_ID_LETTERS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9


class OutputParser(Protocol):
    """Parser of one choice's text into reasoning, content and calls of tools."""

    num_calls: int

    def push(self, text: str) -> ParsedText:
        """Return what is certain after more text."""

    def flush(self) -> ParsedText:
        """Return the rest at the end of the text."""


@dataclass(slots=True)
class Choice:
    """One choice while it grows. Without `parser`, all of its text is content.

    `token_ids` and `logprobs` hold received tokens that are in no `TextDelta` yet, because their text is incomplete.
    """

    index: int
    text: IncrementalDetokenizer
    parser: OutputParser | None = None
    reason: FinishReason | None = None
    timings: Timings = field(default_factory=Timings)
    first_token_at: float | None = None
    last_token_at: float = 0.0
    num_tokens: int = 0
    timings_sent: bool = False  # True after the delta that carries the timings
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[ScoredToken] = field(default_factory=list)


class OpenGeneration(OpenRequest):
    """An open request for text: call `start` once, then `take` for each of the worker's events until `is_over`."""

    def __init__(
        self,
        client: EngineClient,
        request: GenerationRequest,
        http: ClientRequest,
        direct: DirectOutput | None = None,
    ) -> None:
        super().__init__(client, request.api, http)
        self.request, self._direct = request, direct
        # Whose plain tokens are written at once, while the reader has sent all events and waits for the next one.
        self._awaited: Choice | None = None
        self._unwritten = ""  # text of tokens that were taken directly
        self.choices: list[Choice] = []
        self._prompt_text, self._prompt_tokens = "", list[PromptToken]()
        self._grammar: object = None  # the compiled grammar, which the engine finds while it is held here
        self._num_shown_tokens = 0  # tokens of the prompt that a response shows with their scores

    async def start(self, model: ServedDecoder, adapter: LoadedAdapter | None) -> list[StreamEvent]:
        self.admit()
        client, request, size = self.client, self.request, prompt_size(self.request)
        pictures = await client.look(model, request.pictures)
        if is_read_at_once(request, size):
            prompt = read_prompt(model, request)
        else:
            prompt = await client.read(size, read_prompt, model, request, pictures)
        await self.reserve(prompt.most_tokens(model.limits.max_model_len))
        self._grammar = grammar = await client.compile(model, prompt.grammar)
        if prompt.num_scores or size > COUNTED_CHARACTERS or prompt.placed.vectors:
            self.hold(prompt.num_scores * SCORE_BYTES + size + prompt.placed.num_bytes)
        self.begin(model, prompt)
        if self.http.trace is not None:
            self.http.trace.note_sampling(prompt.params)
        request_id = client.unique_id(request.request_id)
        definition = "" if grammar is None else grammar.definition
        command = prompt.command(request_id, self.arrived_at, adapter, request.cache_salt, definition)
        self.send(command, len(prompt.token_ids))
        return [Accepted(prompt.token_ids), *self._prompt_deltas()]

    def begin(self, model: ServedDecoder, prompt: Prompt) -> None:
        request, params, self._tokenizer = self.request, prompt.params, model.tokenizer
        self._token_texts = TokenTexts(model.tokenizer)
        self.num_prompt_tokens = len(prompt.token_ids)
        self._max_tokens = params.max_tokens
        # The text of a completion continues the prompt's; a chat reply, and what follows a source, start a new text.
        context = prompt.token_ids if request.messages is None and model.source is None else ()
        for index in range(params.n):
            text = IncrementalDetokenizer(
                model.tokenizer, params.stop, context, prompt.literals, params.include_stop, params.min_tokens
            )
            self.choices.append(Choice(index, text, output_parser(request, model, prompt)))
        if params.n > 1 or params.stop or params.logprobs is not None or self.choices[0].parser or self.exemplar:
            self._direct = None  # such events have more than the text of their tokens
        if request.echo:
            is_text = request.prompt is not None
            self._prompt_text = request.prompt or "" if is_text else model.tokenizer.decode(prompt.token_ids)
        if params.prompt_logprobs is not None:
            self._num_shown_tokens = self.num_prompt_tokens
            first_id = prompt.token_ids[0]
            self._prompt_tokens.append(PromptToken(first_id, self._token_texts[first_id].text))

    async def next_event(self) -> tuple[Event, float] | None:
        """Return the worker's next event that was not written directly. Plain tokens that wait are written first."""
        choice = self._plain_choice()
        while self._events:
            timed_event = self._events.popleft()
            if choice is None or timed_event is None or not self._take_directly(choice, *timed_event):
                self._write_directly()
                return self.checked(timed_event)
        self._write_directly()
        self._awaited = choice
        return await super().next_event()

    def _plain_choice(self) -> Choice | None:
        """Return the choice whose tokens may be written directly from now on: it has begun and not ended."""
        choice = self.choices[0]
        is_open = self._direct is not None and self._direct.emit is not None and choice.reason is None
        return choice if is_open and choice.num_tokens else None

    def arrive(self, timed_event: TimedEvent) -> None:
        """Write a plain token to the client at once if nothing waits before it; else leave the event to the reader.

        The reader costs a queue, the wake of a task, five generators and ASGI: five times as much as the token.
        """
        choice, was_written = self._awaited, not self._unwritten
        try:
            if choice is not None and timed_event is not None and self._take_directly(choice, *timed_event):
                if not self.client.is_late:
                    self._write_directly()
                elif was_written:
                    self.client.write_after_steps(self._write_directly)
                return
        except RequestError as error:  # of the tokenizer: it ends this request, and no other of the step
            assert timed_event is not None, "an event was taken"
            timed_event = RequestFailed(timed_event[0].request_id, error), timed_event[1]
        self._awaited = None
        self._write_directly()
        super().arrive(timed_event)

    def _take_directly(self, choice: Choice, event: Event, now: float) -> bool:
        """Take a token if its client can be written to, or return False."""
        if not isinstance(event, TokensReady) or self._direct.flow.write_paused:  # type: ignore[union-attr]  # it is open
            return False
        token_ids = event.token_ids
        num_tokens = len(token_ids)
        client = self.client
        client.num_direct += num_tokens
        client.direct_gaps.append(now - choice.last_token_at)
        choice.num_tokens += num_tokens
        self.num_completion_tokens += num_tokens
        choice.last_token_at = self.last_token_at = now
        choice.token_ids += token_ids
        for token_id in token_ids:
            self._unwritten += choice.text.push(token_id)
        return True

    def _write_directly(self) -> None:
        if text := self._unwritten:
            self._unwritten = ""
            token_ids = self.choices[0].token_ids
            self._direct.emit(text, token_ids)  # type: ignore[union-attr, misc]  # tokens were taken
            token_ids.clear()

    def take(self, timed_event: tuple[Event, float] | None) -> list[StreamEvent]:
        """Return the stream events that follow; None: the request has timed out.

        Raises `RequestTimeout` if it has timed out before its first token.
        """
        if timed_event is None:
            return self._time_out()
        event, now = timed_event
        if isinstance(event, PromptScored):
            self._prompt_tokens += map(self._prompt_token, event.scores)
            return self._prompt_deltas()
        assert isinstance(event, TokensReady | SequenceFinished), "other events do not belong to a choice"
        choice = self.choices[event.choice]
        if choice.reason is not None:
            return []
        num_before = choice.num_tokens
        self._count(choice, event, now)
        events = self._append_tokens(choice, event)
        num_new = choice.num_tokens - num_before
        if num_new:
            self.num_completion_tokens += num_new
            self.client.metrics.completion_tokens(num_new)
        if choice.text.matched_stop is not None:
            self._finish(choice, "stop", now, events)
            if isinstance(event, TokensReady):  # the worker does not know of stop strings
                self.client.worker.put(Abort(event.request_id, reason="stop", choice=choice.index))
        elif isinstance(event, SequenceFinished):
            self._finish(choice, event.reason, now, events, event)
        return events

    def _count(self, choice: Choice, event: TokensReady | SequenceFinished, now: float) -> None:
        """Count new tokens, also a stop token, which has no text. Tokens of one step share one inter-token latency."""
        metrics = self.client.metrics
        if event.timings is not None:
            choice.timings = event.timings
            if choice.index == 0:  # the other choices hit the cache because choice 0 filled it
                self.num_cached_tokens = event.timings.cached_tokens
        total = choice.num_tokens + len(event.token_ids)
        if isinstance(event, SequenceFinished):
            total = max(total, event.num_completion_tokens)
            if self._max_tokens == 0 and event.reason == "length" and choice.index == 0:
                metrics.prompt_tokens(self.num_prompt_tokens, self.num_cached_tokens)
        if total == choice.num_tokens:
            return
        if choice.first_token_at is None:
            if self.first_token_at is None:
                self.first_token_at = now
                metrics.prompt_tokens(self.num_prompt_tokens, self.num_cached_tokens)
                self.note_first_result(choice.timings, now)
            choice.first_token_at = now
            metrics.first_token(choice.timings, now - self.arrived_at, self.exemplar)
        elif now != choice.last_token_at:
            metrics.next_token(now - choice.last_token_at, self.exemplar)
        choice.last_token_at = self.last_token_at = now
        choice.num_tokens = total

    def _append_tokens(self, choice: Choice, event: TokensReady | SequenceFinished) -> list[StreamEvent]:
        text = ""
        for index, token_id in enumerate(event.token_ids):
            choice.token_ids.append(token_id)
            if event.logprobs:
                choice.logprobs.append(scored_token(self._tokenizer, event.logprobs[index]))
            text += choice.text.push(token_id)
            if choice.text.matched_stop is not None:
                choice.num_tokens -= len(event.token_ids) - index - 1  # tokens after the stop string are dropped
                break
        return [self._delta(choice, text)] if text else []

    def _delta(self, choice: Choice, text: str) -> TextDelta:
        """Return the text with the tokens received since the last delta. A choice's first delta carries its timings."""
        timings = None if choice.timings_sent else choice.timings
        tokens = tuple(choice.token_ids), tuple(choice.logprobs), timings
        choice.timings_sent = True
        choice.token_ids.clear()
        choice.logprobs.clear()
        if choice.parser is None:
            return TextDelta(choice.index, text, *tokens)
        parsed = choice.parser.push(text)
        return TextDelta(choice.index, parsed.content, *tokens, parsed.reasoning, tuple(parsed.tool_calls))

    def _finish(
        self,
        choice: Choice,
        reason: FinishReason,
        now: float,
        events: list[StreamEvent],
        event: SequenceFinished | None = None,
    ) -> None:
        rest = choice.text.flush()
        if rest or choice.token_ids:
            events.append(self._delta(choice, rest))
        matched: str | int | None = choice.text.matched_stop
        stop_token = None
        choice.reason = reason if matched is None else "stop"
        if matched is None and event is not None:
            matched = event.stop_token_id
            if event.stop_logprob is not None:
                stop_token = scored_token(self._tokenizer, event.stop_logprob)
        shown_reason = _flush_parser(choice, choice.parser, events) if choice.parser else choice.reason
        timings = choice.timings
        if choice.first_token_at is not None:
            timings = replace(timings, decode_seconds=now - choice.first_token_at)
            if choice.num_tokens > 1:
                seconds = choice.last_token_at - choice.first_token_at
                self.client.metrics.last_token(seconds, choice.num_tokens - 1, self.exemplar)
        usage = Usage(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens)
        tokens = usage, choice.num_tokens, timings, matched, stop_token
        events.append(ChoiceFinished(choice.index, shown_reason, *tokens))
        if self.http.trace is not None:
            self.http.trace.finish_reasons.append(shown_reason)
        if all(other.reason is not None for other in self.choices):
            self._complete()

    def _complete(self) -> None:
        self.is_over = True
        reasons = {choice.reason for choice in self.choices}
        self.outcome = next((reason for reason in _WORST_FIRST if reason in reasons), "aborted")
        self.client.admission.observe(self.num_prompt_tokens, self.num_cached_tokens, self.num_completion_tokens)

    def _time_out(self) -> list[StreamEvent]:
        if not self.num_completion_tokens:
            raise RequestTimeout("The request timed out before its first token.")
        events: list[StreamEvent] = []
        for choice in self.choices:
            if choice.reason is None:
                self._finish(choice, "timeout", self.client.clock(), events)
        return events

    def _prompt_deltas(self) -> list[StreamEvent]:
        """Return the prompt once for each choice, when all that the response shows of it is scored."""
        if len(self._prompt_tokens) < self._num_shown_tokens or not (self.request.echo or self._num_shown_tokens):
            return []
        tokens = tuple(self._prompt_tokens)
        return [TextDelta(choice.index, self._prompt_text, prompt=tokens) for choice in self.choices]

    def _prompt_token(self, score: TokenScore) -> PromptToken:
        texts = self._token_texts
        top = tuple(replace(texts[token_id], logprob=logprob) for token_id, logprob in score.top)
        own = replace(texts[score.token_id], logprob=score.logprob, top=top)
        return PromptToken(score.token_id, own.text, own, score.rank)


class TokenTexts(dict[int, ScoredToken]):
    """Tokens by id with their texts, each decoded at its first use: many recur among the most likely ones."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token_id: int) -> ScoredToken:
        self[token_id] = token = score_token(self._tokenizer, token_id, 0.0)
        return token


def scored_token(tokenizer: Tokenizer, logprob: TokenLogprob) -> ScoredToken:
    top = tuple(score_token(tokenizer, token_id, value) for token_id, value in logprob.top)
    return score_token(tokenizer, logprob.token_id, logprob.logprob, top)


def score_token(tokenizer: Tokenizer, token_id: int, logprob: float, top: tuple[ScoredToken, ...] = ()) -> ScoredToken:
    spelled = tokenizer.token_bytes(token_id)
    return ScoredToken(token_id, spelled.decode(errors="replace"), spelled, logprob, top)


# ---- reasoning and calls -----------------------------------------------------------------------------------------------


def output_parser(request: GenerationRequest, model: ServedDecoder, prompt: Prompt) -> OutputParser | None:
    """Return a parser for one choice; None if all of its text is content."""
    form, tools = model.reasoning_format if request.separates_reasoning else None, request.tools
    has_answer = request.messages is not None and model.tool_format.around
    if form is None and tools is None and not has_answer:
        return None
    new_id = _short_id if model.tool_format.short_ids else _long_id
    parallel = tools is None or tools.parallel
    if (form is not None and form.is_harmony) or (tools is not None and model.tool_format.is_harmony):
        return HarmonyParser(None if tools is None else [tool.name for tool in tools.tools], new_id, parallel)
    calls = None
    if tools is not None or has_answer:
        schemas = None if tools is None else {tool.name: tool.parameters for tool in tools.tools}
        calls = ToolCallParser(model.tool_format, schemas, new_id, parallel, prompt.begun)
    return _ReasoningAndCalls(None if form is None else ReasoningParser(form, prompt.opens_reasoning), calls)


def _flush_parser(choice: Choice, parser: OutputParser, events: list[StreamEvent]) -> FinishReason:
    rest = parser.flush()
    if rest.content or rest.reasoning or rest.tool_calls:
        calls = tuple(rest.tool_calls)
        events.append(TextDelta(choice.index, rest.content, reasoning=rest.reasoning, tool_calls=calls))
    assert choice.reason is not None, "the text of a finished choice is complete"
    return "tool_calls" if choice.reason == "stop" and parser.num_calls else choice.reason


class _ReasoningAndCalls:
    """Parser of a text in which reasoning comes first, and then content and calls."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls
        self.num_calls = 0

    def push(self, text: str) -> ParsedText:
        return self._with_calls(*("", text) if self._reasoning is None else self._reasoning.push(text))

    def flush(self) -> ParsedText:
        parsed = self._with_calls(*("", "") if self._reasoning is None else self._reasoning.flush())
        if self._calls is None:
            return parsed
        rest = self._calls.flush()
        self.num_calls = self._calls.num_calls
        return ParsedText(parsed.content + rest.content, [*parsed.tool_calls, *rest.tool_calls], parsed.reasoning)

    def _with_calls(self, reasoning: str, content: str) -> ParsedText:
        if self._calls is None:
            return ParsedText(content, reasoning=reasoning)
        parsed = self._calls.push(content)
        parsed.reasoning = reasoning
        return parsed


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_SHORT_ID_LENGTH))
