"""Reasoning in generated text: what a model writes between tags such as `<think>` before its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

_SPACES = " \t\r\n"

ReasoningParserName = Literal["deepseek_r1", "qwen3", "granite", "mistral", "openai_gptoss"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The text before and after reasoning. `is_implied`: a text without the first tag begins with reasoning too.

    One of `headers` may precede the answer and is dropped. `tokens` are the special tokens of all of these texts.
    """

    name: str
    start: str
    end: str
    is_implied: bool = False
    headers: tuple[str, ...] = ()
    tokens: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the parser needs in the text."""
        return self.tokens or (self.start, self.end)


REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("deepseek_r1", "<think>", "</think>", is_implied=True),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        # Harmony (github.com/openai/harmony): messages of an assistant, each in a channel.
        ReasoningFormat(
            "openai_gptoss",
            "<|channel|>analysis<|message|>",
            "<|end|>",
            headers=("<|start|>assistant<|channel|>final<|message|>", "<|channel|>final<|message|>"),
            tokens=("<|start|>", "<|channel|>", "<|message|>", "<|end|>"),
        ),
    )
}


def choose_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Return the format that a chat template writes; None if it writes no reasoning."""
    source = template or ""
    if "<|channel|>analysis<|message|>" in source:
        return REASONING_FORMATS["openai_gptoss"]
    if "[THINK]" in source:
        return REASONING_FORMATS["mistral"]
    if "Here is my thought process:" in source:
        return REASONING_FORMATS["granite"]
    return REASONING_FORMATS["qwen3"] if "<think>" in source or "</think>" in source else None


def opens_reasoning(form: ReasoningFormat, prompt_end: str) -> bool:
    """Return True if a prompt that ends with this text lets the model begin inside of its reasoning."""
    return form.is_implied or prompt_end.rstrip(_SPACES).endswith(form.start)


class ReasoningParser:
    """Parser of one choice's text, which may be divided in any way. White space around both parts is dropped.

    `is_open`: the text begins inside of the reasoning; a first tag is accepted nevertheless.
    """

    def __init__(self, form: ReasoningFormat, is_open: bool = False) -> None:
        self._form = form
        self._part: Literal["before", "reasoning", "after", "content"] = "before"
        self._is_open = is_open
        self._held = ""
        self._is_empty = True  # no reasoning was returned yet

    def push(self, text: str) -> tuple[str, str]:
        """Return more of the reasoning and more of the content."""
        reasoning = content = ""
        for character in text:
            if self._part == "content":
                content += character
                continue
            self._held += character
            if self._part == "before":
                content += self._take_start()
            if self._part == "reasoning":
                reasoning += self._take_reasoning()
            if self._part == "after":
                content += self._take_header()
        return reasoning, content

    def flush(self) -> tuple[str, str]:
        """Return the rest at the end of the text."""
        held, self._held = self._held, ""
        if self._part == "reasoning" or (self._part == "before" and self._is_open):
            return held.rstrip(_SPACES), ""
        return "", held

    def _take_start(self) -> str:
        """Decide how the text begins, as soon as that is certain; return the content that this gives."""
        begun = self._held.lstrip(_SPACES)
        if begun == self._form.start:
            self._part, self._held = "reasoning", ""
        elif begun in self._form.headers:
            self._part, self._held = "content", ""
        elif not any(text.startswith(begun) for text in (self._form.start, *self._form.headers)):
            if not self._is_open:
                content, self._held, self._part = self._held, "", "content"
                return content
            self._part, self._held = "reasoning", begun
        return ""

    def _take_header(self) -> str:
        """Drop what precedes the answer after the reasoning; return the content that follows, if that is certain."""
        self._held = self._held.lstrip(_SPACES)
        if self._held in self._form.headers:
            self._part, self._held = "content", ""
        elif self._held and not any(header.startswith(self._held) for header in self._form.headers):
            content, self._held, self._part = self._held, "", "content"
            return content
        return ""

    def _take_reasoning(self) -> str:
        """Return the reasoning that is certain: neither the beginning of the last tag nor white space before it."""
        shown = ""
        if self._is_empty:
            self._held = self._held.lstrip(_SPACES)
        while self._held:
            begun = self._held.lstrip(_SPACES)
            if begun == self._form.end:
                self._part, self._held = "after", ""
                break
            if self._form.end.startswith(begun):
                break
            size = len(self._held) - len(begun) + 1
            shown, self._held = shown + self._held[:size], self._held[size:]
        self._is_empty = self._is_empty and not shown
        return shown
