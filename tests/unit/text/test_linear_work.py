"""Functions that read a client's or a model's text do work in proportion to its length, whatever the text is.

Lines of code are counted, not seconds, so the tests are exact on a busy machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from app.text.detokenizer import IncrementalDetokenizer, StopStrings
from app.text.harmony import TOKENS, HarmonyParser
from app.text.reasoning import REASONING_FORMATS, ReasoningParser
from app.text.tokenizer import Tokenizer
from app.text.tool_calls import ToolCallParser
from app.text.tool_formats import TOOL_FORMATS
from small_tokenizers import byte_level, write_tokenizer

LENGTH = 48
MOST = 4.5  # lines for a text of four times the length, as a multiple


def num_lines(work: Callable[[], object]) -> int:
    """Number of lines of Python that a function runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def assert_linear(work: Callable[[str], object], unit: str) -> None:
    """Checks the work for a text of many units, and for one of four times as many."""
    count = max(LENGTH // len(unit), 8)
    once, many = num_lines(lambda: work(unit * count)), num_lines(lambda: work(unit * 4 * count))
    assert many <= MOST * once, (unit, once, many)


def test_work_that_is_not_linear_is_found() -> None:
    with pytest.raises(AssertionError):
        assert_linear(lambda text: [text.count(each) for place in range(len(text)) for each in text[:place:7]], "ab")


def in_pieces(push: Callable[[str], object], flush: Callable[[], object], size: int) -> Callable[[str], object]:
    def work(text: str) -> None:
        for start in range(0, len(text), size):
            push(text[start : start + size])
        flush()

    return work


# After a marker, or alone: what may begin a call, and never becomes one.
BEGINNINGS = (
    *("", " ", "\n", "{", '{"', "[", "[[", "{ ", '{"name', '{"name": "', '{"name": "f", ', '{"type": [', '{"id": "{'),
    *(
        '{"arguments": {"a": "',
        '{"name": "f", "arguments": {"a": ',
        "name",
        "a.b-",
        "a ",
        "x",
        '{"type": functools[',
        "}",
    ),
    *('{"type": 1, ', '{"name": "f"}', '{"name": "f"} {"', "\\", '"', '{"\\', '{"type": "\\"'),
)


@pytest.mark.parametrize("unit", ["<b>", "</b>", "<b></b>", "<", "", "x"])
def test_elements_in_a_value(unit: str) -> None:
    shape = TOOL_FORMATS["minimax_m3"]
    before, start = shape.element, f'{shape.element}<invoke name="f">{shape.element}<a>'
    parser = [ToolCallParser(shape, {"f": {}}, lambda: "id") for _ in range(2)]
    work = in_pieces(lambda text: parser[0].push(text), lambda: parser.pop(0).flush(), 3)
    assert_linear(lambda text: work(start + text), before + unit)


def check_tool_calls(form: str, before: str, size: int) -> None:
    shape = TOOL_FORMATS[form]
    for beginning in BEGINNINGS:
        marks = tuple(filter(None, (*shape.opening, shape.end)))
        for marker in dict.fromkeys(("", *marks, *(marker[:-1] for marker in marks[:1]))):
            if marker + beginning:
                parser = [ToolCallParser(shape, {"f": {}}, lambda: "id") for _ in range(2)]
                work = in_pieces(lambda text: parser[0].push(text), lambda: parser.pop(0).flush(), size)  # noqa: B023
                assert_linear(lambda text: work(before + text), marker + beginning)  # noqa: B023


# One of each way of reading.
READ = (
    "hermes",
    "llama3_json",
    "mistral",
    "json",
    "apertus",
    "kimi_k2",
    "glm45",
    "qwen3_coder",
    "deepseek_v32",
    "pythonic",
    "lfm2",
    "functionary",
    "kimi_k3",
    "minimax_m3",
)


@pytest.mark.cases(test=1, ci=5)
@pytest.mark.parametrize("form", READ)
def test_tool_calls(form: str) -> None:
    check_tool_calls(form, "", 3)


@pytest.mark.nightly
@pytest.mark.parametrize(("before", "size"), [("{", 3), ("x", LENGTH * 4), ("[", 50), ("marker", 3)])
@pytest.mark.parametrize("form", READ)
def test_tool_calls_after_other_text(form: str, before: str, size: int) -> None:
    check_tool_calls(form, "".join(TOOL_FORMATS[form].opening) if before == "marker" else before, size)


@pytest.mark.cases(test=2, ci=6)
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("form", REASONING_FORMATS)
def test_reasoning(form: str, is_open: bool) -> None:
    shape = REASONING_FORMATS[form]
    for tag in (shape.start, shape.end):
        for unit in (tag, tag[:-1], tag + " ", " " + tag[:-1], " ", "\n", "x "):
            for before in ("", shape.start, shape.start + "x", shape.start + shape.end):
                parser = [ReasoningParser(shape, is_open) for _ in range(2)]
                work = in_pieces(lambda text: parser[0].push(text), lambda: parser.pop(0).flush(), 3)  # noqa: B023
                assert_linear(lambda text: work(before + text), unit)  # noqa: B023


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("before", ["", "<|channel|>", "<|channel|>final<|message|>", "to=functions.f<|message|>"])
def test_harmony(before: str) -> None:
    for unit in (
        *TOKENS,
        "<|",
        "<|channel|>analysis<|message|>x<|end|>",
        " ",
        "x",
        "to=",
        "to=functions.f<|message|>{}<|end|>",
    ):
        parser = [HarmonyParser(["f"], lambda: "id") for _ in range(2)]
        work = in_pieces(lambda text: parser[0].push(text), lambda: parser.pop(0).flush(), 3)  # noqa: B023
        assert_linear(lambda text: work(before + text), unit * (200 // len(unit)))  # noqa: B023


@pytest.mark.parametrize("stop", ["aaaaaaaaab", "abababac", " " * 30 + "x"])
def test_stop_strings(stop: str) -> None:
    for unit in ("a", "ab", " ", stop[:-1]):
        stops = [StopStrings([stop, stop[1:], "b" + stop]) for _ in range(2)]
        work = in_pieces(lambda text: stops[0].push(text), lambda: stops.pop(0).flush(), 3)  # noqa: B023
        assert_linear(work, unit)


@pytest.mark.parametrize("unit", ["\xff", "\x80", "\xf0\x9f\x99\x82", "a", " ", "\xf0", "\xe6\x9d\xb1\xf0"])
def test_detokenizer(unit: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_tokenizer(tmp_path, byte_level()))
    by_byte = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}

    def work(text: str) -> None:
        detokenizer = IncrementalDetokenizer(tokenizer, ["nothing"])
        for byte in text.encode("latin-1"):
            detokenizer.push(by_byte[bytes([byte])])
        detokenizer.flush()

    work("a")  # what is computed once
    assert_linear(work, unit)
