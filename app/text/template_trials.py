"""Trial conversations that show, at load, in which form a chat template wants messages (`template_form.py`).

A trial is written if all of its texts, calls and results are in the rendered text. Forms are tried in the order in which
transformers would give them to the template: what a client has sent comes first.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from app.text.template_form import LEVELS, NO_THINK, OFF, THINK, Empty, SystemRules, TemplateForm, ThinkingVariables

Message = Mapping[str, Any]
Render = Callable[[Mapping[str, Any]], str | None]
Text = Callable[..., str | None]  # the text of messages with variables, or None if they are refused

_QUESTION, _ANSWER, _RESULT, _TEXT, _FUNCTION, _KEY, _VALUE = (
    f"trial{word}" for word in ("question", "answer", "result", "text", "function", "key", "value")
)
_SECOND, _DESCRIPTION, _PARAMETER = "trialsecond", "trialdescription", "trialparameter"
_TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": _FUNCTION,
        "description": _DESCRIPTION,
        "parameters": {"type": "object", "properties": {_PARAMETER: {"type": "string", "description": _VALUE}}},
    },
}
_USER: Message = {"role": "user", "content": _QUESTION}
_ASSISTANT: Message = {"role": "assistant", "content": _ANSWER}
# Variables that switch thinking on and off, with their values for both.
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
    ("thinking_budget", -1, 0),
)
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
# Variables of a conversation without tools, of which a template gets the first that it accepts.
_NO_TOOLS: tuple[Mapping[str, Any], ...] = ({"tools": None}, {"tools": []}, {"tools": None, "functions": ""})
_EMPTY: tuple[Empty, ...] = ("absent", "null", "")


def find_template_form(render: Render) -> TemplateForm:
    """Return the form that a template wants. `render` returns the text for variables, or None if it is refused."""
    return _Trials(render).form()


class _Trials:
    def __init__(self, render: Render) -> None:
        self._render = render
        self._no_tools: Mapping[str, Any] = _NO_TOOLS[0]

    def form(self) -> TemplateForm:
        """Try everything, and return what was found."""
        accepted = (variables for variables in _NO_TOOLS if self._text([_USER], **variables) is not None)
        self._no_tools = next(accepted, _NO_TOOLS[0])
        rules = self._system_rules()
        form = TemplateForm(
            system=rules,
            no_tools=self._no_tools,
            tools=self._tools(),
            thinking=_find_thinking(self._text),
            apart=self._apart((("user", "user"), ("assistant", "assistant")), [_USER]),
        )
        lists = {role: self._lists(role) for role in ("system", "user", "assistant") if role != "system" or rules.first}
        form = self._with_calls(form)
        if form.results:
            lists["tool"] = self._lists("tool", form)
            form = replace(form, apart=form.apart | self._apart((("tool", "user"),), self._called(form)))
        return replace(
            form,
            lists=frozenset(role for role, kind in lists.items() if kind),
            lists_only=frozenset(role for role, kind in lists.items() if kind == "only"),
        )

    def _text(self, messages: Sequence[Message], **variables: Any) -> str | None:
        fixed = {"messages": messages, "add_generation_prompt": True, "documents": None}
        return self._render({**fixed, **self._no_tools, **variables})

    def _writes(self, messages: Sequence[Message], *more: str, **variables: Any) -> bool:
        """Return True if the text of messages has all of their texts, calls and results, as they are."""
        text = self._text(messages, **variables)
        return (
            text is not None and all(word in text for word in (*_words(messages), *more)) and f'\\"{_KEY}' not in text
        )

    def _system_rules(self) -> SystemRules:
        first, second = ({"role": "system", "content": text} for text in (_TEXT, _SECOND))
        if not self._writes([_USER, _ASSISTANT, _USER]):
            return SystemRules()  # the template wants something that is not known here: nothing can be tried
        if not self._writes([first, _USER]):
            return SystemRules(False, False, later=self._writes([_USER, _ASSISTANT, second, _USER]))
        several = self._writes([first, second, _USER])
        return SystemRules(True, several, self._writes([first, _USER, _ASSISTANT, second, _USER]))

    def _tools(self) -> Literal["tools", "bare", "xml_tools", "functions", ""]:
        words = (_FUNCTION, _DESCRIPTION, _PARAMETER)
        ways: tuple[Literal["tools", "bare", "xml_tools", "functions"], ...] = (
            "tools",
            "bare",
            "xml_tools",
            "functions",
        )
        for way in ways:
            variables = TemplateForm(tools=way, no_tools=self._no_tools).tool_variables([_TOOL])
            if self._writes([_USER], *words, **variables):
                return way
        return ""

    def _apart(self, pairs: Sequence[tuple[str, str]], start: Sequence[Message]) -> frozenset[tuple[str, str]]:
        """Return the pairs of roles that do not follow each other, although the conversation before them is written."""
        apart = set()
        for first, second in pairs:
            before = [*start, _ASSISTANT] if first == "assistant" else list(start)
            after = [{"role": second, "content": _TEXT}, *([_USER] if second == "assistant" else [_ASSISTANT, _USER])]
            usual = [_USER] if second == "assistant" else [_ASSISTANT, _USER]
            if self._writes([*before, *usual]) and not self._writes([*before, *after]):
                apart.add((first, second))
        return frozenset(apart)

    def _lists(self, role: str, form: TemplateForm | None = None) -> Literal["", "also", "only"]:
        """Return whether the content of a role may be a list of text parts, or must be one."""

        def trial(content: Any) -> list[Message]:
            message = {"role": role, "content": content}
            if form is not None:
                start = self._called(form)
                return [*start[:-1], {**start[-1], **message}, _ASSISTANT, _USER]
            if role == "assistant":
                return [_USER, message, _USER]
            return [message, _USER] if role == "system" else [message]

        one, two = ([{"type": "text", "text": text} for text in texts] for texts in ((_TEXT,), (_TEXT, _SECOND)))
        plain, listed = self._text(trial(_TEXT)), self._text(trial(one))
        if listed is None or not self._writes(trial(two)):
            return ""
        if plain is None or _TEXT not in plain:
            return "" if re.search(r"""["']type["']: ["']text["']""", listed) else "only"
        return "also" if plain == listed else ""

    def _with_calls(self, form: TemplateForm) -> TemplateForm:
        """Return the form with what was found about calls and results."""
        for short_ids in (False, True):
            for text_arguments in (False, True):
                tried = replace(form, text_arguments=text_arguments, short_ids=short_ids)
                empty = tuple(one for one in _EMPTY if self._writes_calls(replace(tried, empty=(one,))))
                if empty:
                    return self._with_call_details(replace(tried, empty=empty))
        results = self._writes([_USER, _ASSISTANT, _result(form), _ASSISTANT, _USER])
        return replace(form, calls=False, results=results)

    def _writes_calls(self, form: TemplateForm, **message: Any) -> bool:
        messages = [*self._called(form, **message), _ASSISTANT, _USER]
        text = self._text(messages)
        says_none = text is not None and "None" in text and "None" not in (self._text([_USER]) or "")
        return self._writes(messages) and not says_none

    def _with_call_details(self, form: TemplateForm) -> TemplateForm:
        two = [_USER, _calls(form, 2), _result(form), _result(form, 1), _ASSISTANT, _USER]
        form = replace(form, one_call=not self._writes(two))
        if self._writes_calls(form, content=_TEXT):
            both = self._writes_calls(form, content=_TEXT, thinking=_VALUE, reasoning_content=_VALUE)
            return replace(form, reasoning_beside_text=both)
        if self._writes_calls(form, tool_plan=_TEXT):
            return replace(form, call_text="tool_plan")
        return replace(form, call_text="before")

    def _called(self, form: TemplateForm, **message: Any) -> list[Message]:
        """Return a conversation that ends with the result of a call."""
        return [_USER, _calls(form) | message, _result(form)]


