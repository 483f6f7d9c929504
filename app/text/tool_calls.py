"""Tool calls in generated text: the formats of model families, and a parser that reads a text as it grows.

A format has markers around JSON, or the text itself is JSON. The parser works character by character, so a text gives
the same calls however it is divided. Text that begins like a call and is none is returned as content.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from app.text.grammar_definition import json_style, literal

_NAME_KEYS = frozenset({"name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Other keys of an object that can still be a call.
_NEUTRAL_KEYS = frozenset({"type", "id", "function", "index"})
_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | _NEUTRAL_KEYS
_SPACES = " \t\r\n"
_MAX_NAME_CHARACTERS = 256  # of a call in the form `name{…}`

ToolCallParserName = Literal["hermes", "llama3_json", "mistral", "phi4_mini_json", "granite", "json"]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The tool calls of a model family.

    - `starts`: the markers before calls. After one comes an object, a list of objects, or a name with arguments.
    - `end`: the marker after calls; empty if they end with the text.
    - `is_bare`: a text that begins with `{` or `[` is calls, if the first names a tool.
    - `arguments_key`: the key of the arguments in a call that the server's grammar forces.
    - `forced`: text before, between and after forced calls.
    """

    name: str
    starts: tuple[str, ...]
    end: str
    is_bare: bool
    arguments_key: str
    forced: tuple[str, str, str]
    short_ids: bool = False  # ids have 9 letters and digits, as Mistral's templates demand

    @property
    def markers(self) -> tuple[str, ...]:
        """All markers."""
        return (*self.starts, self.end) if self.end else self.starts


