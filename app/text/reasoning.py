"""Reasoning in generated text: what a model writes between tags such as `<think>` before its answer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import Literal, Protocol

from app.messages import ThinkingLimit
from app.text.harmony import TOKENS
from app.text.tokenizer import TokenSpan
from app.text.tool_formats import words

_SPACES = " \t\r\n"
# Texts that may be written before and after a marker.
_AROUND = tuple(product(("", " ", "\n", ".\n", "\n\n"), ("", " ", "\n", "\n\n")))


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The text before and after reasoning. `is_implied`: a text without the first tag begins with reasoning too.

    `then` is what follows reasoning before anything else, and `answer` what precedes an answer.
    """

    name: str
    start: str
    end: str
    is_implied: bool = False
    then: str = ""
    answer: str = ""

    @property
    def markers(self) -> tuple[str, ...]:
        """The special tokens that the parser needs in the text."""
        tags = (self.start, self.end)
        return (
            TOKENS if self.is_harmony else tuple(dict.fromkeys((*tags, *(one for tag in tags for one in words(tag)))))
        )

    @property
    def is_harmony(self) -> bool:
        """True if the texts are messages, which `harmony.py` reads."""
        return self.name == "openai_gptoss"


# In the order in which templates are searched: many have Qwen's tags too, in what they remove from an answer.
REASONING_FORMATS: Mapping[str, ReasoningFormat] = {
    each.name: each
    for each in (
        ReasoningFormat("seed_oss", "<seed:think>", "</seed:think>"),
        ReasoningFormat("command_a", "<|START_THINKING|>", "<|END_THINKING|>"),
        ReasoningFormat("kimi_vl", "◁think▷", "◁/think▷"),
        ReasoningFormat("hunyuan", "<think:opensource>", "</think:opensource>"),
        ReasoningFormat("minimax_m3", "<mm:think>", "</mm:think>"),
        ReasoningFormat("kimi_k3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
        ReasoningFormat("apriel", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
        ReasoningFormat("apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
        ReasoningFormat("gemma4", "<|channel>thought", "<channel|>"),
        ReasoningFormat("granite", "Here is my thought process:", "Here is my response:"),
        ReasoningFormat("mistral", "[THINK]", "[/THINK]"),
        ReasoningFormat("qwen3", "<think>", "</think>"),
        ReasoningFormat("deepseek_r1", "<think>", "</think>", is_implied=True),
        ReasoningFormat(
            *("openai_gptoss", "<|channel|>analysis<|message|>", "<|end|>"),
            then="<|start|>assistant",
            answer="<|channel|>final<|message|>",
        ),
    )
}


def choose_reasoning_format(template: str | None) -> ReasoningFormat | None:
    """Return the format that a chat template writes; None if it writes no reasoning."""
    source = template or ""
    if "<|channel|>analysis<|message|>" in source or ("<|channel|>" in source and "analysis" in source):
        return REASONING_FORMATS["openai_gptoss"]
    found = (form for form in REASONING_FORMATS.values() if form.start in source or form.end in source)
    return next((form for form in found if not form.is_harmony), None)


def closes_reasoning(form: ReasoningFormat, prompt_end: str) -> bool:
    """Return True if a prompt that ends with this text has reasoning that is over: thinking is off."""
    return prompt_end.rstrip(_SPACES).endswith(form.end)


def opens_reasoning(form: ReasoningFormat, prompt_end: str) -> bool:
    """Return True if a prompt that ends with this text lets the model begin inside of its reasoning."""
    return form.is_implied or prompt_end.rstrip(_SPACES).endswith(form.start)


class Spelling(Protocol):
    """What `thinking_limit` needs of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...

    def encode_spans(self, text: str, add_special_tokens: bool) -> list[TokenSpan]: ...


def thinking_limit(form: ReasoningFormat, tokenizer: Spelling, budget: int, is_open: bool) -> ThinkingLimit:
    """Return the limit of reasoning in this format at so many tokens."""
    ends, closing = (form.end, form.end + form.then + form.answer)
    found = tuple(tokenizer.encode(closing, add_special_tokens=False))
    return ThinkingLimit(budget, _written(form.start, tokenizer), _written(ends, tokenizer), found, is_open)


def _written(marker: str, tokenizer: Spelling) -> tuple[tuple[int, ...], ...]:
    """Return the ways in which tokens write a marker: those at its ends may have characters around it."""
    alone = tuple(tokenizer.encode(marker, add_special_tokens=False))
    found = {alone: None}
    for before, after in _AROUND if len(alone) > 1 else ():
        first, last = len(before), len(before) + len(marker)
        tokens = tokenizer.encode_spans(before + marker + after, False)
        own = [
            one for one in tokens if one.start is None or one.stop is None or (one.start < last and one.stop > first)
        ]
        found[tuple(one.token_id for one in own)] = None
    return tuple(found)


class ReasoningParser:
    """Parser of one choice's text, which may be divided in any way. White space around both parts is dropped.

    `is_open`: the text begins inside of the reasoning; a first tag is accepted nevertheless.
    """

    def __init__(self, form: ReasoningFormat, is_open: bool = False) -> None:
        self._form = form
        self._part: Literal["before", "reasoning", "after", "content"] = "before"
        self._is_open = is_open
        self._spaces: list[str] = []  # white space that is shown only if text follows
        self._held = ""  # what may be the beginning of a tag: no longer than one
        self._is_empty = True  # no reasoning was returned yet

    def push(self, text: str) -> tuple[str, str]:
        """Return more of the reasoning and more of the content."""
        reasoning: list[str] = []
        content: list[str] = []
        for character in text:
            if self._part == "content":
                content.append(character)
            elif self._part == "before":
                self._take_start(character, reasoning, content)
            elif self._part == "reasoning":
                self._take_reasoning(character, reasoning)
            else:
                self._take_after(character, content)
        return "".join(reasoning), "".join(content)

    def flush(self) -> tuple[str, str]:
        held = "".join(self._spaces) + self._held
        self._spaces, self._held = [], ""
        if self._part == "reasoning" or (self._part == "before" and self._is_open):
            return held.rstrip(_SPACES), ""
        return "", held

    def _take_start(self, character: str, reasoning: list[str], content: list[str]) -> None:
        """Decide how the text begins, as soon as that is certain."""
        if not self._held and character in _SPACES:
            self._spaces.append(character)
            return
        self._held += character
        if self._held == self._form.start:
            self._enter("reasoning")
        elif self._held == self._form.end:  # without a beginning: there is none
            self._enter("after")
        elif not self._form.start.startswith(self._held) and not self._form.end.startswith(self._held):
            spaces, held = self._spaces, self._held
            if self._is_open:
                self._enter("reasoning")
                for one in held:
                    self._take_reasoning(one, reasoning)
            else:
                self._enter("content")
                content += (*spaces, held)

    def _take_after(self, character: str, content: list[str]) -> None:
        if character not in _SPACES:
            content.append(character)
            self._enter("content")

    def _take_reasoning(self, character: str, reasoning: list[str]) -> None:
        """Add the reasoning that is certain: neither the beginning of the last tag nor white space before it."""
        held = self._held + character
        while held:
            begun = held.lstrip(_SPACES)
            if not self._is_empty:
                self._spaces += held[: len(held) - len(begun)]
            if begun == self._form.end:
                self._enter("after")
                return
            if self._form.end.startswith(begun):
                break
            reasoning += (*self._spaces, begun[0])
            self._spaces, self._is_empty = [], False
            held = begun[1:]
        self._held = held.lstrip(_SPACES)

    def _enter(self, part: Literal["reasoning", "after", "content"]) -> None:
        self._part, self._spaces, self._held = part, [], ""
