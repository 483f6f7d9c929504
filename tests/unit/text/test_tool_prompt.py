"""Messages with tools: as they are for templates that know tools, as text for others."""

from __future__ import annotations

import hashlib
import re
from typing import Any

import pytest

from app.text.chat import ChatOptions, ChatTemplate
from app.text.template_form import TemplateForm
from app.text.tool_calls import ToolCallParser
from app.text.tool_formats import TOOL_FORMATS

HERMES = TOOL_FORMATS["hermes"]
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
KNOWING = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}{{ m.content | default('') }}{{ m.tool_calls | default('') }}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "f", "description": "does it", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "do it"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "done", "tool_call_id": "c"},
]


def render(template: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(template, {}).render(messages, {}, ChatOptions(**options), HERMES)


def test_a_template_that_knows_tools_gets_them_with_decoded_arguments() -> None:
    text = render(KNOWING, HISTORY, tools=(TOOL,))
    assert '"name": "f"' in text and "{'a': 1}" in text


def test_another_template_gets_text_that_the_parser_reads() -> None:
    text = render(PLAIN, HISTORY, tools=(TOOL,))
    assert text.startswith("[system]") and '"description": "does it"' in text
    assert text.endswith("[tool]done[assistant]")
    written = text.partition("[assistant]")[2].partition("[tool]")[0]
    parsed = ToolCallParser(HERMES, {"f": {}}, lambda: "id").push(written)
    assert [(call.name, call.arguments) for call in parsed.tool_calls] == [("f", '{"a": 1}')]


def test_the_system_message_stays_the_first() -> None:
    text = render(PLAIN, [{"role": "system", "content": "Be kind."}, *HISTORY], tools=(TOOL,))
    assert text.startswith("[system]Be kind.\n\nYou can call")
    assert text.count("[system]") == 1


def test_arguments_that_are_no_json_stay_text() -> None:
    call = {**CALL, "function": {"name": "f", "arguments": "{broken"}}
    assert "{broken" in render(KNOWING, [HISTORY[0], {**HISTORY[1], "tool_calls": [call]}])


def test_the_last_message_is_continued() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "The end "}]
    options = ChatOptions(continue_final_message=True)
    assert ChatTemplate(PLAIN, {}).render(messages, {}, options) == "[user]hi[assistant]The end "
    bare = ChatOptions(add_generation_prompt=False)
    assert ChatTemplate(PLAIN, {}).render(messages[:1], {}, bare) == "[user]hi"


def fitted(messages: list[dict[str, Any]], form: str = "mistral") -> list[dict[str, Any]]:
    return TemplateForm(short_ids=form == "mistral").fit(messages, (), TOOL_FORMATS[form])


def called(*ids: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": one} for one in ids]}


def result(given: str | None) -> dict[str, Any]:
    return {"role": "tool", "content": "done"} | ({} if given is None else {"tool_call_id": given})


@pytest.mark.parametrize(
    "ids",
    [
        ("abcdefghi",),
        ("call_0a1b2c3d4e5f",),
        ("call_same0001", "call_same0002"),
        ("1", "2", "3"),
        ("38f04d9e-a184-424a-8dc6-ed9a88da5000", "38f04d9e-a184-424a-8dc6-ed9a88da5001"),
        ("ÄÖÜäöüßß1", "abcdefgh\n"),
        ("a", hashlib.sha256(b"a").hexdigest()[:9]),  # an id that is short already, and equal to another's short one
    ],
)
def test_foreign_ids_become_short_ones_that_belong_together(ids: tuple[str, ...]) -> None:
    messages = [called(*ids), *map(result, reversed(ids)), called(*ids), *map(result, ids)]
    found = fitted(messages)
    short = [call["id"] for call in found[0]["tool_calls"]]
    assert all(re.fullmatch("[A-Za-z0-9]{9}", one) for one in short) and len(set(short)) == len(ids)
    assert [one["tool_call_id"] for one in found[1 : len(ids) + 1]] == short[::-1]
    assert [call["id"] for call in found[len(ids) + 1]["tool_calls"]] == short
    assert all(one == given for one, given in zip(short, ids, strict=True) if re.fullmatch("[A-Za-z0-9]{9}", given))
    assert fitted(messages) == found, "a conversation has the same prompt each time"
    assert fitted(messages, "hermes")[1] == messages[1], "other templates get the ids that were sent"


def test_missing_ids_are_given_in_order() -> None:
    found = fitted([called(None, None), result(None), result(None), result(None)])
    first, second = (call["id"] for call in found[0]["tool_calls"])
    assert first != second
    assert [one["tool_call_id"] for one in found[1:3]] == [first, second]
    assert len(found[3]["tool_call_id"]) == 9
