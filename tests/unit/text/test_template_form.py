"""A template's form is found at load, and a conversation in that form has lost nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import InvalidRequest
from app.text.chat import ChatOptions, ChatTemplate

TOOL = {
    "type": "function",
    "function": {"name": "get", "description": "gets", "parameters": {"type": "object", "properties": {}}},
}
START = "{% for m in messages %}[{{ m.role }}]"
END = "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
NAMES = "{% for c in m.tool_calls %}<{{ c.function.name }} {{ c.function.arguments | tojson }}>{% endfor %}"
JOINED = "{% for c in m.tool_calls %}<{{ c.function.name + ' ' + c.function.arguments }}>{% endfor %}"
PLAIN = START + "{{ m.content }}" + END
NATIVE = START + "{{ m.content or '' }}{% if m.tool_calls %}" + NAMES + "{% endif %}" + END
NULL_ONLY = (
    START + "{% if m.tool_calls and m.content is none %}" + JOINED + "{% else %}{{ m.content }}{% endif %}" + END
)
CALLS_OR_TEXT = START + "{% if m.tool_calls %}" + NAMES + "{% else %}{{ m.content }}{% endif %}" + END
SINGLE = START + (
    "{% if m.tool_calls %}{% if m.tool_calls | length > 1 %}{{ raise_exception('one!') }}{% endif %}"
    + NAMES
    + "{% else %}{{ m.content }}{% endif %}"
    + END
)
PLAN = START + "{% if m.tool_calls %}{{ m.tool_plan }}" + NAMES + "{% else %}{{ m.content }}{% endif %}" + END
PARTS = (
    START
    + "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    + END
)
FIRST_PART = START + "{{ m.content if m.content is string else m.content[0].text }}" + END
ONLY_PARTS = START + "{% for p in m.content %}{{ p.text }}{% endfor %}" + END
ALTERNATING = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role == ns.last %}{{ raise_exception('alternate!') }}"
    "{% endif %}{% set ns.last = m.role %}[{{ m.role }}]{{ m.content }}" + END
)
BARE_TOOLS = (
    "{% for t in tools or [] %}{{ t.name }}: {{ t.description }} {{ t.parameters | tojson }}{% endfor %}" + PLAIN
)
NEEDS_A_LIST = "{% for t in tools %}{{ t | tojson }}{% endfor %}" + PLAIN
FUNCTIONS_TEXT = "{{ '' + functions }}" + PLAIN
ITEMS = (
    "{% for c in m.tool_calls or [] %}{{ c.function.name }}{% for k, v in c.function.arguments.items() %}{{ k }}{{ v }}"
    "{% endfor %}{% endfor %}{{ m.content }}"
)
ITEMS = START + ITEMS + END
USER = {"role": "user", "content": "question"}


def call(place: int, arguments: Any = '{"a": 1}') -> dict[str, Any]:
    return {"id": f"call_{place}", "type": "function", "function": {"name": f"get{place}", "arguments": arguments}}


def history(*calls: dict[str, Any], content: str | None = None) -> list[dict[str, Any]]:
    results = [
        {"role": "tool", "tool_call_id": one["id"], "content": f"result{place}"} for place, one in enumerate(calls)
    ]
    return [USER, {"role": "assistant", "content": content, "tool_calls": list(calls)}, *results]


def render(source: str, messages: list[dict[str, Any]], *tools: dict[str, Any]) -> str:
    template = ChatTemplate(source, {})
    try:
        return template.render(messages, {}, ChatOptions(tools=tools))
    finally:
        template.close()


@pytest.mark.cases(test=3)
@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (NATIVE, history(call(0)), '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]'),
        (
            NATIVE,
            history(call(0), content="text"),
            '[user]question[assistant]text<get0 {"a": 1}>[tool]result0[assistant]',
        ),
        (NATIVE, history(call(0, {"a": 1})), '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]'),
        (NULL_ONLY, history(call(0)), '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]'),
        (NULL_ONLY, history(call(0), content=""), '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]'),
        (
            NULL_ONLY,
            history(call(0, {"ä": "ö"}), content="text"),
            '[user]question[assistant]text[assistant]<get0 {"ä": "ö"}>[tool]result0[assistant]',
        ),
        (
            CALLS_OR_TEXT,
            history(call(0), content="text"),
            '[user]question[assistant]text[assistant]<get0 {"a": 1}>[tool]result0[assistant]',
        ),
        (
            PLAN,
            history(call(0), content="text"),
            '[user]question[assistant]text<get0 {"a": 1}>[tool]result0[assistant]',
        ),
        (
            SINGLE,
            history(call(0), call(1)),
            '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]<get1 {"a": 1}>[tool]result1[assistant]',
        ),
        (
            PLAIN,
            history(call(0, {"city": "Köln"}), content="text"),
            '[user]question[assistant]text<tool_call>\n{"name": "get0", "arguments": {"city": "Köln"}}\n</tool_call>'
            "[tool]result0[assistant]",
        ),
        (ALTERNATING, [USER, {"role": "user", "content": "more"}], "[user]question\n\nmore[assistant]"),
    ],
)
def test_calls_are_written_in_the_form_that_the_template_wants(
    source: str, messages: list[dict[str, Any]], expected: str
) -> None:
    assert render(source, messages) == expected


def test_results_belong_to_their_calls_when_each_call_has_a_message() -> None:
    messages = history(call(0), call(1))
    swapped = [*messages[:2], messages[3], messages[2], {"role": "user", "content": "next"}]
    assert render(SINGLE, swapped) == (
        '[user]question[assistant]<get0 {"a": 1}>[tool]result0[assistant]<get1 {"a": 1}>[tool]result1[user]next[assistant]'
    )


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (PARTS, "[user]onetwo[assistant]"),
        (PLAIN, "[user]one\ntwo[assistant]"),
        (FIRST_PART, "[user]one\ntwo[assistant]"),
        (ONLY_PARTS, "[user]onetwo[assistant]"),
    ],
)
def test_parts_of_a_text_are_a_list_where_the_template_writes_them(source: str, expected: str) -> None:
    parts = [{"type": "text", "text": text} for text in ("one", "two")]
    assert render(source, [{"role": "user", "content": parts}]) == expected


def test_a_template_that_wants_parts_gets_them_for_a_text() -> None:
    assert render(ONLY_PARTS, [USER]) == "[user]question[assistant]"


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("source", [BARE_TOOLS, NEEDS_A_LIST, FUNCTIONS_TEXT, PLAIN])
def test_tools_are_in_the_prompt_and_a_template_works_without_any(source: str) -> None:
    assert render(source, [USER]) == "[user]question[assistant]"
    text = render(source, [USER], TOOL)
    assert "gets" in text and text.endswith("[user]question[assistant]")
    assert text.startswith("[system]You can call") == (source == PLAIN)


def test_arguments_that_are_no_object_are_kept_or_refused() -> None:
    assert json.dumps("{broken") in render(NATIVE, history(call(0, "{broken")))
    with pytest.raises(InvalidRequest):
        render(ITEMS, history(call(0, "{broken")))


def test_what_a_template_writes_only_sometimes_is_refused_when_it_is_left_out() -> None:
    """No trial has five turns, so only the request shows that the first one is missing."""
    last_three = START.replace("messages", "messages[-3:]") + "{{ m.content }}" + END
    turns = [USER, {"role": "assistant", "content": "answer"}]
    assert render(last_three, [*turns, USER])
    with pytest.raises(InvalidRequest, match=r"leaves out messages\[0\].content"):
        render(last_three, [*turns, *turns, USER])
