"""Every format of tool calls: what is written is read again, divided in any way, and allowed by the grammar that forces it."""

from __future__ import annotations

import itertools
import json
import warnings
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from app.errors import InvalidRequest
from app.text.chat import ChatTemplate
from app.text.tool_calls import ToolCallParser
from app.text.tool_formats import TOOL_FORMATS, ToolFormat, write_calls
from app.text.tool_grammars import forced_calls_grammar
from real_formats import real_template

READ = sorted(TOOL_FORMATS.keys() - {"openai"})  # harmony has a parser of its own
TAGGED = [name for name in READ if TOOL_FORMATS[name].parameter]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "number": {"type": "number"},
        "flag": {"type": "boolean"},
        "maybe": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "list": {"type": "array"},
        "object": {"$ref": "#/$defs/any"},
        "unit": {"enum": ["C", "F"]},
    },
    "required": ["text"],
    "$defs": {"any": {"type": "object"}},
}
TOOLS = {"get_weather": SCHEMA, "f": SCHEMA}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text("ab \"'\\{}[]<>,=\n🙂", max_size=6),
    lambda inner: (
        st.lists(inner, max_size=2) | st.dictionaries(st.text("ab", min_size=1, max_size=2), inner, max_size=2)
    ),
    max_leaves=4,
)
ARGUMENTS = st.fixed_dictionaries(
    {"text": st.text("ab c\"'\\{}[]<>(),=:/\n\té🙂", max_size=12)},
    optional={
        "number": st.integers(-99, 99) | st.just(1.5),
        "flag": st.booleans(),
        "maybe": st.none() | st.integers(0, 9),
        "list": st.lists(JSON_VALUES, max_size=2),
        "object": st.dictionaries(st.text("ab", min_size=1, max_size=2), JSON_VALUES, max_size=2),
        "unit": st.sampled_from(["C", "F"]),
    },
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(TOOLS)), ARGUMENTS), min_size=1, max_size=3)


