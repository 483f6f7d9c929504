"""Tools, calls and results as text, for chat templates that do not write them; ids as Mistral's templates demand them.

The tools become a part of the system message, and earlier calls a part of the assistant's text, in the format that the
server's parser reads.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.text.tool_formats import ToolFormat, write_calls

Message = Mapping[str, Any]
_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INTRODUCTION = (
    "You can call these functions, whose parameters are given as JSON schemas:\n{tools}\n\n"
    "To call a function, answer with nothing but its name and its arguments in this form:\n{example}"
)


def tool_prompt(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    """Return a text that explains the tools and how to call them."""
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(form, [("function", {"parameter": "value"})])
    return _INTRODUCTION.format(tools=listed, example=example)


def call_text(calls: Iterable[Message], form: ToolFormat) -> str:
    """Return calls, whose arguments are objects, as text."""
    return write_calls(form, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages whose calls have ids of 9 letters and digits, as Mistral's templates demand.

    Other ids, which clients or other servers made, are replaced, the same one by the same one. A result without an id
    gets the one of the first call that has no result yet.
    """
    names = _ShortIds(messages)
    done: list[dict[str, Any]] = []
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
            done.append(dict(message))
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
