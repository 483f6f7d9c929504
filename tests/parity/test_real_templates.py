"""Chat templates of real models (`make real-formats`): prompts are those of transformers, byte for byte, and whole.

Requests are those that clients send to the chat route. transformers gets the same messages in the forms that its users
choose from: arguments as an object or as text, empty content as it was sent, left out or null. Its first rendering that
has all of the conversation is the reference. Where it has none, since the template refuses the conversation or leaves a
part of it out, ours either has all of it or is refused.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from app.api.openai.bodies import ChatBody
from app.api.openai.translate import chat_request
from app.errors import InvalidRequest
from app.text.chat import ChatTemplate
from real_formats import real_templates
from small_tokenizers import byte_level, write_tokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
FIXED = {"date_string": "01 Jan 2026"}  # by default transformers gives no date


def tool(name: str) -> dict[str, Any]:
    properties = {"city": {"type": "string", "description": "where"}, "days": {"type": "integer"}}
    parameters = {"type": "object", "properties": properties, "required": ["city"]}
    return {"type": "function", "function": {"name": name, "description": f"about {name}", "parameters": parameters}}


def call(place: int = 0, as_text: bool = True, name: str = "getweather", **arguments: Any) -> dict[str, Any]:
    given = arguments or {"city": f"wordcity{place} Köln", "days": 3}
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False) if as_text else given}
    return {"id": f"abcdefgh{place}", "type": "function", "function": function}


def result(place: int = 0, content: Any = "") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": f"abcdefgh{place}", "content": content or f"wordresult{place} <b>"}


def parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def called(*calls: dict[str, Any], content: Any = None, **more: Any) -> list[dict[str, Any]]:
    message = {"role": "assistant", "content": content, "tool_calls": list(calls or (call(),)), **more}
    return [USER, message, *(result(place) for place in range(len(calls or (0,))))]


USER = {"role": "user", "content": "wordquestion é?"}
ANSWER = {"role": "assistant", "content": "wordanswer."}
LATER = {"role": "user", "content": "wordlater"}
SYSTEM = {"role": "system", "content": "wordsystem"}
TOOLS = {"tools": [tool("getweather"), tool("gettime")]}
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "developer": {"messages": [SYSTEM | {"role": "developer"}, USER]},
    "turns": {"messages": [SYSTEM, USER, ANSWER, LATER]},
    "system later": {"messages": [USER, ANSWER, SYSTEM, LATER]},
    "two systems": {"messages": [SYSTEM, {"role": "system", "content": "wordsecond"}, USER]},
    "two users": {"messages": [USER, LATER]},
    "text parts": {"messages": [USER | {"content": parts("wordone", "wordtwo")}]},
    "parts everywhere": {
        "messages": [
            SYSTEM | {"content": parts("wordsystem")},
            USER,
            ANSWER | {"content": parts("wordanswer", "wordmore")},
            LATER,
        ]
    },
    "empty answer": {"messages": [USER, ANSWER | {"content": ""}, LATER]},
    "tools": {"messages": [USER], **TOOLS},
    "tools with system": {"messages": [SYSTEM, USER], **TOOLS},
    "call with null": {"messages": called(), **TOOLS},
    "call with empty text": {"messages": called(content=""), **TOOLS},
    "call with text": {"messages": called(content="wordbeside"), **TOOLS},
    "arguments as object": {"messages": called(call(as_text=False)), **TOOLS},
    "call without tools": {"messages": [*called(), ANSWER, LATER]},
    "two calls": {"messages": called(call(), call(1)), **TOOLS},
    "two rounds": {"messages": [*called(), *called(call(1, name="gettime"))[1:2], result(1), ANSWER, LATER], **TOOLS},
    "result in parts": {"messages": [*called()[:2], result(content=parts("wordone", "wordtwo"))], **TOOLS},
    "user after result": {"messages": [*called(), LATER], **TOOLS},
    "nested arguments": {"messages": called(call(city={"name": "wordcity", "tags": ["a\nb", None, 1.5]})), **TOOLS},
    "reasoning": {"messages": [USER, ANSWER | {"reasoning_content": "thoughts"}, LATER]},
    "reasoning with call": {"messages": called(reasoning_content="thoughts"), **TOOLS},
    "thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
    "no thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
    "effort": {"messages": [USER], "chat_template_kwargs": {"reasoning_effort": "high"}},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "continued": {"messages": [USER, ANSWER], "continue_final_message": True},
    "continued to the space": {"messages": [USER, ANSWER | {"content": "wordanswer:\n "}], "continue_final_message": True},
    "documents": {"messages": [USER], "documents": [{"doc_id": 1, "title": "Title", "text": "worddocument"}]},
}  # fmt: skip


# Whole prompts that differ from a whole one of transformers, by template and shape, with the reason.
DIFFERENCES: dict[tuple[str, str], str] = {}


def words(shape: Mapping[str, Any]) -> set[str]:
    """Return what must be in a prompt: each text begins with a word of its own."""
    names = [one["function"]["name"] for one in shape.get("tools", ())]
    return set(re.findall(r"word[a-z]+\d*|getweather|gettime", json.dumps([shape["messages"], shape.get("documents"), names])))


def is_whole(text: str, shape: Mapping[str, Any]) -> bool:
    return words(shape) <= set(re.findall(r"word[a-z]+\d*|getweather|gettime", text)) and '\\\\"city' not in text and '\\"city\\' not in text


def forms(messages: list[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Yield the messages in the forms in which templates may want them, the recommended one first."""
    for as_object in (True, False):
        for empty in ("sent", "absent", "null", ""):
            yield [_in_form(message, as_object, empty) for message in messages]