def parse(
    form: ToolFormat, pieces: list[str], tools: dict[str, Any] | None = None, begun: str = "", reads_calls: bool = True
) -> tuple[str, list[tuple[str, str]]]:
    numbers = itertools.count()
    known = TOOLS if tools is None else tools
    parser = ToolCallParser(form, known if reads_calls else None, lambda: f"id{next(numbers)}", True, begun)
    content, calls = "", []
    for parsed in [*map(parser.push, pieces), parser.flush()]:
        content += parsed.content
        for delta in parsed.tool_calls:
            if delta.id is not None:
                calls.append((delta.name or "", ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return content, calls


def fitting(form: ToolFormat, arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without what elements have no form for: null, and values of which the schema says nothing."""
    left_out = ("maybe", "list", "object") if form.element else ()
    return {name: value for name, value in arguments.items() if name not in left_out}


@pytest.mark.cases(test=3, ci=17)
@pytest.mark.parametrize("name", READ)
@given(CALLS, st.lists(st.integers(0, 400), max_size=8))
def test_what_is_written_is_read_again(name: str, calls: list[tuple[str, Any]], cuts: list[int]) -> None:
    calls = [(tool, fitting(TOOL_FORMATS[name], arguments)) for tool, arguments in calls]
    text = write_calls(TOOL_FORMATS[name], calls)
    places = sorted(cut for cut in cuts if cut < len(text))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    content, found = parse(TOOL_FORMATS[name], pieces)
    assert [(one, json.loads(arguments)) for one, arguments in found] == calls
    assert content == ""


@pytest.mark.cases(test=7)
@pytest.mark.parametrize("name", READ)
@given(st.data())
def test_any_text_divided_in_any_way_is_read_as_the_whole(name: str, data: st.DataObject) -> None:
    form = TOOL_FORMATS[name]
    parts = [
        *form.markers,
        "f",
        "text",
        "1",
        " ",
        "\n",
        "{",
        "}",
        "[",
        "]",
        '"',
        "(",
        ")",
        "=",
        ",",
        "x",
        "<",
        "functions.",
    ]
    text = "".join(data.draw(st.lists(st.sampled_from(parts), max_size=25)))
    whole = parse(form, [text])
    assert parse(form, list(text)) == whole
    if not whole[1] and not form.around:
        assert whole[0] == text, "a text without calls is unchanged"


class Letters:
    """A vocabulary of bytes."""

    eos_token_id, bos_token_id, special_token_ids = 256, None, (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"\xff</s>")

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


LETTERS = LLTokenizer(TokenizerWrapper(Letters()), slices=[])


def allowed(grammar: str, text: str) -> bool:
    """Return True if a grammar has a text. The reason why it has not is the part that it allows."""
    matcher = LLMatcher(LETTERS, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = list(text.encode())
    count = matcher.try_consume_tokens(tokens)
    assert count == len(tokens), (text[:count], "|", text[count:])
    return matcher.is_accepting()


FORCED: list[dict[str, Any]] = [
    {"text": 'Zürich\'s\n<b> & "x"'},
    {"text": "", "number": 1.5, "flag": True, "maybe": None, "list": [1, {"a": "b"}], "object": {"b": 1}, "unit": "F"},
    {"text": "a", "unit": "C"},
]


@pytest.mark.parametrize("name", sorted(TOOL_FORMATS))
def test_forced_calls_are_those_that_models_write(name: str) -> None:
    form = TOOL_FORMATS[name]
    grammar = forced_calls_grammar(form, list(TOOLS.items()), parallel=True)
    for number, arguments in enumerate(FORCED):
        assert allowed(grammar, _python(form, write_calls(form, [("f", fitting(form, arguments))]))), number
    if not form.is_single:
        text = write_calls(form, [("f", FORCED[0]), ("get_weather", fitting(form, FORCED[1]))])
        assert allowed(grammar, _python(form, text))
        single = forced_calls_grammar(form, list(TOOLS.items()), parallel=False)
        with pytest.raises(AssertionError):
            allowed(single, _python(form, text))
    with pytest.raises(AssertionError):
        allowed(grammar, write_calls(form, [("g", FORCED[0])]))
    with pytest.raises(AssertionError):
        allowed(grammar, write_calls(form, [("f", {"text": "a", "unit": "K"})]))


def _python(form: ToolFormat, text: str) -> str:
    """Flags of Python's calls are Python's words."""
    return text.replace("=true", "=True") if form.is_pythonic else text


@pytest.mark.parametrize("name", TAGGED)
def test_forced_texts_have_lengths_and_patterns(name: str) -> None:
    form = TOOL_FORMATS[name]
    properties = {"a": {"type": "string", "pattern": "^[0-9]{2}/x$"}, "b": {"type": "string", "maxLength": 3}}
    schema = {"type": "object", "properties": properties}
    grammar = forced_calls_grammar(form, [("f", schema)], True)
    assert allowed(grammar, write_calls(form, [("f", {"a": "12/x", "b": "é\n🙂"})]))
    for wrong in ({"a": "1/x"}, {"b": "abcd"}):
        with pytest.raises(AssertionError):
            allowed(grammar, write_calls(form, [("f", wrong)]))


@pytest.mark.parametrize("name", [*TAGGED, "pythonic"])
def test_arguments_without_listed_properties_are_free(name: str) -> None:
    form = TOOL_FORMATS[name]
    for schema in ({}, {"type": "object"}, {"type": "object", "additionalProperties": {"type": "string"}}):
        grammar = forced_calls_grammar(form, [("f", schema)], True)
        assert allowed(grammar, write_calls(form, [("f", {})]))
        assert allowed(grammar, write_calls(form, [("f", {"a": "x", "b_c": "y"})]))
    closed = forced_calls_grammar(form, [("f", {"properties": {}, "additionalProperties": False})], True)
    with pytest.raises(AssertionError):
        allowed(closed, write_calls(form, [("f", {"a": "x"})]))


NODE: dict[str, Any] = {
    "properties": {
        "name": {"type": "string"},
        "size": {"type": "integer"},
        "nodes": {"items": {"$ref": "#/$defs/node"}},
    },
    "required": ["name"],
}
NESTED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "tags": {"type": "array", "items": {"type": "string"}},
        "grid": {"items": {"items": {"type": "number"}}},
        "node": {"$ref": "#/$defs/node"},
        "free": {"type": "object"},
        "either": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "integer"}}]},
    },
    "$defs": {"node": NODE},
}


@pytest.mark.parametrize(
    "arguments",
    [
        {"tags": ["a", "", "1", "<b>"], "grid": [[1, 2.5], []]},
        {"node": {"name": "node", "size": 3, "nodes": []}},
        {"tags": [], "grid": [[]], "node": {"name": " x\n "}},
    ],
)
def test_elements_in_one_another_follow_the_schema(arguments: dict[str, Any]) -> None:
    form = TOOL_FORMATS["minimax_m3"]
    text = write_calls(form, [("f", arguments), ("f", {})])
    for pieces in ([text], list(text)):
        content, calls = parse(form, pieces, {"f": NESTED})
        assert (content, [json.loads(given) for _, given in calls]) == ("", [arguments, {}])
    assert allowed(forced_calls_grammar(form, [("f", NESTED)], True), text)


def test_elements_without_a_schema_or_in_its_cycle_are_read() -> None:
    form = TOOL_FORMATS["minimax_m3"]
    node = {"name": "a", "nodes": [{"name": "b", "nodes": [{"name": "c"}]}]}
    free = {"a": {"a": {"a": 1}}, "b": ["x", {"c": True}]}
    _, calls = parse(form, list(write_calls(form, [("f", {"node": node, "free": free, "either": [1]})])), {"f": NESTED})
    assert json.loads(calls[0][1]) == {"node": node, "free": free, "either": [1]}
    forced = write_calls(form, [("f", {"node": '{"name": "a"}', "free": '{"a": 1}'})])
    _, calls = parse(form, list(forced), {"f": NESTED})
    assert json.loads(calls[0][1]) == {"node": {"name": "a"}, "free": {"a": 1}}


@pytest.mark.parametrize("name", [*TAGGED, "gemma4"])
@pytest.mark.parametrize("reference", ["#", "#/properties/a", "#/$defs/a"])
def test_a_parameter_may_refer_to_anything_in_the_schema(name: str, reference: str) -> None:
    form = TOOL_FORMATS[name]
    inner = {"type": "object", "properties": {"a": {"$ref": reference}, "n": {"type": "integer"}}}
    schema = {**inner, "properties": {"a": inner, "b": {"$ref": reference}}, "$defs": {"a": inner}}
    grammar = forced_calls_grammar(form, [("f", schema)], True)
    assert allowed(grammar, write_calls(form, [("f", {"b": {} if form.element else {"a": {}}})]))


def test_what_tags_cannot_follow_is_refused_by_name() -> None:
    schema = {"type": "object", "patternProperties": {"a": {}}}
    with pytest.raises(InvalidRequest, match="parameters of f have patternProperties") as refused:
        forced_calls_grammar(TOOL_FORMATS["glm45"], [("f", schema)], True)
    assert refused.value.field == "tools"


VALUES: list[tuple[Any, str, Any]] = [
    ({"type": "string"}, "5", "5"),
    ({"type": "string"}, "null", "null"),
    ({"type": ["string", "null"]}, "null", None),
    ({"type": "integer"}, "5", 5),
    ({"type": "integer"}, "5.0", 5),
    ({"type": "integer"}, "five", "five"),
    ({"type": "number"}, "1e3", 1000.0),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    ({"type": "boolean"}, "false", False),
    ({"type": "object"}, "{'y': [True, None]}", {"y": [True, None]}),
    ({"type": "array"}, "[1, 2", "[1, 2"),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "5", 5),
    ({"anyOf": [{"type": "integer"}, {"type": "string"}]}, "x", "x"),
    ({"$ref": "#/$defs/n"}, "5", 5),
    ({"enum": ["1", "2"]}, "1", "1"),
    ({"enum": [1, 2]}, "1", 1),
    ({}, "5", 5),
    ({}, "x y", "x y"),
    (True, '{"a": 1}', {"a": 1}),
]


@pytest.mark.parametrize(("schema", "text", "value"), VALUES)
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_schema_says_what_a_text_is(name: str, schema: Any, text: str, value: Any) -> None:
    form = TOOL_FORMATS[name]
    tool = {"properties": {"a": schema}, "$defs": {"n": {"type": "integer"}}}
    _, calls = parse(form, list(write_calls(form, [("f", {"a": text})])), {"f": tool})
    assert json.loads(calls[0][1]) == {"a": value}


F = ("f", {"text": "a"})
THIRD = "<|open|>response<|sep|>"  # Kimi K3
THIRD_CALL = (
    '<|open|>call tool="f" index="1"<|sep|><|open|>argument key="text" type="string"<|sep|>a<|close|>argument<|sep|>'
)
AROUND: list[tuple[str, str, str, str, list[Any]]] = [
    ("functionary", ">>>", "all\nHi", "Hi", []),
    ("functionary", ">>>", 'all\n>>> {"a": 1}\nHi>>>f\n{"text": "a"}', '>>> {"a": 1}\nHi', [F]),
    ("functionary", ">>>", 'f\n{"text": "a"}>>>f\n{"text": "a"}>>>all\nDone', "Done", [F, F]),
    ("functionary", ">>>", "python\nprint(1)", ">>>python\nprint(1)", []),
    ("functionary", ">>>", "al", "al", []),
    ("gigachat3", "", 'Hi<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": {"text": "a"}}', "Hi", [F]),
    ("gigachat3", "", "A function call <b>.<|message_sep|>", "A function call <b>.", []),
    ("kimi_k3", "", THIRD + "Hi<|close|>response<|sep|><|close|>message<|sep|>", "Hi", []),
    ("kimi_k3", THIRD, "Hi<|close|>response<|sep|><|close|>message<|sep|>", "Hi", []),
    ("kimi_k3", THIRD, f"Hi<|close|>response<|sep|><|open|>tools<|sep|>{THIRD_CALL}<|close|>call<|sep|><|close|>tools<|sep|>"
     "<|close|>message<|sep|>", "Hi", [F]),
    ("kimi_k3", THIRD, "a <|open|>b<|sep|> c <", "a <|open|>b<|sep|> c <", []),
]  # fmt: skip


@pytest.mark.parametrize(("name", "begun", "text", "content", "calls"), AROUND)
def test_what_stands_around_an_answer_is_no_content(
    name: str, begun: str, text: str, content: str, calls: list[Any]
) -> None:
    for pieces in ([text], list(text)):
        found, given = parse(TOOL_FORMATS[name], pieces, begun=begun)
        assert (found.strip(), [(one, json.loads(arguments)) for one, arguments in given]) == (content, calls)
        if not calls:
            assert parse(TOOL_FORMATS[name], pieces, begun=begun, reads_calls=False) == (found, [])


def test_texts_between_tags_arrive_as_they_grow() -> None:
    form = TOOL_FORMATS["qwen3_coder"]
    parser = ToolCallParser(form, TOOLS, lambda: "id")
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\n")
    assert "".join(delta.arguments for delta in parser.push("x" * 50 + "\n").tool_calls).count("x") > 30


CUT_OFF = [
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\nabc", '{"text": "'),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\nnonsense", '{"text": "a"'),
    ("pythonic", "[f(text='a', number=open('x'))]", '{"text": "a", "number": '),
    ("deepseek_v31", '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"text": "a', '{"text": "a'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "[1]"),
]


@pytest.mark.parametrize(("name", "text", "arguments"), CUT_OFF)
def test_broken_arguments_are_never_taken_for_whole_ones(name: str, text: str, arguments: str) -> None:
    _, calls = parse(TOOL_FORMATS[name], list(text))
    assert calls[0][0] == "f" and calls[0][1].startswith(arguments)
    with suppress(ValueError):
        assert not isinstance(json.loads(calls[0][1]), dict)


NO_CALLS = [
    ("qwen3_coder", "<tool_call>\n<function=f>\nnonsense</function>"),
    ("glm45", "<tool_call>two words</tool_call>"),
    ("pythonic", "[f(x) for x in y]"),
    ("pythonic", "[other(a=1)]"),
    ("pythonic", "see [f(text='a')]"),
    ("kimi_k2", "<|tool_calls_section_begin|>none<|tool_calls_section_end|>"),
    ("llama_function", "<function=f>text</function>"),
    ("deepseek_v3", "<｜tool▁calls▁begin｜>x"),
]


@pytest.mark.parametrize(("name", "text"), NO_CALLS)
def test_what_begins_like_a_call_and_is_none_is_content(name: str, text: str) -> None:
    assert parse(TOOL_FORMATS[name], list(text)) == (text, [])


VARIANTS: list[tuple[str, str, list[tuple[str, Any]]]] = [
    ("kimi_k2", '<|tool_call_begin|>f:0<|tool_call_argument_begin|>{"text": "a"}<|tool_call_end|>', [("f", {"text": "a"})]),
    ("mistral_v11", '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"text": "a"}', [("f", {"text": "a"})]),
    ("mistral_v11", '[TOOL_CALLS] [{"name": "f", "arguments": {"text": "a"}}]', [("f", {"text": "a"})]),
    ("qwen3_coder", "<function=f>\n<parameter=text>\na\nb\n</parameter>\n</function>", [("f", {"text": "a\nb"})]),
    ("qwen3_coder", "<tool_call><function=f><parameter=text>a</parameter></function></tool_call>", [("f", {"text": "a"})]),
    ("qwen3_coder", "<tool_call>\n<function=f>\n<parameter=text>\na\n</parameter>\n</tool_call>", [("f", {"text": "a"})]),
    ("glm45", "<tool_call>f</tool_call>", [("f", {})]),
    ("pythonic", "[f(text='it\\'s', object={'a': (1, -2.5)}), get_weather()]",
     [("f", {"text": "it's", "object": {"a": [1, -2.5]}}), ("get_weather", {})]),
    ("pythonic", '<|python_start|>[f(text="a")]<|python_end|>', [("f", {"text": "a"})]),
    ("lfm2", "<|tool_call_start|>[f(text='a', list=[true, None])]<|tool_call_end|>", [("f", {"text": "a", "list": [True, None]})]),
    ("command_a", '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "f", "parameters": {"text": "a"}}\n]<|END_ACTION|>',
     [("f", {"text": "a"})]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "calls"), VARIANTS)
def test_variants_that_models_write(name: str, text: str, calls: list[tuple[str, Any]]) -> None:
    for pieces in ([text], list(text)):
        content, found = parse(TOOL_FORMATS[name], pieces)
        assert [(one, json.loads(arguments)) for one, arguments in found] == calls
        assert content in ("", "<|python_end|>")


# ---- templates of real models --------------------------------------------------------------------------------------

NATIVE = {
    "Apertus-8B-Instruct": "apertus",
    "Apriel-1.6-15b-Thinker-fixed": "apriel",
    "ByteDance-Seed-OSS": "seed_oss",
    "Cohere2MoE": "command_a",
    "CohereForAI-c4ai-command-r7b-12-2024-tool_use": "command_a",
    "GLM-4.6": "glm45",
    "GLM-4.7-Flash": "glm45",
    "GigaChat3.1-10B-A1.8B": "gigachat",
    "LFM2.5-8B-A1B": "lfm2",
    "MiniMax-M1": "minimax",
    "MiniMax-M2": "minimax_m2",
    "Mistral-Small-3.2-24B-Instruct-2506": "mistral_v11",
    "mistralai-Mistral-Nemo-Instruct-2407": "mistral",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": "qwen3_coder",
    "NVIDIA-Nemotron-Nano-v2": "nemotron",
    "NousResearch-Hermes-3-Llama-3.1-8B-tool_use": "hermes",
    "Qwen-QwQ-32B": "hermes",
    "Qwen-Qwen2.5-7B-Instruct": "hermes",
    "Qwen-Qwen3-0.6B": "hermes",
    "Qwen3-Coder": "qwen3_coder",
    "Qwen3.5-4B": "qwen3_coder",
    "deepseek-ai-DeepSeek-R1-Distill-Llama-8B": "deepseek_v3",
    "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B": "deepseek_v3",
    "deepseek-ai-DeepSeek-V3.1": "deepseek_v31",
    "deepseek-ai-DeepSeek-V3.2": "deepseek_v32",
    "deepseek-ai-DeepSeek-V4": "deepseek_v4",
    "ibm-granite-granite-4.0": "hermes",
    "fireworks-ai-llama-3-firefunction-v2": "firefunction",
    "google-gemma-4-31B-it": "gemma4",
    "meetkai-functionary-medium-v3.1": "llama_function",
    "meetkai-functionary-medium-v3.2": "functionary",
    "GigaChat3-10B-A1.8B": "gigachat3",
    "Kimi-K3": "kimi_k3",
    "MiniMax-M3": "minimax_m3",
    "meta-llama-Llama-3.1-8B-Instruct": "llama3_json",
    "meta-llama-Llama-3.2-3B-Instruct": "llama3_json",
    "moonshotai-Kimi-K2": "kimi_k2",
    "openai-gpt-oss-120b": "openai",
    "openbmb-MiniCPM5-1B": "minicpm5",
    "tencent-Hy3": "hunyuan",
    "upstage-Solar-Open-100B": "solar",
}


@pytest.mark.cases(test=4, ci=24)
@pytest.mark.parametrize(("template", "name"), NATIVE.items())
def test_the_format_is_what_the_template_writes(template: str, name: str) -> None:
    chat = ChatTemplate(real_template(template), {"bos_token": "<s>", "eos_token": "</s>"})
    chat.close()
    assert chat.tool_format is not None and chat.tool_format.name == name


def test_an_escape_that_python_does_not_know_is_read_without_a_warning() -> None:
    """Python's compiler warns of it, on the terminal of the server since Python 3.12."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        content, ((name, arguments),) = parse(TOOL_FORMATS["pythonic"], [r"[f(text='\d')]"])
    assert (content, name, json.loads(arguments)) == ("", "f", {"text": r"\d"})
