"""Messages of gpt-oss: reasoning, answers and calls apart, however the text is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.harmony import TOKENS, HarmonyParser

START = "<|start|>assistant"
ANALYSIS, FINAL = "<|channel|>analysis<|message|>", "<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "<|x"}'
OTHER_CALL = ' to=functions.g<|channel|>commentary json<|message|>{"b": 1}'
Calls = list[tuple[str, str]]
TEXTS: list[tuple[str, str, str, Calls]] = [
    (f"{ANALYSIS}a <|b<|end|>{START}{FINAL}c <|d", "a <|b", "c <|d", []),
    (f"{FINAL}c<|end|>", "", "c", []),
    (f"{FINAL}c<|return|>", "", "c", []),
    (f"{ANALYSIS}cut", "cut", "", []),
    (f"{ANALYSIS}a<|end|>{START}<|channel|>fin", "a", "", []),
    (f"{ANALYSIS}a<|end|>{START}{CALL}<|call|>", "a", "", [("f", '{"a": "<|x"}')]),
    (f"{ANALYSIS}a<|end|>{START}{CALL}", "a", "", [("f", '{"a": "<|x"}')]),
    (OTHER_CALL, "", "", [("g", '{"b": 1}')]),
    (f"{ANALYSIS}a<|end|>{START}<|channel|>commentary<|message|>I look.<|end|>{START}{CALL}<|call|>", "a", "I look.",
     [("f", '{"a": "<|x"}')]),
    (f"{CALL}<|call|>{START}{OTHER_CALL}<|call|>", "", "", [("f", '{"a": "<|x"}'), ("g", '{"b": 1}')]),
    (f"{ANALYSIS}a<|end|>{START}{ANALYSIS}b<|end|>{START}{FINAL}c", "a\nb", "c", []),
    ("<|channel|>analysis to=python code<|message|>1 + 1<|call|>", "1 + 1", "", []),
    ("<|channel|>commentary to=functions.f<|message|><|call|>", "", "", [("f", "{}")]),
    (f"{FINAL[:-11]} <|constrain|>json<|message|>{{}}", "", "{}", []),
    ('{"plain": 1}', "", '{"plain": 1}', []),
    (" to be <|or", "", " to be <|or", []),
    ("", "", "", []),
]  # fmt: skip


def parse(
    pieces: list[str], tools: tuple[str, ...] | None = ("f", "g"), parallel: bool = True
) -> tuple[str, str, Calls]:
    parser = HarmonyParser(tools, lambda: "id", parallel)
    reasoning, content, calls = "", "", []
    for parts in [*map(parser.push, pieces), parser.flush()]:
        reasoning, content = reasoning + parts.reasoning, content + parts.content
        for delta in parts.tool_calls:
            if delta.id is not None:
                calls.append((delta.name or "", ""))
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.arguments)
    return reasoning, content, calls


@pytest.mark.parametrize(("text", "reasoning", "content", "calls"), TEXTS)
def test_each_message(text: str, reasoning: str, content: str, calls: Calls) -> None:
    assert parse([text]) == (reasoning, content, calls)
    assert parse(list(text)) == (reasoning, content, calls)


@given(
    st.lists(
        st.sampled_from([*TOKENS, START, ANALYSIS, CALL, " to=functions.f", "x", " ", "{}", "<|", "final"]), max_size=12
    ),
    st.data(),
)
def test_any_division_gives_the_same_parts(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    places = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    assert parse(pieces) == parse([text]) == parse(list(text))


def test_without_tools_a_call_is_content() -> None:
    assert parse([CALL], tools=None) == ("", CALL, [])


def test_without_parallel_calls_only_the_first_counts() -> None:
    text = f"{CALL}<|call|>{START}{OTHER_CALL}"
    assert parse([text], parallel=False)[2] == [("f", '{"a": "<|x"}')]