def _in_form(message: dict[str, Any], as_object: bool, empty: str) -> dict[str, Any]:
    formed = copy.deepcopy(message)
    if formed["role"] == "developer":
        formed["role"] = "system"
    for one in formed.get("tool_calls", ()):
        given = one["function"]["arguments"]
        given = json.loads(given) if isinstance(given, str) else given
        one["function"]["arguments"] = given if as_object else json.dumps(given, ensure_ascii=False)
    if formed.get("tool_calls") and not formed["content"] and empty != "sent":
        formed.pop("content")
        formed |= {} if empty == "absent" else {"content": None if empty == "null" else ""}
    return formed


def theirs(tokenizer: Any, shape: Mapping[str, Any]) -> tuple[str, str]:
    """Return transformers' whole prompt and "whole", or what is wrong with all of its prompts: "lost" or "refused"."""
    outcome = "refused"
    continued = shape.get("continue_final_message", False)
    for messages in forms(shape["messages"]):
        nulls = any(one.get("content", "") is None and one.get("tool_calls") for one in messages)
        options: dict[str, Any] = {
            "tools": shape.get("tools"),
            "documents": shape.get("documents"),
            "add_generation_prompt": shape.get("add_generation_prompt", not continued),
            "continue_final_message": continued,
            **FIXED,
            **shape.get("chat_template_kwargs", {}),
        }
        try:
            if nulls:  # which `apply_chat_template` leaves out
                rendered, _ = render_jinja_template([messages], chat_template=tokenizer.chat_template, **options, **TOKENS)
                text = rendered[0]
            else:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # noqa: S112 (a template may raise anything)
            continue
        if is_whole(text, shape):
            return text, "whole"
        outcome = "lost"
    return "", outcome


def ours(template: ChatTemplate, shape: Mapping[str, Any]) -> str | None:
    arguments = FIXED | shape.get("chat_template_kwargs", {})
    request = chat_request(ChatBody.model_validate_json(json.dumps(shape | {"chat_template_kwargs": arguments})), "id", {})
    try:
        return template.render(request.messages or (), request.template_arguments, request.chat_options)
    except InvalidRequest:
        return None


def outcome(template: ChatTemplate, tokenizer: Any, shape: Mapping[str, Any]) -> str:
    """Return "equal", "mended" (ours alone is whole), "refused" (by both, or instead of a loss), or a fault."""
    text, (expected, kind) = ours(template, shape), theirs(tokenizer, shape)
    if text is None:
        return "refused alone" if kind == "whole" else "refused"
    if kind == "whole":
        return "equal" if text == expected else "different"
    return "mended" if is_whole(text, shape) else "lost"
