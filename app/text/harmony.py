"""Harmony, the format of gpt-oss (github.com/openai/harmony): messages of an assistant, each with a channel.

Reasoning is in the channel `analysis`, the answer in `final`, and a call of a tool is a message to `functions.NAME`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

from app.text.tool_calls import ParsedText, ToolCallDelta

TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
_MESSAGE, _CHANNEL_TOKEN = "<|message|>", "<|channel|>"
_ENDS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_BEGINNINGS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "to=")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_PREFIX = "functions."
_MAX_HEADER_CHARACTERS = 400


class HarmonyParser:
    """Parser of one choice's text, which begins after `<|start|>assistant` and may be divided in any way.

    `tools` are names; None: messages to tools are content. Without `parallel`, calls after the first are dropped. Text
    that is no message of this format is content.
    """

    def __init__(self, tools: Collection[str] | None, new_id: Callable[[], str], parallel: bool = True) -> None:
        self._tools, self._new_id, self._parallel = tools, new_id, parallel
        self.num_calls = 0
        self._part: str | None = None  # of the message: reasoning, content or call; None: its header is read
        self._header: list[str] = []
        self._held = ""  # the beginning of what may be a token, or of a text
        self._begun = False
        self._spaces: list[str] = []
        self._shown = {"reasoning": False, "content": False}
        self._has_arguments = False
        self._new = ParsedText()

    def push(self, text: str) -> ParsedText:
        for character in text:
            self._take(character)
        return self._certain()

    def flush(self) -> ParsedText:
        if self._part is None:
            if not self._begun or _CHANNEL.search("".join(self._header)) is None:
                self._add("content", "".join((*self._spaces, *self._header)) + self._held)
        else:
            self._add(self._part, self._held)
        self._end_call()
        self._held, self._header, self._spaces = "", [], []
        return self._certain()

    def _certain(self) -> ParsedText:
        certain, self._new = self._new, ParsedText()
        return certain

    def _take(self, character: str) -> None:
        if self._part is not None:
            self._take_body(character)
        elif self._begun:
            self._take_header(character)
        else:
            self._take_beginning(character)

    def _take_beginning(self, character: str) -> None:
        if not self._held and character.isspace():
            self._spaces.append(character)
            return
        self._held += character
        if self._held in _BEGINNINGS:
            held, self._held, self._begun = self._held, "", True
            for one in held:
                self._take_header(one)
        elif not any(one.startswith(self._held) for one in _BEGINNINGS):
            self._enter("content", "".join(self._spaces) + self._held)

    def _take_header(self, character: str) -> None:
        self._header.append(character)
        if character == ">" and "".join(self._header[-len(_MESSAGE) :]) == _MESSAGE:
            self._read_header("".join(self._header))
        elif len(self._header) > _MAX_HEADER_CHARACTERS or self._is_second(character):
            self._enter("content", "".join(self._header))

    def _is_second(self, character: str) -> bool:
        """Return True at the end of the second channel of a header, which has one at most."""
        if character != ">" or "".join(self._header[-len(_CHANNEL_TOKEN) :]) != _CHANNEL_TOKEN:
            return False
        return "".join(self._header).count(_CHANNEL_TOKEN) > 1

    def _read_header(self, header: str) -> None:
        recipient, channel = _RECIPIENT.search(header), _CHANNEL.search(header)
        name = "" if recipient is None else recipient[1].removeprefix(_PREFIX)
        is_function = recipient is not None and (recipient[1] != name or name in (self._tools or ()))
        if is_function and self._tools is None:
            self._enter("content", header)
        elif is_function and name:
            self._enter("call")
            self._start_call(name)
        elif recipient is not None or (channel is not None and channel[1] == "analysis"):
            self._enter("reasoning")  # what a model sends to a tool of its own is no answer
        else:
            self._enter("content")

    def _enter(self, part: str, text: str = "") -> None:
        separate = part != "call" and self._shown[part] and self._begun
        self._part, self._held, self._header, self._begun, self._spaces = part, "", [], True, []
        self._add(part, ("\n" if separate else "") + text)

    def _take_body(self, character: str) -> None:
        assert self._part is not None, "a message is read"
        held = self._held + character
        while held and held not in _ENDS and not any(end.startswith(held) for end in _ENDS):
            self._add(self._part, held[0])
            held = held[1:]
        if held in _ENDS:
            self._end_call()
            self._part, held = None, ""
        self._held = held

    def _add(self, part: str, text: str) -> None:
        if not text:
            return
        if part == "call":
            self._has_arguments = True
            self._add_arguments(text)
            return
        self._shown[part] = True
        if part == "reasoning":
            self._new.reasoning += text
        else:
            self._new.content += text

    def _start_call(self, name: str) -> None:
        self.num_calls += 1
        self._has_arguments = False
        if self._keeps:
            self._new.tool_calls.append(ToolCallDelta(self.num_calls - 1, "", self._new_id(), name))

    def _add_arguments(self, text: str) -> None:
        if self._keeps:
            calls = self._new.tool_calls
            last = calls.pop() if calls and calls[-1].index == self.num_calls - 1 else ToolCallDelta(self.num_calls - 1)
            calls.append(ToolCallDelta(last.index, last.arguments + text, last.id, last.name))

    def _end_call(self) -> None:
        if self._part == "call" and not self._has_arguments:
            self._add_arguments(json.dumps({}))
            self._has_arguments = True

    @property
    def _keeps(self) -> bool:
        return self._parallel or self.num_calls == 1
