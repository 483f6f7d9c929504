"""Tool calls in text: each family's format, and the same calls however the text is divided."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.tool_calls import ToolCallParser
from app.text.tool_formats import TOOL_FORMATS, choose_tool_format

Calls = list[tuple[str, str]]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "string"}, "b": {"type": "integer"}, "c": {"type": "object"}},
    "required": ["a"],
}
TOOLS = {"f": SCHEMA, "get_weather": SCHEMA}
TEXTS: list[tuple[str, str, str, Calls]] = [
    (
        "hermes",
        'Hi.\n<tool_call>\n{"name": "f", "arguments": {"a": "x}<\\""}}\n</tool_call>\n<tool_call>\n'
        '{"arguments": {"b": [1, {"c": 2}]}, "name": "get_weather"}\n</tool_call>',
        "Hi.",
        [("f", '{"a": "x}<\\""}'), ("get_weather", '{"b": [1, {"c": 2}]}')],
    ),
    ("hermes", '<tool_call>[{"name": "f", "arguments": {}}, {"name": "f"}]</tool_call>', "", [("f", "{}")] * 2),
    ("hermes", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>ok', "ok", [("f", '{"a": 1}')]),
    ("hermes", "<tool_call>nonsense</tool_call> <b> <tool", "<tool_call>nonsense</tool_call> <b> <tool", []),
    ("hermes", '<tool_call>{"name": 5}</tool_call>', '<tool_call>{"name": 5}</tool_call>', []),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (
        "llama3_json",
        '{"name": "f", "parameters": {"a": 1}}; {"name": "get_weather", "parameters": {}}',
        "",
        [("f", '{"a": 1}'), ("get_weather", "{}")],
    ),
    ("llama3_json", '{"function": {"name": "f", "arguments": {"x": 1}}}', "", [("f", '{"x": 1}')]),
    ("llama3_json", '{"answer": 42} ok', '{"answer": 42} ok', []),
    ("llama3_json", ' {"name": "Bob", "age": 3}', ' {"name": "Bob", "age": 3}', []),
    ("mistral", 'ok [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "ok", [("f", '{"a": 1}')]),
    ("mistral", '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]f{"b": "}"}', "", [("f", '{"a": 1}'), ("f", '{"b": "}"}')]),
    ("phi4_mini_json", '<|tool_call|>[{"name": "f", "arguments": {}}]<|/tool_call|>', "", [("f", "{}")]),
    ("phi4_mini_json", 'functools[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("granite", '<|tool_call|>[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("json", '[{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    ("json", 'text {"name": "f"}', 'text {"name": "f"}', []),
]


def parse(form: str, pieces: Sequence[str], parallel: bool = True) -> tuple[str, Calls]:
    numbers = itertools.count()
    parser = ToolCallParser(TOOL_FORMATS[form], TOOLS, lambda: f"id{next(numbers)}", parallel)
    content, calls = "", []
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.tool_calls:
            if delta.id is not None:
                assert delta.index == len(calls)
                calls.append((delta.name or "", ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


@pytest.mark.parametrize(("form", "text", "content", "calls"), TEXTS)
def test_each_format(form: str, text: str, content: str, calls: Calls) -> None:
    assert parse(form, [text]) == (content, calls)


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 200), max_size=12))
def test_any_division_gives_the_same_calls(example: tuple[str, str, str, Calls], cuts: list[int]) -> None:
    form, text, content, calls = example
    places = sorted(cut for cut in cuts if cut < len(text))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    assert parse(form, pieces) == (content, calls)


FRAGMENTS = [
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "{",
    "}",
    "[",
    "]",
    '"name"',
    ": ",
    '"f"',
    ", ",
    '"arguments"',
]
FRAGMENTS += [" ", "\n", "x", "\\", '"', ";", "<", "functools", "<|tool_call|>", "1"]


@given(st.sampled_from(sorted(TOOL_FORMATS)), st.lists(st.sampled_from(FRAGMENTS), max_size=25), st.data())
def test_any_text_divided_in_any_way_is_read_as_the_whole(form: str, fragments: list[str], data: st.DataObject) -> None:
    text = "".join(fragments)
    whole = parse(form, [text])
    assert parse(form, list(text)) == whole
    cut = data.draw(st.integers(0, len(text)))
    assert parse(form, [text[:cut], text[cut:]]) == whole
    if not whole[1]:
        assert whole[0] == text, "a text without calls is unchanged"


@pytest.mark.parametrize("text", ["<tool_call><tool_call>", "<tool_call> <tool_call>x<tool_call>", "<tool_call>"])
def test_markers_without_calls_are_text(text: str) -> None:
    assert parse("hermes", [text]) == (text, [])


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = '<tool_call>{"name": "f"}</tool_call><tool_call>{"name": "f"}</tool_call>'
    assert parse("hermes", [text], parallel=False) == ("", [("f", "{}")])


@pytest.mark.parametrize(
    ("template", "model_type", "name"),
    [
        ("{% if tools %}<tool_call>{% endif %}", "qwen2", "hermes"),
        ("{{ '[TOOL_CALLS]' }}", "mistral", "mistral"),
        ('\'{"name": function name, "parameters": dictionary}\'', "llama", "llama3_json"),
        ("<|tool|>{{ tools }}<|/tool|><|/tool_call|>", "phi3", "phi4_mini_json"),
        ("{{ tools }}", "granite", "granite"),
        (None, "llama", "hermes"),
    ],
)
def test_the_template_decides(template: str | None, model_type: str, name: str) -> None:
    assert choose_tool_format(template, model_type).name == name