TOOL_FORMATS: Mapping[str, ToolFormat] = {
    each.name: each
    for each in (
        ToolFormat(
            *("hermes", ("<tool_call>",), "</tool_call>", False, "arguments"),
            ("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
        ),
        ToolFormat("llama3_json", ("<|python_tag|>",), "", True, "parameters", ("", "; ", "")),
        ToolFormat("mistral", ("[TOOL_CALLS]",), "", False, "arguments", ("[TOOL_CALLS] [", ", ", "]"), True),
        ToolFormat(
            *("phi4_mini_json", ("<|tool_call|>", "functools"), "<|/tool_call|>", False, "arguments"),
            ("<|tool_call|>[", ", ", "]<|/tool_call|>"),
        ),
        ToolFormat("granite", ("<|tool_call|>", "<tool_call>"), "</tool_call>", False, "arguments", ("<|tool_call|>[", ", ", "]")),
        ToolFormat("json", (), "", True, "arguments", ("[", ", ", "]")),
    )
}  # fmt: skip


def choose_tool_format(template: str | None, model_type: str) -> ToolFormat:
    """Return the format that a checkpoint's chat template writes; of two, the one of the model type."""
    source = template or ""
    if "[TOOL_CALLS]" in source:
        return TOOL_FORMATS["mistral"]
    if "<|/tool_call|>" in source or "functools[" in source:
        return TOOL_FORMATS["phi4_mini_json"]
    if model_type.startswith("granite") and "<tool_call>" not in source:
        return TOOL_FORMATS["granite"]
    if "<tool_call>" not in source and ("<|python_tag|>" in source or '"parameters"' in source):
        return TOOL_FORMATS["llama3_json"]
    return TOOL_FORMATS["hermes"]


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """More of one tool call. The first delta of a call has its id and name; `arguments` is more of its JSON text."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class ParsedText:
    """What a piece of text is: content, and parts of tool calls."""

    content: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)


class _NotACall(ValueError):
    """The text is no tool call."""


class _JsonSyntax:
    """The structure of a JSON value, character by character, so that what is none is known at once.

    Words that are no JSON, such as Python's `True`, pass, and so do line breaks in strings and a comma too many.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._expects: Literal["value", "item or end", "key or end", "colon", "more", "word", "string"] = "value"
        self._is_key = self._escaped = False

    def push(self, character: str) -> None:
        """Read a character. Raises `_NotACall`."""
        if self._expects == "string":
            if character == '"' and not self._escaped:
                self._expects = "colon" if self._is_key else "more"
            self._escaped = character == "\\" and not self._escaped
            return
        if self._expects == "word":
            if character.isalnum() or character in "+-.":
                return
            self._expects = "more"
        if character not in _SPACES:
            self._push_structure(character)

    def _push_structure(self, character: str) -> None:
        expects = self._expects
        if character == "," and expects == "more":
            self._expects = "key or end" if self._open[-1] == "{" else "item or end"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character in "}]" and expects not in ("colon", "value"):
            if not self._open or self._open.pop() + character not in ("{}", "[]"):
                raise _NotACall
            self._expects = "more"
        elif character == '"' and expects not in ("colon", "more"):
            self._is_key, self._expects = expects == "key or end", "string"
        elif expects not in ("value", "item or end"):
            raise _NotACall
        elif character in "{[":
            self._open.append(character)
            self._expects = "key or end" if character == "{" else "item or end"
        elif character.isalnum() or character in "+-.":
            self._expects = "word"
        else:
            raise _NotACall


class _CallReader:
    """Reader of one call `{"name": …, "arguments": {…}}`, or of `name{…}` if `name` is given.

    A text that cannot become a call is refused at its first character that shows it, so little is read twice.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.finished = False
        self.text: list[str] = []  # all characters
        self._syntax = _JsonSyntax()
        self._depth = 0
        self._in_string = self._escaped = False
        self._key: str | None = "arguments" if name is not None else None
        self._is_value = name is not None
        self._part: list[str] | None = [] if name is not None else None  # the current key or value; None: not begun
        self._floor = 0 if name is not None else 1  # depth between the parts of the call
        self._arguments: str | None = None
        self._given = 0  # characters of the arguments that were returned

    def push(self, character: str) -> None:
        """Read a character. Raises `_NotACall`."""
        self.text.append(character)
        if self.name is None:
            self._syntax.push(character)
        if self._in_string:
            self._in_string = self._escaped or character != '"'
            self._escaped = character == "\\" and not self._escaped
            self._add(character)
        else:
            self._push_structure(character)
        if self.finished and self._floor:
            self._end()

    def _push_structure(self, character: str) -> None:
        if character == '"':
            self._begin(character)
            self._in_string = True
        elif character in "{[":
            self._begin(character)
            self._depth += 1
        elif character in "}]":
            self._close(character)
        elif self._depth == self._floor and character == ":" and not self._is_value:
            self._end_key()
        elif self._depth == self._floor and character == "," and self._floor:
            self._end_part()
        elif character not in _SPACES:
            self._begin(character)
        else:
            self._add(character)

    def _close(self, character: str) -> None:
        self._depth -= 1
        if self._depth < self._floor and self._floor:
            self._end_part()
        else:
            self._add(character)
        self.finished = self._depth == 0
        if self.finished and not self._floor:
            self._arguments = "".join(self.text)

    def arguments(self) -> str:
        """Return the characters of the arguments that are new; empty before the name is known."""
        if self.name is None:
            return ""
        new = ""
        if self._arguments is not None:
            new = self._arguments[self._given :]
        elif self._is_value and self._key in _ARGUMENT_KEYS and self._part and self._part[0] == "{":
            new = "".join(self._part[self._given :]) if self._depth > self._floor else ""
        self._given += len(new)
        return new

    def _begin(self, character: str) -> None:
        if self._floor and self._depth == self._floor and self._part is None:
            if not self._is_value and character != '"':
                raise _NotACall
            self._part = []
        self._add(character)

    def _add(self, character: str) -> None:
        if self._part is None:
            return
        self._part.append(character)
        if not self._is_value and self._depth == self._floor and self.name is None:
            key = "".join(self._part).rstrip(_SPACES)
            if not any(f'"{known}"'.startswith(key) for known in _KEYS):
                raise _NotACall

    def _end_key(self) -> None:
        self._key = _decoded("".join(self._part)) if self._part is not None else None
        if self._key not in _KEYS and self.name is None:
            raise _NotACall
        self._is_value, self._part = True, None

    def _end_part(self) -> None:
        """Take the value that ends before the last character."""
        if self._is_value and self._part is not None:
            text = "".join(self._part).rstrip(_SPACES)
            if self._key in _NAME_KEYS and self.name is None:
                self.name = _text(_decoded(text))
            elif self._key in _ARGUMENT_KEYS and self._arguments is None:
                self._arguments = _argument_text(text)
        self._is_value, self._part, self._key = False, None, None

    def _end(self) -> None:
        """Check a complete object. Calls may also be nested as OpenAI's API has them: `{"function": {"name": …}}`."""
        if self.name is None:
            whole = _decoded("".join(self.text))
            inner = whole.get("function") if isinstance(whole, dict) else None
            if not isinstance(inner, dict):
                raise _NotACall
            self.name = _text(inner.get("name"))
            given: Any = next((inner[key] for key in sorted(_ARGUMENT_KEYS) if key in inner), {})
            self._arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if self._arguments is None:
            self._arguments = "{}"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _NotACall from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _NotACall
    return value


def _argument_text(text: str) -> str:
    """Return arguments as the text of a JSON object. Some models write this text as a JSON string."""
    if text.startswith("{"):
        return text
    value = _decoded(text)
    return value if isinstance(value, str) and value else "{}"


class ToolCallParser:
    """Parser of one choice's text.

    `tools` are the names of the tools. `parallel` False: calls after the first are dropped. `new_id` makes the id of a
    call.
    """

    def __init__(
        self, form: ToolFormat, tools: Collection[str], new_id: Callable[[], str], parallel: bool = True
    ) -> None:
        self._form, self._tools, self._new_id, self._parallel = form, frozenset(tools), new_id, parallel
        self.num_calls = 0
        self._todo: deque[str] = deque()  # characters that are not read yet
        self._content: list[str] = []  # what is certain, until it is returned
        self._deltas: list[_GrowingDelta] = []
        self._spaces: list[str] = []  # white space that is content only if text follows
        self._held = ""  # the beginning of what may be a marker
        self._region: list[str] | None = None  # text since the calls began, until one is certain; None: content is read
        self._settled = 0  # characters of it that are content if no call is found: a marker follows them
        self._is_bare = False  # the calls began without a marker
        self._in_list = False
        self._reader: _CallReader | None = None
        self._word = ""  # the name in `name{…}`, or the beginning of a marker after a call
        self._at_start = True
        self._region_calls = 0
        self._index: int | None = None  # of the call that is read; None until its name is known

    def push(self, text: str) -> ParsedText:
        """Return what is certain after more text."""
        self._todo.extend(text)
        self._take_all()
        return self._certain()

    def flush(self) -> ParsedText:
        """Return the rest at the end of the text."""
        while self._region is not None and (self._region_calls == 0 or self._has_begun):
            self._leave()  # which may find another marker further on
            self._take_all()
        if self._held or not self.num_calls:
            self._content += (*self._spaces, self._held)
        self._spaces, self._held = [], ""
        return self._certain()

    @property
    def _has_begun(self) -> bool:
        """True if a call after others is read whose name is not known."""
        return self._reader is not None and self._index is None

    def _certain(self) -> ParsedText:
        certain = ParsedText("".join(self._content), [delta.whole() for delta in self._deltas])
        self._content, self._deltas = [], []
        return certain

    def _take_all(self) -> None:
        while self._todo:
            self._take(self._todo.popleft())

    def _take(self, character: str) -> None:
        if self._region is None:
            self._take_content(character)
            return
        if self._region_calls == 0:
            self._region.append(character)
        try:
            self._take_call(character)
        except _NotACall:
            self._leave(character)

    # ---- content ---------------------------------------------------------------------------------------------------

    def _take_content(self, character: str) -> None:
        if self._at_start and self._form.is_bare and character in "{[":
            self._enter("", is_bare=True)
            self._take(character)
            return
        self._at_start = self._at_start and character in _SPACES
        held = self._held + character
        while held:
            begun = held.lstrip(_SPACES)
            self._spaces += held[: len(held) - len(begun)]
            if begun in self._form.starts:
                self._enter(begun)
                return
            held = begun
            if not begun or any(marker.startswith(begun) for marker in self._form.starts):
                break
            self._content += (*self._spaces, begun[0])
            self._spaces, held = [], begun[1:]
        self._held = held

    def _enter(self, marker: str, is_bare: bool = False) -> None:
        self._region, self._settled, self._is_bare, self._in_list = list(marker), 0, is_bare, False
        self._word, self._region_calls, self._held, self._at_start = "", 0, "", False

    def _leave(self, character: str = "") -> None:
        """Return to content: what began like a call is none. `character` is the last one that was read."""
        region, reader = self._region, self._reader
        assert region is not None, "calls are read"
        if self._region_calls == 0:
            # The first character of the last marker is certain, so that it is not found again.
            self._content += (*self._spaces, *region[: self._settled + 1])
            self._spaces = []
            self._todo.extendleft(reversed(region[self._settled + 1 :]))
            if self._is_bare:
                self._form = _without_calls(self._form)
        else:
            begun = reader.text if reader is not None and self._index is None else [*self._word, character]
            self._todo.extendleft(reversed(begun))
        self._region, self._reader, self._index, self._word = None, None, None, ""

    # ---- calls -----------------------------------------------------------------------------------------------------

    def _take_call(self, character: str) -> None:
        if self._reader is not None:
            self._read(character)
        elif self._word:
            self._take_word(character)
        elif character == "{":
            self._reader = _CallReader()
            self._read(character)
        elif character == "[" and not self._in_list and not self._region_calls:
            self._in_list = True
        elif character == "]" and self._in_list:
            self._in_list = False
        elif character in ",;" or character in _SPACES:
            pass
        else:
            self._take_word(character)

    def _take_word(self, character: str) -> None:
        """Take a marker after a call, or the name and the arguments of a call in the form `name{…}`."""
        word = self._word + character
        if word == self._form.end:
            if self._region_calls == 0:
                raise _NotACall
            self._region, self._word = None, ""
            self._spaces = []
        elif word in self._form.starts:
            self._word = ""
            if self._region_calls == 0:  # as if the calls began here
                assert self._region is not None, "calls are read"
                self._settled, self._in_list = len(self._region) - len(word), False
        elif any(marker.startswith(word) for marker in self._form.markers):
            self._word = word
        else:
            self._take_name(character)

    def _take_name(self, character: str) -> None:
        if self._form.name != "mistral" or self._in_list or len(self._word) >= _MAX_NAME_CHARACTERS:
            raise _NotACall
        name = self._word.partition("[")[0].strip(_SPACES)
        if character == "{" and name:
            self._reader, self._word = _CallReader(name), ""
            self._read(character)
        elif character.isalnum() or character in "_-.[]" or (character in _SPACES and name):
            self._word += character
            if self._word.endswith(self._form.starts):
                raise _NotACall
        else:
            raise _NotACall

    def _read(self, character: str) -> None:
        reader = self._reader
        assert reader is not None, "a call is read"
        reader.push(character)
        if reader.name is not None and self._index is None:
            if self._is_bare and reader.name not in self._tools:
                raise _NotACall
            self._start_call(reader.name)
        arguments = reader.arguments()
        if arguments and self._index is not None and self._keeps(self._index):
            if not self._deltas or self._deltas[-1].index != self._index:
                self._deltas.append(_GrowingDelta(self._index))
            self._deltas[-1].arguments.append(arguments)
        if reader.finished:
            self._reader = self._index = None

    def _start_call(self, name: str) -> None:
        self._index = self.num_calls
        self._region_calls += 1
        self.num_calls += 1
        self._spaces = []
        if self._keeps(self._index):
            self._deltas.append(_GrowingDelta(self._index, self._new_id(), name))

    def _keeps(self, index: int) -> bool:
        return self._parallel or index == 0


@dataclass(slots=True)
class _GrowingDelta:
    """A `ToolCallDelta` while its arguments grow."""

    index: int
    id: str | None = None
    name: str | None = None
    arguments: list[str] = field(default_factory=list)

    def whole(self) -> ToolCallDelta:
        return ToolCallDelta(self.index, "".join(self.arguments), self.id, self.name)


def _without_calls(form: ToolFormat) -> ToolFormat:
    """Return the format of a text that is no bare call: only markers begin calls."""
    return ToolFormat(form.name, form.starts, form.end, False, form.arguments_key, form.forced, form.short_ids)


def forced_calls_grammar(form: ToolFormat, tools: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool) -> str:
    """Return the Lark grammar of a text that is calls of these tools and nothing else.

    Args:
        form: The format of the calls.
        tools: The name and the JSON schema of the parameters of each tool.
        parallel: More than one call is allowed.
    """
    before, between, after = (literal(text) if text else "" for text in form.forced)
    more = f" ({between} call)*" if parallel else ""
    lines = [
        f"start: {before} call{more} {after}",
        "call: " + " | ".join(f"call{place}" for place in range(len(tools))),
    ]
    for place, (name, schema) in enumerate(tools):
        head = f'{{"name": {json.dumps(name)}, {json.dumps(form.arguments_key)}: '
        lines.append(f'call{place}: {literal(head)} arguments{place} "}}"')
        lines.append(f"arguments{place}: %json {json.dumps(json_style(schema))}")
    return "\n".join(lines) + "\n"
