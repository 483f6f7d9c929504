"""Reasoning between tags: separated from the answer, however the text is divided."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.reasoning import (
    REASONING_FORMATS,
    ReasoningParser,
    choose_reasoning_format,
    closes_reasoning,
    opens_reasoning,
)

TEXTS = [
    ("qwen3", "<think>\na < b, </b\n</think>\n\nHi <think>", False, "a < b, </b", "Hi <think>"),
    ("qwen3", "a b</think>c", True, "a b", "c"),
    ("qwen3", "\n<think>a</think>c", True, "a", "c"),
    ("qwen3", "no tags", False, "", "no tags"),
    ("qwen3", "<thin", False, "", "<thin"),
    ("deepseek_r1", "cut off ", True, "cut off", ""),
    ("granite", "Here is my thought process: x Here is my response: y", False, "x", "y"),
    ("mistral", "[THINK]x[/THINK]y", False, "x", "y"),
    ("seed_oss", "<seed:think>x</seed:think>y", False, "x", "y"),
    ("kimi_vl", "◁think▷x◁/think▷y", False, "x", "y"),
    ("command_a", "<|START_THINKING|>x<|END_THINKING|>y", False, "x", "y"),
]


def parse(form: str, pieces: list[str], is_open: bool) -> tuple[str, str]:
    parser = ReasoningParser(REASONING_FORMATS[form], is_open)
    parts = [*map(parser.push, pieces), parser.flush()]
    return "".join(part[0] for part in parts), "".join(part[1] for part in parts)


@given(st.sampled_from(TEXTS), st.lists(st.integers(0, 120), max_size=8))
def test_any_division_gives_the_same_parts(example: tuple[str, str, bool, str, str], cuts: list[int]) -> None:
    form, text, is_open, reasoning, content = example
    places = sorted(cut for cut in cuts if cut < len(text))
    pieces = [text[start:end] for start, end in itertools.pairwise([0, *places, len(text)])]
    assert parse(form, pieces, is_open) == (reasoning, content)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("<think>", "qwen3"),
        ("[THINK]", "mistral"),
        ("<seed:think>", "seed_oss"),
        ("<|START_THINKING|>", "command_a"),
        ("{{ content.split('</think>') }}<think:opensource>", "hunyuan"),
        ("<|start|>assistant<|channel|>analysis<|message|>", "openai_gptoss"),
        ("{{ messages }}", None),
        (None, None),
    ],
)
def test_the_template_decides(template: str | None, name: str | None) -> None:
    form = choose_reasoning_format(template)
    assert (None if form is None else form.name) == name


def test_a_prompt_may_open_the_reasoning() -> None:
    assert opens_reasoning(REASONING_FORMATS["qwen3"], "<|assistant|><think>\n")
    assert not opens_reasoning(REASONING_FORMATS["qwen3"], "<think>\n\n</think>\n\n")
    assert opens_reasoning(REASONING_FORMATS["deepseek_r1"], "")


def test_a_prompt_may_close_the_reasoning() -> None:
    assert closes_reasoning(REASONING_FORMATS["qwen3"], "<think>\n\n</think>\n\n")
    assert not closes_reasoning(REASONING_FORMATS["qwen3"], "<|assistant|><think>\n")


def test_markers_are_the_special_tokens_of_the_tags() -> None:
    assert REASONING_FORMATS["qwen3"].markers == ("<think>", "</think>")
    form = REASONING_FORMATS["openai_gptoss"]
    rest = "".join((form.start, form.end, form.then, form.answer))
    for marker in form.markers:
        rest = rest.replace(marker, "")
    assert "<|" not in rest


@pytest.mark.parametrize("text", ["</think>\n\nHi", " </think>Hi", "Hi"])
def test_an_end_without_a_beginning_is_no_content(text: str) -> None:
    for pieces in ([text], list(text)):
        parser = ReasoningParser(REASONING_FORMATS["qwen3"])
        shown = [*map(parser.push, pieces), parser.flush()]
        assert ("".join(one for one, _ in shown), "".join(one for _, one in shown)) == ("", "Hi")
