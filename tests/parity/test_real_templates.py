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
import transformers
from transformers.utils.chat_template_utils import render_jinja_template

from app.api.openai.schemas import ChatBody
from app.api.openai.translate import chat_request
from app.api.schemas import parse_body
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
    "two systems": {"messages": [SYSTEM, {"role": "system", "content": " wordsecond"}, USER]},
    "two users": {"messages": [USER, LATER]},
    "text parts": {"messages": [USER | {"content": parts("wordone.", "wordtwo")}]},
    "parts everywhere": {
        "messages": [
            SYSTEM | {"content": parts("wordsystem")},
            USER,
            ANSWER | {"content": parts("wordanswer.", "wordmore")},
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
    "result in parts": {"messages": [*called()[:2], result(content=parts("wordone.", "wordtwo"))], **TOOLS},
    "user after result": {"messages": [*called(), LATER], **TOOLS},
    "nested arguments": {"messages": called(call(city={"name": "wordcity", "tags": ["a\nb", None, 1.5]})), **TOOLS},
    "reasoning": {"messages": [USER, ANSWER | {"reasoning_content": "thoughts"}, LATER]},
    "reasoning with call": {"messages": called(reasoning_content="thoughts"), **TOOLS},
    "thinking": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": True}},
    "no thinking": {"messages": [USER], "reasoning_effort": "none"},
    "effort": {"messages": [USER], "reasoning_effort": "high"},
    "no generation prompt": {"messages": [USER, ANSWER], "add_generation_prompt": False},
    "continued": {"messages": [USER, ANSWER], "continue_final_message": True},
    "continued to the space": {"messages": [USER, ANSWER | {"content": "wordanswer:\n "}], "continue_final_message": True},
    "documents": {"messages": [USER], "documents": [{"doc_id": 1, "title": "Title", "text": "worddocument"}]},
}  # fmt: skip


# What transformers' users pass for these shapes, and which other variables some templates read.
VARIABLES = {
    "thinking": {"enable_thinking": True, "thinking": True},
    "no thinking": {"enable_thinking": False, "thinking": False},
    "effort": {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
}
OWN_VARIABLES: dict[str, dict[str, dict[str, Any]]] = {
    "ByteDance-Seed-OSS": {"no thinking": {"thinking_budget": 0}},
    "Cohere2MoE": {"no thinking": {"reasoning": False}},
    "MiniMax-M3": {
        "thinking": {"thinking_mode": "enabled"},
        "no thinking": {"thinking_mode": "disabled"},
        "effort": {"thinking_mode": "enabled"},
    },
    "Kimi-K3": {"effort": {"thinking_effort": "high"}},
    "muse-glimmer": {"effort": {"reasoning_strength": "high"}},
    "tencent-Hy3": {"no thinking": {"reasoning_effort": "no_think"}},
}
# Whole prompts that differ from a whole one of transformers, with the reason.
_MOVED = "the template puts a later system message before everything; ours stays where it was sent"
DIFFERENCES: dict[tuple[str, str], str] = {
    ("MiniMax-M2", "result in parts"): "the template takes parts of a result for several results",
    (
        "NVIDIA-Nemotron-Nano-v2",
        "no thinking",
    ): "the template has no variable, but reads /no_think in the system message",
    ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "system later"): _MOVED,
    ("deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", "system later"): _MOVED,
    ("llama-cpp-deepseek-r1", "system later"): _MOVED,
    ("llama-cpp-rwkv-world", "system later"): _MOVED,
    (
        "openai-gpt-oss-120b",
        "call with text",
    ): "the template takes the text for reasoning, which it drops after the answer",
}
# Templates that may refuse where transformers does not: the first reads a variable `functions`, which is not given, and
# refuses everything; the second refuses tools whose parameters have no description.
REFUSING = {"fireworks-ai-llama-3-firefunction-v2", "CohereForAI-c4ai-command-r-plus-tool_use"}


def words(shape: Mapping[str, Any]) -> set[str]:
    """Return what must be in a prompt: each text begins with a word of its own."""
    texts = [one["function"][name] for one in shape.get("tools", ()) for name in ("name", "description")]
    given = json.dumps([shape["messages"], shape.get("documents"), texts])
    return set(re.findall(r"word[a-z]+\d*|(?:about )?get[a-z]+", given))


_NOT_TEXT = re.compile(
    r"""\\+"city|["']type["']: ["']text["']"""
)  # arguments or parts of a text as Python or JSON writes them


def is_whole(text: str, shape: Mapping[str, Any]) -> bool:
    return all(word in text for word in words(shape)) and not _NOT_TEXT.search(text)


def forms(messages: list[dict[str, Any]]) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield the messages in the forms in which templates may want them, the recommended one first.

    With each form comes whether null must reach the template: `apply_chat_template` leaves it out.
    """
    for as_object in (True, False):
        for empty in ("sent", "absent", "null", ""):
            yield [_in_form(message, as_object, empty) for message in messages], empty == "null"


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


def theirs(tokenizer: Any, shape: Mapping[str, Any], variables: Mapping[str, Any]) -> tuple[str, str]:
    """Return transformers' whole prompt and "whole", or what is wrong with all of its prompts: "lost" or "refused"."""
    outcome = "refused"
    continued = shape.get("continue_final_message", False)
    for messages, nulls in forms(shape["messages"]):
        options: dict[str, Any] = {
            "tools": shape.get("tools"),
            "documents": shape.get("documents"),
            "add_generation_prompt": shape.get("add_generation_prompt", not continued),
            "continue_final_message": continued,
            **FIXED,
            **variables,
        }
        try:
            if nulls:
                rendered, _ = render_jinja_template(
                    [messages], chat_template=tokenizer.chat_template, **options, **TOKENS
                )
                text = rendered[0]
            else:
                text = tokenizer.apply_chat_template(messages, tokenize=False, **options)
        except Exception:  # noqa: BLE001 (a template may raise anything)
            continue
        if is_whole(text, shape):
            return text, "whole"
        outcome = "lost"
    return "", outcome


def ours(template: ChatTemplate, shape: Mapping[str, Any]) -> str | None:
    arguments = FIXED | shape.get("chat_template_kwargs", {})
    request = chat_request(parse_body(ChatBody, json.dumps(shape | {"chat_template_kwargs": arguments}).encode()), {})
    try:
        return template.render(request.messages or (), request.template_arguments, request.chat_options)
    except InvalidRequest:
        return None


def outcome(name: str, template: ChatTemplate, tokenizer: Any, title: str) -> str:
    """Return "equal", "mended" (ours alone is whole), "refused" (by both, or instead of a loss), or a fault."""
    shape, variables = SHAPES[title], VARIABLES.get(title, {}) | OWN_VARIABLES.get(name, {}).get(title, {})
    text, (expected, kind) = ours(template, shape), theirs(tokenizer, shape, variables)
    if text is None:
        return "refused alone" if kind == "whole" else "refused"
    if kind == "whole":
        return "equal" if text == expected else "different"
    return "mended" if is_whole(text, shape) else "lost"


@pytest.mark.cases(ci=35)
@pytest.mark.full
@pytest.mark.parametrize("name", real_templates() or [pytest.param("", marks=pytest.mark.skip("`make real-formats`"))])
def test_prompts_are_whole_and_those_of_transformers(name: str, tmp_path: Path) -> None:
    source = real_templates()[name].read_text(encoding="utf-8")
    write_tokenizer(tmp_path, byte_level(), tokenizer_class="PreTrainedTokenizerFast", chat_template=source, **TOKENS)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    template = ChatTemplate(source, TOKENS)
    try:
        outcomes = {title: outcome(name, template, tokenizer, title) for title in SHAPES}
    finally:
        template.close()
    faults = {title: found for title, found in outcomes.items() if found not in ("equal", "mended", "refused")}
    assert faults == {title: "different" for listed, title in DIFFERENCES if listed == name}
    if name not in REFUSING:
        refused = {title for title, found in outcomes.items() if found == "refused"}
        assert refused <= {"documents", "empty answer"}, "a conversation is refused that could be written"
