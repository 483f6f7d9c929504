"""Messages with tools in the form that a chat template can write.

Templates that know tools get them as they are, with the arguments of earlier calls as objects. For a template that does
not know them, the tools become a part of the system message, earlier calls a part of the assistant's text, and results
messages of the user, in the format that the server's parser reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from app.text.chat import ChatOptions
from app.text.tool_formats import ToolFormat, write_calls

Message = Mapping[str, Any]
_KNOWS_TOOLS = re.compile(r"\{[%{][^%}]*\btools\b")
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_KNOWS_CALLS = re.compile(r"\btool_calls\b")
_INTRODUCTION = (
    "You can call these functions, whose parameters are given as JSON schemas:\n{tools}\n\n"
    "To call a function, answer with nothing but its name and its arguments in this form:\n{example}"
)


def fit_template(
    messages: Sequence[Message], options: ChatOptions, template: str, form: ToolFormat
) -> tuple[Sequence[Message], ChatOptions]:
    """Return the messages and options that a chat template can write."""
    messages = [_with_decoded_arguments(message) for message in messages]
    if form.short_ids:
        messages = _with_short_ids(messages)
    if options.tools and not _KNOWS_TOOLS.search(template):
        messages = _with_tool_prompt(messages, options.tools, form)
        options = replace(options, tools=())
    if not _KNOWS_CALLS.search(template):
        messages = [_as_plain_text(message, form) for message in messages]
    return messages, options


def _with_short_ids(messages: Sequence[Message]) -> list[Message]:
    """Return messages whose calls have ids of 9 letters and digits, as Mistral's templates demand.

    Other ids, which clients or other servers made, are replaced, the same one by the same one. A result without an id
    gets the one of the first call that has no result yet.
    """
    names = _ShortIds(messages)
    done: list[Message] = []
    open_ids: list[str] = []
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            new = [{**call, "id": names[call.get("id") or f"{place}:{at}"]} for at, call in enumerate(calls)]
            open_ids = [call["id"] for call in new]
            done.append({**message, "tool_calls": new})
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            named = names[given] if given else next(iter(open_ids), names[f"{place}"])
            open_ids = [one for one in open_ids if one != named]
            done.append({**message, "tool_call_id": named})
        else:
            done.append(message)
    return done


class _ShortIds(dict[str, str]):
    """Short ids by the ids of a conversation, where short ones stay as they are."""

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__()
        given = {message.get("tool_call_id") for message in messages}
        given |= {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
        self._taken = {one for one in given if isinstance(one, str) and _SHORT_ID.fullmatch(one)}

    def __missing__(self, given: str) -> str:
        short = given
        while not _SHORT_ID.fullmatch(short) or (short != given and short in self._taken):
            short = hashlib.sha256(short.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        self._taken.add(short)
        self[given] = short
        return short


def _with_decoded_arguments(message: Message) -> Message:
    """Return a message whose calls have their arguments as objects, as templates expect."""
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_decoded_call(call) for call in calls]} if calls else message


def _decoded_call(call: Message) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError):  # what is no JSON stays text, since it was the model's own mistake
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def _with_tool_prompt(
    messages: Sequence[Message], tools: Sequence[Mapping[str, Any]], form: ToolFormat
) -> list[Message]:
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(form, [("function", {"parameter": "value"})])
    text = _INTRODUCTION.format(tools=listed, example=example)
    first = messages[0]
    if first["role"] == "system" and isinstance(first.get("content"), str):
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]


def _as_plain_text(message: Message, form: ToolFormat) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{_text(message.get('content'))}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    written = write_calls(form, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])
    content = _text(message.get("content"))
    return {"role": "assistant", "content": content + written}


def _text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return "" if content is None else str(content)
