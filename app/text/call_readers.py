"""Readers of one tool call, character by character: a JSON object, a name with JSON, or a name with parameters.

A reader refuses a text that cannot become a call at the first character that shows it, so little is read twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, Protocol

from app.text.tool_formats import (
    NOTHING,
    ToolFormat,
    json_value,
    member_schema,
    parameter_types,
    python_value,
    read_value,
    split_pattern,
    value_types,
    words,
)

SPACES = " \t\r\n"
_NAME_KEYS = frozenset({"name", "tool_name"})
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
# Other keys of an object that can still be a call.
_NEUTRAL_KEYS = frozenset({"type", "id", "function", "index", "tool_call_id"})
_KEYS = _NAME_KEYS | _ARGUMENT_KEYS | _NEUTRAL_KEYS
_MAX_HEADER_CHARACTERS = 320  # before the arguments of a call; a name has up to 256
_MAX_WORD_CHARACTERS = 16


class CallReader(Protocol):
    """Reader of one call.

    `name` is None until it is certain that the text is a call. `text` are all characters that were read, and `unread`
    its end that follows the call.
    """

    name: str | None
    finished: bool
    text: list[str]
    unread: str

    def push(self, character: str) -> None:
        """Read a character. Raises `NotACall`; if `name` is known, the rest of a call cannot be read."""

    def arguments(self) -> str:
        """Return the new characters of the arguments, as JSON; empty before the name is known."""


class NotACall(ValueError):
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
        if self._expects == "string":
            if character == '"' and not self._escaped:
                self._expects = "colon" if self._is_key else "more"
            self._escaped = character == "\\" and not self._escaped
            return
        if self._expects == "word":
            if character.isalnum() or character in "+-.":
                return
            self._expects = "more"
        if character not in SPACES:
            self._push_structure(character)

    def _push_structure(self, character: str) -> None:
        expects = self._expects
        if character == "," and expects == "more":
            self._expects = "key or end" if self._open[-1] == "{" else "item or end"
        elif character == ":" and expects == "colon":
            self._expects = "value"
        elif character in "}]" and expects not in ("colon", "value"):
            if not self._open or self._open.pop() + character not in ("{}", "[]"):
                raise NotACall
            self._expects = "more"
        elif character == '"' and expects not in ("colon", "more"):
            self._is_key, self._expects = expects == "key or end", "string"
        elif expects not in ("value", "item or end"):
            raise NotACall
        elif character in "{[":
            self._open.append(character)
            self._expects = "key or end" if character == "{" else "item or end"
        elif character.isalnum() or character in "+-.":
            self._expects = "word"
        else:
            raise NotACall


class ObjectReader:
    """Reader of one call `{"name": …, "arguments": {…}}`, or of `{…}` if `name` is given."""

    def __init__(self, name: str | None = None) -> None:
        self.name = name
        self.finished, self.unread = False, ""
        self.text: list[str] = []
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
        elif character not in SPACES:
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
                raise NotACall
            self._part = []
        self._add(character)

    def _add(self, character: str) -> None:
        if self._part is None:
            return
        self._part.append(character)
        if not self._is_value and self._depth == self._floor and self.name is None:
            key = "".join(self._part).rstrip(SPACES)
            if not any(f'"{known}"'.startswith(key) for known in _KEYS):
                raise NotACall

    def _end_key(self) -> None:
        self._key = _decoded("".join(self._part)) if self._part is not None else None
        if self._key not in _KEYS and self.name is None:
            raise NotACall
        self._is_value, self._part = True, None

    def _end_part(self) -> None:
        if self._is_value and self._part is not None:
            text = "".join(self._part).rstrip(SPACES)
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
                raise NotACall
            self.name = _text(inner.get("name"))
            given: Any = next((inner[key] for key in sorted(_ARGUMENT_KEYS) if key in inner), {})
            self._arguments = given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)
        if self._arguments is None:
            self._arguments = "{}"


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotACall from error


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise NotACall
    return value


def _argument_text(text: str) -> str:
    """Return arguments as JSON. Some models write the text of an object as a JSON string, or null for none.

    What is no object stays as the model wrote it, so that nobody takes it for a call without arguments.
    """
    if text.startswith("{"):
        return text
    value = _decoded(text)
    return "{}" if value is None or value == "" else value if isinstance(value, str) else text


class NamedReader:
    """Reader of a call with its name before the JSON of its arguments, such as `name[ARGS]{…}`."""

    def __init__(self, form: ToolFormat, head: str) -> None:
        self.name: str | None = None
        self.finished, self.unread = False, ""
        self.text: list[str] = list(head)
        self._form, self._head, self._inner = form, len(head), ObjectReader("")
        self._size = 0  # of the text before the arguments; -1 after it

    def push(self, character: str) -> None:
        self.text.append(character)
        if self._size < 0:
            self._inner.push(character)
        elif character == "{":
            self._begin(character)
        else:
            self._size += 1
            if self._size > _MAX_HEADER_CHARACTERS or not _may_be_header(character, self._form):
                raise NotACall
            if any("".join(self.text[-len(mark) :]) == mark for mark in self._form.opening if character == mark[-1]):
                raise NotACall
        self.finished = self._inner.finished

    def arguments(self) -> str:
        return self._inner.arguments()

    def _begin(self, character: str) -> None:
        header = "".join(self.text[self._head : -1])
        found = next(filter(None, (one.fullmatch(header) for one in _headers(self._form))), None)
        if found is None:
            raise NotACall
        self.name, self._size = found["name"], -1
        self._inner.push(character)


@lru_cache(maxsize=64)
def _headers(form: ToolFormat) -> list[re.Pattern[str]]:
    found = []
    for pattern in (form.call, *form.also):
        if "{arguments}" not in pattern or (form.reads_objects and pattern.startswith('{"')):
            continue
        parts = split_pattern(pattern.partition("{arguments}")[0].removeprefix(form.head))
        made = r"\s*"
        for place, part in enumerate(parts):
            made += _PLACES[part] if place % 2 else r"\s*".join(map(re.escape, re.split(r"\s+", part)))
        found.append(
            re.compile(
                made.replace(r"functions\.", r"(?:functions\.)?").replace(":" + _PLACES["index"], r"(?::\d*)?") + r"\s*"
            )
        )
    return found


_PLACES = {"name": r"(?P<name>[^\s\[\]{}<>:\"'`|]+?)\s*", "index": r"\d+", "id": r"[\w.:-]*"}


@lru_cache(maxsize=4096)
def _may_be_header(character: str, form: ToolFormat) -> bool:
    """Return False for a character that no text before arguments has."""
    return (
        character.isalnum() or character in "_-.:/ \t\r\n" or any(character in text for text in (form.call, *form.also))
    )


class _ParametersReader:
    """What readers of single parameters share: they write the JSON of the arguments themselves."""

    def __init__(self, head: str = "") -> None:
        self.name: str | None = None
        self.finished, self.unread = False, ""
        self.text: list[str] = list(head)
        self._key: list[str] = []
        self._value: list[str] = []
        self._count = 0  # of parameters
        self._name: list[str] = []
        self._new: list[str] = []

    def arguments(self) -> str:
        if self.name is None:
            return ""
        new = "".join(self._new)
        self._new = []
        return new

    def _ends_name(self, character: str, end: str) -> bool:
        """Read a character of the call's name; True if it is the one after it. Raises `NotACall`."""
        if character == end and self._name:
            return True
        if not (character.isalnum() or character in "_-.") or len(self._name) >= _MAX_HEADER_CHARACTERS:
            raise NotACall
        self._name.append(character)
        return False


