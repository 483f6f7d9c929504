"""Separation of a completion's text into reasoning, content and tool calls, for every dialect."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterator
from dataclasses import replace

from app.service.prompt import Prompt
from app.service.requests import Accepted, GenerationRequest, StreamEvent, TextDelta
from app.service.served_model import ServedDecoder
from app.text.harmony import HarmonyParser, HarmonyText
from app.text.reasoning import ReasoningParser
from app.text.tool_calls import ParsedText, ToolCallParser

_ID_LETTERS = string.ascii_letters + string.digits
_SHORT_ID_LENGTH = 9


class OutputParser:
    """Parser of one request's events. Without tools and reasoning, all events pass unchanged."""

    def __init__(self, request: GenerationRequest, model: ServedDecoder, prompt: Prompt) -> None:
        form = model.reasoning_format if request.separates_reasoning else None
        tools = request.tools
        self._choices: list[_ChoiceParser | _HarmonyChoice] = []
        if form is None and tools is None:
            return
        new_id = _short_id if model.tool_format.short_ids else _long_id
        if (form is not None and form.is_harmony) or (tools is not None and model.tool_format.is_harmony):
            names = None if tools is None else [tool.name for tool in tools.tools]
            parallel = tools is None or tools.parallel
            self._choices += [_HarmonyChoice(HarmonyParser(names, new_id, parallel)) for _ in range(request.params.n)]
            return
        for _ in range(request.params.n):
            calls = None
            if tools is not None:
                schemas = {tool.name: tool.parameters for tool in tools.tools}
                calls = ToolCallParser(model.tool_format, schemas, new_id, tools.parallel)
            reasoning = None if form is None else ReasoningParser(form, prompt.opens_reasoning)
            self._choices.append(_ChoiceParser(reasoning, calls))

    def parse(self, event: StreamEvent) -> Iterator[StreamEvent]:
        """Yield the events that follow from an event."""
        if isinstance(event, Accepted) or not self._choices:
            yield event
            return
        parser = self._choices[event.choice]
        if isinstance(event, TextDelta):
            yield parser.push(event)
            return
        rest = parser.flush(event.choice)
        if rest.text or rest.reasoning or rest.tool_calls:
            yield rest
        is_call = event.reason == "stop" and parser.num_calls > 0
        yield replace(event, reason="tool_calls") if is_call else event


class _ChoiceParser:
    """Parsers of one choice: reasoning comes first, and what follows it has content and calls."""

    def __init__(self, reasoning: ReasoningParser | None, calls: ToolCallParser | None) -> None:
        self._reasoning, self._calls = reasoning, calls

    @property
    def num_calls(self) -> int:
        return 0 if self._calls is None else self._calls.num_calls

    def push(self, delta: TextDelta) -> TextDelta:
        reasoning, content = ("", delta.text) if self._reasoning is None else self._reasoning.push(delta.text)
        parsed = ParsedText(content) if self._calls is None else self._calls.push(content)
        return replace(delta, text=parsed.content, reasoning=reasoning, tool_calls=tuple(parsed.tool_calls))

    def flush(self, choice: int) -> TextDelta:
        reasoning, content = ("", "") if self._reasoning is None else self._reasoning.flush()
        if self._calls is None:
            return TextDelta(choice, content, reasoning=reasoning)
        parsed, rest = self._calls.push(content), self._calls.flush()
        return TextDelta(
            choice,
            parsed.content + rest.content,
            reasoning=reasoning,
            tool_calls=(*parsed.tool_calls, *rest.tool_calls),
        )


class _HarmonyChoice:
    """Parser of one choice whose text is messages."""

    def __init__(self, parser: HarmonyParser) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def push(self, delta: TextDelta) -> TextDelta:
        return _with_parts(delta, self._parser.push(delta.text))

    def flush(self, choice: int) -> TextDelta:
        return _with_parts(TextDelta(choice, ""), self._parser.flush())


def _with_parts(delta: TextDelta, parts: HarmonyText) -> TextDelta:
    return replace(delta, text=parts.content, reasoning=parts.reasoning, tool_calls=tuple(parts.tool_calls))


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _short_id() -> str:
    return "".join(secrets.choice(_ID_LETTERS) for _ in range(_SHORT_ID_LENGTH))
