"""The form of a conversation that a chat template was written for.

Templates differ: some write calls only if the content beside them is null, some join arguments as text, some know no
system message or no tools. Trial conversations at load show what a template writes (`find_template_form`). Then every
conversation gets that form, and nothing of it is lost.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from app.text.tool_formats import ToolFormat, write_calls

Message = Mapping[str, Any]
# Efforts in order, with the names that templates have for none.
LEVELS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
OFF = ("none", "no_think")
THINK, NO_THINK = "/think", "/no_think"


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """What a template reads about thinking.

    - `switch`: the variable that switches it, and its values for on and off.
    - `effort`, `efforts`: the variable of the effort, and the known values that the template accepts.
    - `by_word`: the template looks for `/think` and `/no_think` in the system message instead.
    """

    switch: tuple[str, Any, Any] | None = None
    effort: str = ""
    efforts: tuple[str, ...] = ()
    by_word: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        switch = () if self.switch is None else (self.switch[0],)
        return (*switch, *((self.effort,) if self.effort else ()), *((NO_THINK,) if self.by_word else ()))

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's variables and those of the template that mean the same. A name that is given stays."""
        found, effort, wanted = dict(given), given.get("reasoning_effort"), self.wanted(given)
        if self.switch is not None and wanted is not None and self.switch[0] not in given:
            found[self.switch[0]] = self.switch[1] if wanted else self.switch[2]
        if wanted is False and effort is None and self.switch is None:
            effort = "none"
        if isinstance(effort, str) and self.effort and (self.effort == "reasoning_effort" or self.effort not in given):
            level = self._accepted(effort)
            found.pop("reasoning_effort", None)
            if level is not None:
                found[self.effort] = level
        elif effort == "none":
            found.pop("reasoning_effort", None)
        return found

    @staticmethod
    def wanted(given: Mapping[str, Any]) -> bool | None:
        """Return whether a request wants thinking; None if it does not say."""
        for name in ("enable_thinking", "thinking"):
            if isinstance(given.get(name), bool):
                return bool(given[name])
        effort = given.get("reasoning_effort")
        return None if not isinstance(effort, str) else effort not in OFF

    def _accepted(self, effort: str) -> str | None:
        """Return the nearest accepted effort, rather more than less; None for none where that is no effort."""
        if effort in OFF:
            return next((level for level in OFF if level in self.efforts), None)
        if effort in self.efforts or effort not in LEVELS:
            return effort
        place = LEVELS.index(effort)
        known = [LEVELS.index(level) for level in self.efforts if level not in OFF]
        nearest = min(known, key=lambda one: (abs(one - place), -one), default=None)
        return effort if nearest is None else LEVELS[nearest]


@dataclass(frozen=True, slots=True)
class SystemRules:
    """The places of system messages that a template writes.

    - `first`: one before all other messages.
    - `several`: more than one there.
    - `later`: one after other messages.
    """

    first: bool = True
    several: bool = True
    later: bool = True


def fold_system_messages(messages: Sequence[dict[str, Any]], rules: SystemRules) -> list[dict[str, Any]]:
    """Return a conversation with its system messages in places that the template writes.

    Several first ones are joined. A later one is put before the user's next message if that follows directly, else
    after the user's last message if that precedes it, else it becomes a message of the user.
    """
    num_first = next((place for place, one in enumerate(messages) if one["role"] != "system"), len(messages))
    start, rest = [dict(one) for one in messages[:num_first]], messages[num_first:]
    if len(start) > 1 and not rules.several:
        start = [start[0] | {"content": joined(*start)}]
    if not rules.first:
        rest, start = [*start, *rest], []
    return [*start, *(rest if rules.later and rules.first else _without_system(rest, rules.later))]