class TaggedReader(_ParametersReader):
    """Reader of a call with parameters between tags, such as `<parameter=city>Paris</parameter>`.

    Values are texts; the tool's `schema` says which of them are numbers or objects. The text of a string is returned as
    it grows. A call that breaks off has incomplete JSON.
    """

    def __init__(self, form: ToolFormat, head: str, schemas: Mapping[str, Mapping[str, Any]]) -> None:
        super().__init__(head)
        self._schemas, self._marks = schemas, _marks(form)
        self._state: Literal["name", "after name", "between", "key", "after key", "value"] = "name"
        self._word = ""  # of the tags, without white space
        self._written = 0  # characters of the value that are part of the arguments already
        self._types: frozenset[str] = frozenset()
        self._is_text: bool | None = None  # the tag says that the value is a text, or that it is none

    def push(self, character: str) -> None:
        if self.name is None:  # a long call is not kept
            self.text.append(character)
        if self._state == "value":
            self._push_value(character)
        elif self._state in ("name", "key"):
            self._push_word(character)
        elif self._state == "after name":
            if self._follows(self._marks.after_name, character):
                self._word, self._state = "", "between"
        elif self._state == "after key":
            if self._follows(self._marks.after_key, character):
                self._begin_value()
        else:
            self._push_between(character)

    def _push_word(self, character: str) -> None:
        """Read a character of the name or of a key, which end at white space or at the next tag."""
        word, after = (
            (self._name, self._marks.after_name) if self._state == "name" else (self._key, self._marks.after_key)
        )
        ends = character in SPACES or character in (after[:1] or "<")
        if not ends and len(word) < _MAX_HEADER_CHARACTERS and (character.isprintable() and character not in "<>{}"):
            word.append(character)
        elif ends and word:
            is_name = self._state == "name"
            self._word, self._state = "", ("after name" if is_name else "after key")
            if is_name and not after:
                self._state = "between"
            if self.name is None:
                self.text.pop()
            self.push(character)
        elif not (character in SPACES and not word):
            raise NotACall

    def _follows(self, mark: str, character: str) -> bool:
        """Return True at the end of a text that must follow, in which `*` is a word."""
        if character in SPACES:
            return False
        self._word += character
        fixed, star, rest = mark.partition("*")
        if not star or len(self._word) <= len(fixed):
            if not fixed.startswith(self._word):
                raise NotACall
            return self._word == mark
        value, quote, more = self._word[len(fixed) :].partition(rest[:1])
        if (value and not value.isalnum()) or not rest.startswith(quote + more) or len(value) > _MAX_WORD_CHARACTERS:
            raise NotACall
        self._is_text = None if value.isdigit() else value in ("true", "string")
        return quote + more == rest

    def _push_between(self, character: str) -> None:
        if character in SPACES:
            return
        self._word += character
        marks = self._marks
        if self._begins_key():
            if self.name is None:
                self._begin_call()
            more = self._word[len(marks.key) :]
            self._word, self._key, self._state, self._is_text = "", [], "key", None
            for one in more:
                self.push(one)
        elif self._word == marks.tail:
            self._end_call()
        elif self._word in marks.stops:
            self.unread = self._word
            self._end_call()
        elif not any(one.startswith(self._word) for one in (marks.key, marks.tail, *marks.stops)):
            raise NotACall

    def _begins_key(self) -> bool:
        marks = self._marks
        if not marks.tail.startswith(marks.key):
            return self._word == marks.key
        return self._word.startswith(marks.key) and not any(
            one.startswith(self._word) for one in (marks.tail, *marks.stops)
        )

    def _begin_call(self) -> None:
        self.name = "".join(self._name)
        self._new.append("{")

    def _end_call(self) -> None:
        if self.name is None:
            self._begin_call()
        self._new.append("}")
        self.finished = True

    def _begin_value(self) -> None:
        key = "".join(self._key)
        self._new.append((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        assert self.name is not None, "the call has begun"
        self._types = parameter_types(self._schemas.get(self.name), key)
        if self._is_text is not None:
            self._types = frozenset({"string"}) if self._is_text else self._types - {"string"} or frozenset({"any"})
        self._value, self._written, self._state = [], 0, "value"
        if self._types == {"string"}:
            self._new.append('"')

    def _push_value(self, character: str) -> None:
        self._value.append(character)
        end = self._marks.value_end
        if character == end[-1] and "".join(self._value[-len(end) :]) == end:
            self._end_value()
        elif self._types == {"string"}:
            sure = len(self._value) - len(end) - 2  # the line break before the tag is not part of the value
            if sure > self._written:
                self._write_text(self._value[self._written : sure])
                self._written = sure

    def _write_text(self, characters: list[str]) -> None:
        if self._written == 0 and self._marks.has_lines:
            text = "".join(characters)
            characters = list(text.removeprefix("\r").removeprefix("\n"))
        self._new.append(json.dumps("".join(characters), ensure_ascii=False)[1:-1])

    def _end_value(self) -> None:
        value = self._value[: -len(self._marks.value_end)]
        if self._marks.has_lines and value[self._written :][-1:] == ["\n"] and len(value) > 1:
            value.pop()
        if self._types == {"string"}:
            self._write_text(value[self._written :])
            self._new.append('"')
        else:
            text = "".join(value)
            self._new.append(read_value(text.removeprefix("\n") if self._marks.has_lines else text, self._types))
        self._value, self._word, self._state = [], "", "between"


class _Marks:
    """The tags of a format, without white space. `stops` end a call that has no last tag."""

    def __init__(self, form: ToolFormat) -> None:
        def bare(text: str) -> str:
            return "".join(text.split())

        before, after = form.call.split("{parameters}")
        self.after_name = bare(before.partition("{name}")[2].replace("{number}", "*"))
        self.tail = bare(after)
        first, _, rest = form.parameter.partition("{key}")
        between, end = rest.split("{value}")
        self.key, self.value_end = bare(first), end.strip()
        self.after_key = bare(between.replace("{string}", "*").replace("{type}", "*"))
        self.element = form.element
        self.has_lines = between.endswith("\n")
        self.stops = tuple(bare(one) for one in (form.end, *form.opening) if one)


@lru_cache(maxsize=64)
def _marks(form: ToolFormat) -> _Marks:
    return _Marks(form)


class ElementReader(TaggedReader):
    """Reader of a call with elements as parameters, such as `<city>Paris</city>`, and as members of values."""

    _depth, _tag = 0, -1  # elements that are open in the value, and the place where a tag in it begins

    def _push_value(self, character: str) -> None:
        self._value.append(character)
        before = self._marks.element
        if character == before[-1] and "".join(self._value[-len(before) :]) == before:
            self._tag = len(self._value)
        elif character == ">" and self._tag >= 0:
            tag, self._tag = "".join(self._value[self._tag :]), -1
            if not tag.startswith("</"):
                self._depth += 1
            elif self._depth:
                self._depth -= 1
            else:
                del self._value[-len(before + tag) :]
                self._end_value()
        elif self._types == {"string"} and not self._depth and self._tag < 0:
            sure = len(self._value) - len(before)
            if sure > self._written:
                self._write_text(self._value[self._written : sure])
                self._written = sure

    def _end_value(self) -> None:
        text = "".join(self._value)
        if self._types == {"string"}:
            self._new.append(json.dumps(text[self._written :], ensure_ascii=False)[1:-1] + '"')
        else:
            root = self._schemas.get(self.name or "", {})
            schema = member_schema(root, "".join(self._key), root)
            self._new.append(json.dumps(_element_value(text, self._marks.element, schema, root), ensure_ascii=False))
        self._value, self._word, self._state = [], "", "between"


def _element_value(text: str, before: str, schema: Any, root: Mapping[str, Any]) -> Any:
    """Return the value of a text that may be elements in one another. Raises `NotACall`."""
    parts = re.split(re.escape(before) + "<([^<>]+)>", text)
    members: list[tuple[str, Any]] = []
    opened: list[tuple[str, Any, list[tuple[str, Any]]]] = []  # names with the schema and the members around them
    for place in range(1, len(parts), 2):
        name = parts[place]
        if not name.startswith("/"):
            opened.append((name, schema, members))
            schema = member_schema(schema, None if name == "item" else name, root)
            members = []
        elif opened and name[1:] == opened[-1][0]:
            value = _members_value(members, parts[place - 1], schema, root)
            name, schema, members = opened.pop()
            members.append((name, value))
        else:
            raise NotACall
    if opened:
        raise NotACall
    return _members_value(members, parts[0], schema, root)


def _members_value(members: Sequence[tuple[str, Any]], text: str, schema: Any, root: Mapping[str, Any]) -> Any:
    types = value_types(schema, root)
    if members:
        is_list = "array" in types or (not types & {"object"} and all(name == "item" for name, _ in members))
        return [value for _, value in members] if is_list else dict(members)
    if not text.strip() and types & {"object", "array"} and "string" not in types:
        return [] if "array" in types else {}
    return json.loads(read_value(text, types))


class PythonicReader(_ParametersReader):
    """Reader of a call as Python has it, `name(key=value, …)`. Values are Python's or JSON's."""

    def __init__(self) -> None:
        super().__init__()
        self._state: Literal["name", "key", "after key", "value"] = "name"
        self._depth = 0
        self._quote = ""
        self._escaped = False

    def push(self, character: str) -> None:
        self.text.append(character)
        if self._state == "name":
            self._push_name(character)
        elif self._state == "key":
            self._push_key(character)
        elif self._state == "after key":
            if character == "=":
                self._begin_value()
            elif character not in SPACES:
                raise NotACall
        else:
            self._push_value(character)

    def _push_name(self, character: str) -> None:
        if self._ends_name(character, "("):
            self._state = "key"

    def _push_key(self, character: str) -> None:
        if character == ")" and not self._key:
            self._end_call()
        elif character == "=" and self._key:
            self._begin_value()
        elif character in SPACES and self._key:
            self._state = "after key"
        elif (character.isalnum() or character in "_-") and len(self._key) < _MAX_HEADER_CHARACTERS:
            self._key.append(character)
        elif character not in SPACES:
            raise NotACall

    def _begin_value(self) -> None:
        self.name = "".join(self._name)
        key = json.dumps("".join(self._key), ensure_ascii=False)
        self._new.append(("{" if not self._count else ", ") + key + ": ")
        self._count += 1
        self._key, self._value, self._state = [], [], "value"

    def _push_value(self, character: str) -> None:
        if self._quote:
            if character == self._quote and not self._escaped:
                self._quote = ""
            self._escaped = character == "\\" and not self._escaped
        elif character in "\"'":
            self._quote, self._escaped = character, False
        elif character in "([{":
            self._depth += 1
        elif character in ")]}" and self._depth:
            self._depth -= 1
        elif character in ",)" and not self._depth:
            self._new.append(_python_value("".join(self._value)))
            self._state = "key"
            if character == ")":
                self._end_call()
            return
        elif character in "]}":
            raise NotACall
        self._value.append(character)

    def _end_call(self) -> None:
        if self.name is None:
            self.name = "".join(self._name)
            self._new.append("{")
        self._new.append("}")
        self.finished = True


def _python_value(text: str) -> str:
    """Return the JSON of a value of Python or JSON. Raises `NotACall`."""
    if json_value(text) is not NOTHING:
        return text.strip()
    if (value := python_value(text)) is NOTHING:
        raise NotACall
    return json.dumps(value, ensure_ascii=False)


class QuotedReader(_ParametersReader):
    """Reader of a call `name{key:value,…}` with bare keys and another text than `"` around strings (Gemma 4)."""

    def __init__(self, form: ToolFormat, head: str) -> None:
        super().__init__(head)
        self._quote = form.quote
        self._end = words(form.call)[-1]  # of the call
        self._state: Literal["name", "key", "value", "end"] = "name"
        self._depth = 0
        self._in_string = False
        self._word = ""

    def push(self, character: str) -> None:
        self.text.append(character)
        if self._state == "name":
            self._push_name(character)
        elif self._state == "key":
            self._push_key(character)
        elif self._state == "value":
            self._push_value(character)
        elif self._word or character not in SPACES:
            self._word += character
            self.finished = self._word == self._end
            if not self._end.startswith(self._word):
                self.finished, self.unread = True, self._word

    def _push_name(self, character: str) -> None:
        if self._ends_name(character, "{"):
            self.name, self._state = "".join(self._name), "key"
            self._new.append("{")

    def _push_key(self, character: str) -> None:
        if character == ":" and self._key:
            key = "".join(self._key).replace(self._quote, "").strip(SPACES)
            self._new.append((", " if self._count else "") + json.dumps(key, ensure_ascii=False) + ": ")
            self._count += 1
            self._key, self._value, self._state = [], [], "value"
        elif character == "}" and not self._key:
            self._new.append("}")
            self._state = "end"
        elif (self._key or character not in SPACES) and len(self._key) < _MAX_HEADER_CHARACTERS:
            self._key.append(character)
        elif character not in SPACES:
            raise NotACall

    def _push_value(self, character: str) -> None:
        self._value.append(character)
        if character == self._quote[-1] and "".join(self._value[-len(self._quote) :]) == self._quote:
            self._in_string = not self._in_string
        elif self._in_string:
            pass
        elif character in "{[":
            self._depth += 1
        elif self._depth and character in "}]":
            self._depth -= 1
        elif not self._depth and character in ",}":
            self._new.append(_unquoted("".join(self._value[:-1]), self._quote))
            self._state = "key"
            if character == "}":
                self._push_key(character)


def _unquoted(text: str, quote: str) -> str:
    """Return the JSON of a value with bare keys and other quotes. Raises `NotACall`."""
    parts = text.split(quote)
    written = (
        json.dumps(part, ensure_ascii=False) if place % 2 else _BARE_KEY.sub(r'\1"\2":', part)
        for place, part in enumerate(parts)
    )
    return json.dumps(_decoded("".join(written)), ensure_ascii=False)


_BARE_KEY = re.compile(r'([{,]\s*+)([^\s{}\[\],:"]++)\s*+:')


def new_reader(form: ToolFormat, head: str, schemas: Mapping[str, Mapping[str, Any]]) -> CallReader:
    """Return the reader of a call that is no JSON object, after its beginning, which was read."""
    if form.is_pythonic:
        return PythonicReader()
    if form.quote:
        return QuotedReader(form, head)
    if form.element:
        return ElementReader(form, head, schemas)
    return TaggedReader(form, head, schemas) if form.parameter else NamedReader(form, head)
