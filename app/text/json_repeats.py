"""Repeated keys of objects and repeated items of arrays, which no grammar can forbid: it does not remember a text.

`JsonRepeats` reads the JSON that a model writes, and says which continuations would write a key twice, or an item of an
array whose schema says `uniqueItems` twice.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cached_property
from typing import Any

from app.messages import GrammarSource
from app.text.schema_logic import Schema, SchemaLogic, listed_values

MAX_PLACES = 4000  # of one schema; more are read as if every array were unique
_END_OF_PLAIN = re.compile(rb'["\\\\]')
_QUOTE, _ESCAPE = ord('"'), ord("\\")
_ENDS = frozenset(b",]} \n\r\t")
_CLOSED = (b'"', b"}", b"]", b"true", b"false", b"null")  # ends of values that are complete without a further byte


class TokenBytes:
    def __init__(self, texts: Sequence[bytes]) -> None:
        self.texts = texts
        self._ids = sorted((token_id for token_id, text in enumerate(texts) if text), key=texts.__getitem__)
        self._sorted = [texts[token_id] for token_id in self._ids]

        self._known: dict[bytes, bool] = {}

    def has(self, prefix: bytes) -> bool:
        """Return True if a token begins with one of the few texts that this is asked about."""
        if prefix not in self._known:
            self._known[prefix] = next(self.beginning_with(prefix), None) is not None
        return self._known[prefix]

    def beginning_with(self, prefix: bytes) -> Iterator[int]:
        for place in range(bisect_left(self._sorted, prefix), len(self._sorted)):
            if not self._sorted[place].startswith(prefix):
                return
            yield self._ids[place]


class SchemaPlaces:
    """The schemas that may describe each place of a document: all alternatives, also those that others exclude."""

    def __init__(self, root: Any) -> None:
        self._logic, self._places = SchemaLogic(root, ignores_siblings=False), 0
        self.root = self.place([root])

    def place(self, schemas: Sequence[Any]) -> Place:
        self._places += 1
        found: dict[int, Schema] = {}
        pending = list(schemas)
        while pending and self._places <= MAX_PLACES:
            schema = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            pending.append(self._logic.target(schema.get("$ref")))
            for word in ("allOf", "anyOf", "oneOf"):
                pending += schema[word] if isinstance(schema.get(word), list) else []
            pending += [schema.get(word) for word in ("if", "then", "else")]
            for word in ("dependencies", "dependentSchemas"):
                pending += schema[word].values() if isinstance(schema.get(word), Mapping) else []
        return Place(self, list(found.values()), self._places > MAX_PLACES)


class Place:
    def __init__(self, places: SchemaPlaces, schemas: list[Schema], is_unknown: bool) -> None:
        self._places, self._schemas = places, schemas
        self.is_unique = is_unknown or any(schema.get("uniqueItems") is True for schema in schemas)
        self._children: dict[str, Place] = {}

    @cached_property
    def items(self) -> Place:
        found: list[Any] = []
        for schema in self._schemas:
            for word in ("items", "prefixItems", "additionalItems", "contains", "unevaluatedItems"):
                value = schema.get(word)
                found += value if isinstance(value, list) else [value]
        return self._places.place(found)

    def child(self, name: str) -> Place:
        if name not in self._children:
            found: list[Any] = []
            for schema in self._schemas:
                listed = schema.get("properties")
                found.append(listed.get(name) if isinstance(listed, Mapping) else None)
                patterns = schema.get("patternProperties")
                found += patterns.values() if isinstance(patterns, Mapping) else []
                found += [schema.get("additionalProperties"), schema.get("unevaluatedProperties")]
            self._children[name] = self._places.place(found)
        return self._children[name]

    @cached_property
    def texts(self) -> list[bytes] | None:
        """All values that this place may have, as JSON; None if they are not listed."""
        values = listed_values(self._schemas)
        return None if values is None else [json.dumps(value, ensure_ascii=False).encode() for value in values]


@dataclass(frozen=True, slots=True)
class _Container:
    """An object or array that is open. `start`: where its last key or item begins. `seen`: its keys or items."""

    is_array: bool
    place: Place
    seen: tuple[bytes, ...] = ()
    known: frozenset[str] = frozenset()  # the same in one spelling
    start: int = -1
    name: str = ""  # the last key


@dataclass(frozen=True, slots=True)
class _Reading:
    """How far a text has been read. `kind` is what the last byte belongs to."""

    length: int = 0
    open: tuple[_Container, ...] = ()
    kind: str = "value"  # expected: value, key, colon, end; being read: string, name (of a property), scalar
    is_escaped: bool = False
    is_over: bool = False  # the text is no JSON, or ends
    is_repeated: bool = False


@dataclass(frozen=True, slots=True)
class TextBefore:
    """What a model may write before the JSON: `GrammarSource` describes the fields."""

    after: bytes = b""
    opening: bytes = b""
    answer: bytes = b""

    @classmethod
    def of(cls, source: GrammarSource) -> TextBefore:
        return cls(source.after.encode(), source.opening.encode(), source.answer.encode())

    def length_in(self, text: bytearray) -> int:
        """Return where the JSON begins in a text, or -1 while that is not known."""
        start = 0
        if self.after and text.startswith(self.opening[: len(text)]):
            place = text.find(self.after, len(self.opening)) if len(text) >= len(self.opening) else -1
            if place < 0:
                return -1
            start = place + len(self.after)
        if not self.answer:
            return start
        rest = text[start:].lstrip(b" \n")
        if rest.startswith(self.answer):
            return len(text) - len(rest) + len(self.answer)
        return -1 if self.answer.startswith(rest) else start


class JsonRepeats:
    def __init__(self, places: SchemaPlaces, tokens: TokenBytes, before: TextBefore = TextBefore()) -> None:
        self._places, self._tokens, self._before = places, tokens, before
        self._text = bytearray()
        self._now = _Reading()
        self._begins = before.length_in(self._text)  # of the JSON

    def copy_of_state(self) -> tuple[_Reading, int, int]:
        return self._now, self._begins, len(self._text)

    def restore(self, state: tuple[_Reading, int, int]) -> None:
        self._now, self._begins, length = state
        del self._text[length:]

    def read(self, token_id: int) -> bool:
        """Read a token. Return False if it repeats a key or an item."""
        text = self._tokens.texts[token_id]
        self._text += text
        if self._begins < 0:
            self._begins = self._before.length_in(self._text)
            if self._begins < 0:
                return True
            text = bytes(self._text[self._begins :])
            self._now = replace(self._now, length=self._begins)
        start = len(self._text) - len(text)
        while self._now.length < len(self._text) and not self._now.is_over:
            now = self._now
            if now.kind in ("string", "name") and not now.is_escaped:  # all that is plain at once
                found = _END_OF_PLAIN.search(text, now.length - start)
                stop = len(self._text) if found is None else start + found.start()
                if stop > now.length:
                    self._now = now = replace(now, length=stop)
                if found is None:
                    break
            self._now = self._next(now, text[now.length - start])
        return not self._now.is_repeated

    def forbidden(self) -> Iterator[int]:
        """Yield the tokens that would complete a repetition."""
        for prefix in self._forbidden_texts():
            yield from self._tokens.beginning_with(prefix)

    def _next(self, now: _Reading, byte: int) -> _Reading:
        after = replace(now, length=now.length + 1)
        if now.kind in ("string", "name"):
            if now.is_escaped or byte == _ESCAPE:
                return replace(after, is_escaped=not now.is_escaped)
            if byte != _QUOTE:
                return after
            return self._end_name(after) if now.kind == "name" else self._end_value(after, after.length)
        if now.kind == "scalar":
            if byte not in _ENDS:
                return after
            after = self._end_value(after, now.length)
        return after if byte in b" \n\r\t" else self._take_mark(after, byte, now.length)

    def _take_mark(self, now: _Reading, byte: int, start: int) -> _Reading:
        """Read a byte outside of strings and numbers, at the place `start`."""
        top = now.open[-1] if now.open else None
        if top is None and byte in b"]},":
            return replace(now, is_over=True)
        if byte in b"]}":
            return self._end_value(replace(now, open=now.open[:-1]), now.length)
        if byte == ord(","):
            return replace(now, kind="value" if top is not None and top.is_array else "key")
        if byte == ord(":"):
            return replace(now, kind="value")
        return self._begin(now, start, "name") if now.kind == "key" else self._begin_value(now, byte, start)

    def _begin(self, now: _Reading, start: int, kind: str) -> _Reading:
        opened = (*now.open[:-1], replace(now.open[-1], start=start)) if now.open else ()
        return replace(now, open=opened, kind=kind)

    def _begin_value(self, now: _Reading, byte: int, start: int) -> _Reading:
        top = now.open[-1] if now.open else None
        if top is None and byte not in b'{["-0123456789tfn':
            return replace(now, is_over=True)
        if top is not None and top.is_array:
            now = self._begin(now, start, now.kind)
        if byte == _QUOTE:
            return replace(now, kind="string")
        if byte not in b"[{":
            return replace(now, kind="scalar")
        place = self._places.root if top is None else top.place.items if top.is_array else top.place.child(top.name)
        opened = _Container(byte == ord("["), place)
        return replace(now, open=(*now.open, opened), kind="value" if opened.is_array else "key")

    def _end_name(self, now: _Reading) -> _Reading:
        top = now.open[-1]
        raw = bytes(self._text[top.start : now.length])
        name = _decoded(raw)
        spelling = name if isinstance(name, str) else repr(raw)
        return replace(self._add(now, raw, spelling, spelling), kind="colon")

    def _end_value(self, now: _Reading, stop: int) -> _Reading:
        now = replace(now, kind="end", is_over=not now.open)
        top = now.open[-1] if now.open else None
        if top is None or not top.is_array or not top.place.is_unique:
            return now
        raw = bytes(self._text[top.start : stop])
        return self._add(now, raw, _spelling(raw), "")

    def _add(self, now: _Reading, raw: bytes, spelling: str, name: str) -> _Reading:
        top = now.open[-1]
        added = replace(top, seen=(*top.seen, raw), known=top.known | {spelling}, name=name)
        return replace(now, open=(*now.open[:-1], added), is_repeated=now.is_repeated or spelling in top.known)

    def _forbidden_texts(self) -> Iterator[bytes]:
        now = self._now
        if now.is_over or self._begins < 0 or now.is_escaped:
            return
        for depth, one in enumerate(now.open):
            is_top = depth == len(now.open) - 1
            if not one.seen or not (one.is_array or is_top):
                continue
            begun, lead = b"", b""
            if not is_top or now.kind == "name" or (one.is_array and now.kind in ("string", "scalar")):
                begun = bytes(self._text[one.start : now.length])
            else:
                lead = self._lead(now)
                # a value comes first, or no token has so much
                if (now.kind in ("value", "colon") and not one.is_array) or not self._tokens.has(lead):
                    continue
            listed = one.place.items.texts if one.is_array else None
            for seen in one.seen:
                if one.is_array:
                    yield from (lead + text for text in _repeating(seen, begun, one.seen, listed))
                elif seen.startswith(begun):
                    yield lead + seen[len(begun) :]

    def _lead(self, now: _Reading) -> bytes:
        """Return what is written before the next key or item."""
        if now.kind in ("value", "key"):
            return b" " if self._text.endswith(b",") else b""
        return {"string": b'", ', "scalar": b", ", "end": b", "}.get(now.kind, b"")


def _repeating(seen: bytes, begun: bytes, all_seen: tuple[bytes, ...], listed: list[bytes] | None) -> Iterator[bytes]:
    """Yield continuations that repeat an item, or of which it is the only end."""
    if not seen.startswith(begun):
        return
    left = [] if listed is None else [text for text in listed if text not in all_seen]
    if left:
        for length in range(len(begun) + 1, len(seen) + 1):
            if not any(text.startswith(seen[:length]) for text in left):
                yield seen[len(begun) : length]
                return
    rest = seen[len(begun) :]
    if seen.endswith(_CLOSED):
        yield from [rest] if rest else []
    else:
        yield from (rest + b",", rest + b"]")


def _decoded(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw


def _spelling(raw: bytes) -> str:
    """Return a text that is the same for equal JSON values; the text itself if it is nested too deeply."""
    try:
        return _one_spelling(json.loads(raw, parse_int=Decimal, parse_float=Decimal))
    except (ValueError, ArithmeticError, RecursionError):
        return repr(raw)


def _one_spelling(value: Any) -> str:
    if isinstance(value, Decimal):
        return f"n{value.normalize():f}" if -100 < value.adjusted() < 100 else f"n{value.normalize()}"
    if isinstance(value, list):
        return f"[{','.join(map(_one_spelling, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name!r}:{_one_spelling(one)}' for name, one in sorted(value.items()))}}}"
    return repr(value)
