"""The form of a conversation that a chat template was written for.

Templates differ: some write calls only if the content beside them is null, some join arguments as text, some know no
system message or no tools. Trial conversations at load (`template_trials.py`) show what a template writes. Here a
conversation gets that form, and nothing of it is lost.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from app.text.system_messages import SystemRules, fold_system_messages, joined
from app.text.thinking import NO_THINK, THINK, ThinkingVariables
from app.text.tool_formats import ToolFormat
from app.text.tool_prompt import call_text, tool_prompt, with_short_ids

Message = Mapping[str, Any]
# Content of a message that has calls and no text: the key is left out, or its value.
Empty = Literal["absent", "null", ""]


_ALL_PLACES, _NO_VARIABLES = SystemRules(), ThinkingVariables()


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What a template writes, and in which form it wants it.

    - `system`: the places of system messages that it writes.
    - `lists`: roles whose content may be a list of text parts; `lists_only`: those where it must be one.
    - `empty`: contents beside calls without text that it accepts, the best first.
    - `text_arguments`: arguments are a JSON text, else an object.
    - `calls`, `results`: it writes calls, and messages of the role `tool`.
    - `call_text`: where it writes a text beside calls; `before`: in a message of its own.
    - `reasoning_beside_text`: it accepts reasoning in a message that has a text and calls.
    - `one_call`: a message may have one call.
    - `short_ids`: ids must have 9 letters and digits.
    - `apart`: pairs of roles that may not follow each other.
    - `tools`: how it wants tools: as a list in the variable `tools` or `xml_tools`; `bare`: in `tools`, without OpenAI's
      wrapper; `functions`: the same as a JSON text in the variable `functions` (FireFunction). Empty: it knows none.
    - `no_tools`: its variables if there are no tools.
    - `thinking`: its variables about thinking.
    """

    system: SystemRules = _ALL_PLACES
    lists: frozenset[str] = frozenset()
    lists_only: frozenset[str] = frozenset()
    empty: tuple[Empty, ...] = ("",)
    text_arguments: bool = False
    calls: bool = True
    results: bool = True
    call_text: Literal["content", "tool_plan", "before"] = "content"
    reasoning_beside_text: bool = True
    one_call: bool = False
    short_ids: bool = False
    apart: frozenset[tuple[str, str]] = frozenset()
    tools: Literal["tools", "bare", "xml_tools", "functions", ""] = "tools"
    no_tools: Mapping[str, Any] = field(default_factory=lambda: {"tools": None})
    thinking: ThinkingVariables = _NO_VARIABLES

    def tool_variables(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the template's variables for tools."""
        if not tools or not self.tools:
            return dict(self.no_tools)
        bare = [tool.get("function", tool) for tool in tools]
        # FireFunction's model card indents the text by four spaces.
        ways: Mapping[str, dict[str, Any]] = {
            "bare": {"tools": bare},
            "functions": {"functions": json.dumps(bare, indent=4, ensure_ascii=False)},
        }
        return {**self.no_tools, **ways.get(self.tools, {self.tools: list(tools)})}

    def fit(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        syntax: ToolFormat,
        thinks: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Return a conversation that the template can write.

        Args:
            messages: Messages whose content is a text, a list of text parts, or null beside calls.
            tools: Functions that may be called.
            syntax: The form of calls for a template that knows none.
            thinks: Whether the model shall think, for a template that looks for the word in the system message.
        """
        done = [dict(message) for message in messages]
        if tools and not self.tools:
            done = _with_system_text(done, tool_prompt(tools, syntax))
        if self.thinking.by_word and thinks is not None:
            done = _with_system_text(done, THINK if thinks else NO_THINK)
        if self.short_ids:
            done = with_short_ids(done)
        if self.one_call:
            done = _in_single_calls(done)
        done = [one for message in done for one in self._with_call_form(message, syntax)]
        done = self._joined_where_apart(fold_system_messages(done, self.system))
        return [self._with_content_form(message) for message in done]

    def _with_call_form(self, message: dict[str, Any], syntax: ToolFormat) -> list[dict[str, Any]]:
        """Return a message, or two, whose calls or results are as the template writes them."""
        calls, content = message.get("tool_calls"), message.get("content")
        if message["role"] == "tool" and not self.results:
            return [{"role": "user", "content": f"<tool_response>\n{joined(message)}\n</tool_response>"}]
        if not calls:
            return [message | {"content": content or ""}]
        if not self.calls:
            bare = {name: value for name, value in message.items() if name != "tool_calls"}
            return [bare | {"content": joined(message) + call_text(map(_decoded_call, calls), syntax)}]
        calls = [self._with_argument_form(_decoded_call(call)) for call in calls]
        with_calls = message | {"tool_calls": calls}
        if not content:
            return [self._with_empty_content(with_calls)]
        if not self.reasoning_beside_text:
            with_calls.pop("reasoning_content", None)
        if self.call_text == "content":
            return [with_calls]
        if self.call_text == "tool_plan":
            return [self._with_empty_content(with_calls | {"tool_plan": joined(message)})]
        bare = {name: value for name, value in message.items() if name != "tool_calls"}
        with_calls.pop("reasoning_content", None)
        return [bare, self._with_empty_content(with_calls)]

    def _with_empty_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with calls and no text: as it was sent, if the template accepts that."""
        sent: Empty = "" if message.get("content") is not None else "absent"
        form = sent if sent in self.empty else self.empty[0]
        rest = {name: value for name, value in message.items() if name != "content"}
        return rest if form == "absent" else rest | {"content": None if form == "null" else ""}

    def _with_argument_form(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": {**call["function"], "arguments": arguments}}

    def _joined_where_apart(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return messages in which no roles follow each other that the template keeps apart: their texts are joined."""
        done: list[dict[str, Any]] = []
        for message in messages:
            last = done[-1] if done else {"role": ""}
            if (last["role"], message["role"]) not in self.apart or last.get("tool_calls") or message.get("tool_calls"):
                done.append(message)
            else:
                done[-1] = last | {"content": joined(last, message)}
        return done

    def _with_content_form(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list) and message["role"] not in self.lists:
            return message | {"content": joined(message)}
        if isinstance(content, str) and message["role"] in self.lists_only:
            return message | {"content": [{"type": "text", "text": content}]}
        return message


def _with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation whose first message, which is of the system, ends with a text."""
    added = {"role": "system", "content": text}
    if messages[0]["role"] != "system":
        return [added, *messages]
    return [messages[0] | {"content": joined(messages[0], added)}, *messages[1:]]


def _decoded_call(call: Message) -> dict[str, Any]:
    """Return a call whose arguments are an object; what is none stays text, since it was the model's own mistake."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _in_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which each message has one call at most, followed by its result."""
    done: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls") or ()
        place += 1
        if len(calls) < 2:
            done.append(message)
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for at, call in enumerate(calls):
            rest = message if at == 0 else {"role": message["role"], "content": None}
            done.append(rest | {"tool_calls": [call]})
            ids = [one.get("tool_call_id") for one in results]
            if results and (call.get("id") in ids or not any(ids)):
                done.append(results.pop(ids.index(call["id"]) if call.get("id") in ids else 0))
        done += results
    return done