def _without_system(messages: Sequence[dict[str, Any]], keeps_later: bool) -> list[dict[str, Any]]:
    """Fold system messages; with `keeps_later` only those at the beginning."""
    done: list[dict[str, Any]] = []
    waiting: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "system" and not (keeps_later and any(one["role"] != "system" for one in done)):
            waiting.append(message)
        elif waiting and message["role"] == "user":
            done.append(message | {"content": joined(*waiting, message)})
            waiting = []
        else:
            done += _as_user(done, waiting)
            done.append(message)
            waiting = []
    return done + _as_user(done, waiting)


def _as_user(done: list[dict[str, Any]], waiting: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages to add for system messages that no message of the user follows."""
    if not waiting:
        return []
    if done and done[-1]["role"] == "user":
        done[-1] = done[-1] | {"content": joined(done[-1], *waiting)}
        return []
    return [{"role": "user", "content": joined(*waiting)}]


def joined(*messages: Message) -> str:
    """Return the texts of messages, with an empty line between them. Each part of a text is a line."""
    return "\n\n".join(text for one in messages if (text := _content_text(one.get("content"))))


PICTURE = {"type": "image"}  # a part of a message, for which templates write a placeholder


def has_picture(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list) and PICTURE in content


def _parts(message: Message) -> list[dict[str, Any]]:
    content = message.get("content")
    return content if isinstance(content, list) else [{"type": "text", "text": content or ""}]


def _content_text(content: object) -> str:
    if isinstance(content, list):
        return "\n".join(part["text"] for part in content if part != PICTURE)
    return content if isinstance(content, str) else ""


_SHORT_ID = re.compile(r"[A-Za-z0-9]{9}")
_INTRODUCTION = (
    "You can call these functions, whose parameters are given as JSON schemas:\n{tools}\n\n"
    "To call a function, answer with nothing but its name and its arguments in this form:\n{example}"
)


def tool_prompt(tools: Sequence[Mapping[str, Any]], form: ToolFormat) -> str:
    listed = "\n".join(json.dumps(tool.get("function", tool), ensure_ascii=False) for tool in tools)
    example = write_calls(form, [("function", {"parameter": "value"})])
    return _INTRODUCTION.format(tools=listed, example=example)


def call_text(calls: Iterable[Message], form: ToolFormat) -> str:
    return write_calls(form, [(call["function"]["name"], call["function"]["arguments"]) for call in calls])


def with_short_ids(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages with call ids of 9 letters and digits, as Mistral's templates demand.

    Other ids are replaced, the same one by the same one. A result without an id gets the one of the first call that has
    no result yet.
    """
    names = _ShortIds(messages)
    done: list[dict[str, Any]] = []
    open_ids: list[str] = []
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            new = [{**call, "id": names[call.get("id") or f"{place}:{at}"]} for at, call in enumerate(calls)]
            open_ids = [call["id"] for call in new]
            done.append({**message, "tool_calls": new})
        elif message["role"] == "tool":
            given = message.get("tool_call_id")
            named = names[given] if given else next(iter(open_ids), names[f"{place}"])
            open_ids = [one for one in open_ids if one != named]
            done.append({**message, "tool_call_id": named})
        else:
            done.append(dict(message))
    return done


class _ShortIds(dict[str, str]):
    """Short ids by the ids of a conversation, where short ones stay as they are."""

    def __init__(self, messages: Sequence[Message]) -> None:
        super().__init__()
        given = {message.get("tool_call_id") for message in messages}
        given |= {call.get("id") for message in messages for call in message.get("tool_calls") or ()}
        self._taken = {one for one in given if isinstance(one, str) and _SHORT_ID.fullmatch(one)}

    def __missing__(self, given: str) -> str:
        short = given
        while not _SHORT_ID.fullmatch(short) or (short != given and short in self._taken):
            short = hashlib.sha256(short.encode("utf-8", "surrogatepass")).hexdigest()[:9]
        self._taken.add(short)
        self[given] = short
        return short


# Content of a message that has calls and no text: the key is left out, or its value.
Empty = Literal["absent", "null", ""]
ToolsWay = Literal["tools", "bare", "xml_tools", "functions"]


_ALL_PLACES, _NO_VARIABLES = SystemRules(), ThinkingVariables()


@dataclass(frozen=True, slots=True)
class TemplateForm:
    """What a template writes, and in which form it wants it.

    - `system`: the places of system messages that it writes.
    - `lists`: roles whose content may be a list of text parts; `lists_only`: those where it must be one.
    - `empty`: contents beside calls without text that it accepts, the best first.
    - `text_arguments`: arguments are a JSON text, else an object.
    - `calls`, `results`: it writes calls, and messages of the role `tool`.
    - `call_text`: where it writes a text beside calls; `before`: in a message of its own.
    - `reasoning_beside_text`: it accepts reasoning in a message that has a text and calls.
    - `one_call`: a message may have one call.
    - `short_ids`: ids must have 9 letters and digits.
    - `apart`: pairs of roles that may not follow each other.
    - `tools`: how it wants tools: as a list in the variable `tools` or `xml_tools`; `bare`: in `tools`, without OpenAI's
      wrapper; `functions`: the same as a JSON text in the variable `functions` (FireFunction). Empty: it knows none.
    - `no_tools`: its variables if there are no tools.
    - `thinking`: its variables about thinking.
    """

    system: SystemRules = _ALL_PLACES
    lists: frozenset[str] = frozenset()
    lists_only: frozenset[str] = frozenset()
    empty: tuple[Empty, ...] = ("",)
    text_arguments: bool = False
    calls: bool = True
    results: bool = True
    call_text: Literal["content", "tool_plan", "before"] = "content"
    reasoning_beside_text: bool = True
    one_call: bool = False
    short_ids: bool = False
    apart: frozenset[tuple[str, str]] = frozenset()
    tools: ToolsWay | Literal[""] = "tools"
    no_tools: Mapping[str, Any] = field(default_factory=lambda: {"tools": None})
    thinking: ThinkingVariables = _NO_VARIABLES

    def tool_variables(self, tools: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        if not tools or not self.tools:
            return dict(self.no_tools)
        bare = [tool.get("function", tool) for tool in tools]
        # FireFunction's model card indents the text by four spaces.
        ways: Mapping[str, dict[str, Any]] = {
            "bare": {"tools": bare},
            "functions": {"functions": json.dumps(bare, indent=4, ensure_ascii=False)},
        }
        return {**self.no_tools, **ways.get(self.tools, {self.tools: list(tools)})}

    def fit(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        syntax: ToolFormat,
        thinks: bool | None = None,
    ) -> list[dict[str, Any]]:
        """Return a conversation that the template can write.

        Contents of `messages` are a text, a list of text parts, or null beside calls. A template that knows no calls
        gets them in the form `syntax`, and one that looks for the word in the system message is told whether the model
        `thinks`.
        """
        done = [dict(message) for message in messages]
        if tools and not self.tools:
            done = _with_system_text(done, tool_prompt(tools, syntax))
        if self.thinking.by_word and thinks is not None:
            done = _with_system_text(done, THINK if thinks else NO_THINK)
        if self.short_ids:
            done = with_short_ids(done)
        if self.one_call:
            done = _in_single_calls(done)
        done = [one for message in done for one in self._with_call_form(message, syntax)]
        done = self._joined_where_apart(fold_system_messages(done, self.system))
        return [self._with_content_form(message) for message in done]

    def _with_call_form(self, message: dict[str, Any], syntax: ToolFormat) -> list[dict[str, Any]]:
        """Return a message, or two, with calls or results as the template writes them."""
        calls, content = message.get("tool_calls"), message.get("content")
        if message["role"] == "tool" and not self.results:
            return [{"role": "user", "content": f"<tool_response>\n{joined(message)}\n</tool_response>"}]
        if not calls:
            return [message | {"content": content or ""}]
        if not self.calls:
            bare = {name: value for name, value in message.items() if name != "tool_calls"}
            return [bare | {"content": joined(message) + call_text(map(_decoded_call, calls), syntax)}]
        calls = [self._with_argument_form(_decoded_call(call)) for call in calls]
        with_calls = message | {"tool_calls": calls}
        if not content:
            return [self._with_empty_content(with_calls)]
        if not self.reasoning_beside_text:
            with_calls.pop("reasoning_content", None)
        if self.call_text == "content":
            return [with_calls]
        if self.call_text == "tool_plan":
            return [self._with_empty_content(with_calls | {"tool_plan": joined(message)})]
        bare = {name: value for name, value in message.items() if name != "tool_calls"}
        with_calls.pop("reasoning_content", None)
        return [bare, self._with_empty_content(with_calls)]

    def _with_empty_content(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message with calls and no text: as it was sent, if the template accepts that."""
        sent: Empty = "" if message.get("content") is not None else "absent"
        form = sent if sent in self.empty else self.empty[0]
        rest = {name: value for name, value in message.items() if name != "content"}
        return rest if form == "absent" else rest | {"content": None if form == "null" else ""}

    def _with_argument_form(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = call["function"].get("arguments")
        if self.text_arguments and not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        return call | {"function": {**call["function"], "arguments": arguments}}

    def _joined_where_apart(self, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Join the texts of messages with roles that may not follow each other."""
        done: list[dict[str, Any]] = []
        for message in messages:
            last = done[-1] if done else {"role": ""}
            if (last["role"], message["role"]) not in self.apart or last.get("tool_calls") or message.get("tool_calls"):
                done.append(message)
            elif has_picture(last) or has_picture(message):
                done[-1] = last | {"content": [*_parts(last), *_parts(message)]}
            else:
                done[-1] = last | {"content": joined(last, message)}
        return done

    def _with_content_form(self, message: dict[str, Any]) -> dict[str, Any]:
        content = message.get("content")
        if isinstance(content, list) and message["role"] not in self.lists and not has_picture(message):
            return message | {"content": joined(message)}
        if isinstance(content, str) and message["role"] in self.lists_only:
            return message | {"content": [{"type": "text", "text": content}]}
        return message


def _with_system_text(messages: Sequence[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Return a conversation with a text at the end of its first message, which is of the system."""
    added = {"role": "system", "content": text}
    if messages[0]["role"] != "system":
        return [added, *messages]
    return [messages[0] | {"content": joined(messages[0], added)}, *messages[1:]]


def _decoded_call(call: Message) -> dict[str, Any]:
    """Return a call with an object as arguments; what is none stays text, since it was the model's own mistake."""
    function = call["function"]
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": {} if arguments is None else arguments}}


def _in_single_calls(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return a conversation in which each message has one call at most, followed by its result."""
    done: list[dict[str, Any]] = []
    place = 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls") or ()
        place += 1
        if len(calls) < 2:
            done.append(message)
            continue
        results = []
        while place < len(messages) and messages[place]["role"] == "tool":
            results.append(messages[place])
            place += 1
        for at, call in enumerate(calls):
            rest = message if at == 0 else {"role": message["role"], "content": None}
            done.append(rest | {"tool_calls": [call]})
            ids = [one.get("tool_call_id") for one in results]
            if results and (call.get("id") in ids or not any(ids)):
                done.append(results.pop(ids.index(call["id"]) if call.get("id") in ids else 0))
        done += results
    return done


# ---- trials --------------------------------------------------------------------------------------------------------
#
# A trial conversation is written if all of its texts, calls and results are in the rendered text. Forms are tried in the
# order in which transformers would give them to the template: what a client has sent comes first.

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

    def _tools(self) -> ToolsWay | Literal[""]:
        words = (_FUNCTION, _DESCRIPTION, _PARAMETER)
        ways: tuple[ToolsWay, ...] = get_args(ToolsWay)
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