def _calls(form: TemplateForm, number: int = 1) -> dict[str, Any]:
    calls = []
    for place in range(number):
        arguments: Any = {f"{_KEY}{place}": f"{_VALUE}{place}"}
        function = {
            "name": f"{_FUNCTION}{place}",
            "arguments": json.dumps(arguments) if form.text_arguments else arguments,
        }
        calls.append({"id": _id(form, place), "type": "function", "function": function})
    content = {} if form.empty[0] == "absent" else {"content": None if form.empty[0] == "null" else ""}
    return {"role": "assistant", **content, "tool_calls": calls}


def _result(form: TemplateForm, place: int = 0) -> dict[str, Any]:
    return {"role": "tool", "content": f"{_RESULT}{place}", "tool_call_id": _id(form, place)}


def _id(form: TemplateForm, place: int) -> str:
    return f"trial000{place}" if form.short_ids else f"call_trial0123{place}"


def _words(messages: Sequence[Message]) -> list[str]:
    """Return all that must be in the text of messages: contents, plans, names of calls and their arguments."""
    words = []
    for message in messages:
        for content in (message.get("content"), message.get("tool_plan")):
            words += [part["text"] for part in content] if isinstance(content, list) else [content] if content else []
        for call in message.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
            words += [call["function"]["name"], *arguments, *arguments.values()]
    return words


def _find_thinking(written: Text) -> ThinkingVariables:
    user = [{"role": "user", "content": "trial"}]
    switch = next((each for each in _SWITCHES if _differ(written, user, each[0], each[1:])), None)
    on = {} if switch is None else {switch[0]: switch[1]}
    effort = next((name for name in _EFFORTS if _differ(written, user, name, LEVELS, on)), "")
    texts = {level: written(user, **on, **{effort: level}) for level in LEVELS} if effort else {}
    efforts = tuple(level for level, text in texts.items() if text is not None)
    if not _says_off(texts):
        efforts = tuple(level for level in efforts if level not in OFF)
    return ThinkingVariables(switch, effort, efforts, switch is None and not effort and _reads_word(written))


def _differ(
    written: Text, messages: Sequence[Any], name: str, values: Sequence[Any], fixed: Mapping[str, Any] | None = None
) -> bool:
    """Return True if the text, where it is not refused, depends on a variable."""
    texts = {text for value in values if (text := written(messages, **(fixed or {}), **{name: value})) is not None}
    return len(texts) > 1


def _says_off(texts: Mapping[str, str | None]) -> bool:
    """Return True if a template that is told `none` or `no_think` writes what it writes for no other word."""
    shapes = {level: text.replace(level, "") for level, text in texts.items() if text is not None}
    others = {shape for level, shape in shapes.items() if level not in OFF}
    return any(shapes.get(level, next(iter(others), "")) not in others for level in OFF)


def _reads_word(written: Text) -> bool:
    texts = []
    for word in (THINK, NO_THINK):
        text = written([{"role": "system", "content": f"trial {word}"}, {"role": "user", "content": "trial"}])
        texts.append(None if text is None else text.replace(word, ""))
    return None not in texts and texts[0] != texts[1]
