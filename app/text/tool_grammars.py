"""Grammars that force calls of tools, in llguidance's Lark syntax.

Arguments that are JSON follow the tool's schema. Parameters between tags are plain texts: each follows the schema of its
property, in the order of the schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.errors import InvalidRequest
from app.text.grammar_definition import json_style, literal
from app.text.schema_logic import target_of
from app.text.tool_formats import ToolFormat, split_pattern, value_types, write_value

# Keywords of an object's schema that say which keys it has in another way than by listing them.
_OTHER_KEYS = (
    *("allOf", "anyOf", "oneOf", "not", "if", "$ref", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentSchemas", "dependentRequired"),
)
_FREE_TEXT = r"(?s:.*)"
_TYPES = {"integer": "number", "any": "object"}
_MAX_REFERENCES = 16


def forced_calls_grammar(
    form: ToolFormat, tools: Sequence[tuple[str, Mapping[str, Any]]], parallel: bool, begun: str = ""
) -> str:
    """Return the grammar of a text that is calls of these tools and nothing else.

    `tools` are names with the JSON schemas of their parameters. `begun` is the text before an answer that the prompt
    ends with: calls may begin with it too. Raises `InvalidRequest` if this format cannot follow a schema.
    """
    first, *others = form.forced
    before, between, after = map(_around, (first.removeprefix(begun), *others))
    more = f" ({between} call)*" if parallel and not form.is_single else ""
    rules = _Rules(form)
    lines = [
        f"start: {before} call{more} {after}",
        "call: " + " | ".join(f"call{place}" for place in range(len(tools))),
    ]
    for place, (name, schema) in enumerate(tools):
        lines.append(f"call{place}: {_call(form, name, place)}")
        lines += rules.arguments(name, schema, place)
    return "\n".join(lines) + "\n"


def _around(text: str) -> str:
    """Return the expression of a text around calls.

    White space at its beginning is a lexeme of its own, since texts that begin alike may follow a call, and the library
    takes the longest lexeme that may be meant.
    """
    rest = text.lstrip()
    return " ".join(literal(part) for part in (text[: len(text) - len(rest)], rest) if part)


def _call(form: ToolFormat, name: str, place: int) -> str:
    """Return the expression of a call; `arguments{place}` is the rule of its arguments."""
    parts: list[str] = []
    text = ""
    for number, part in enumerate(split_pattern(form.call)):
        if number % 2 == 0:
            text += part
        elif part == "name":
            text += json.dumps(name)[1:-1] if form.call.startswith("{") else name
        else:
            parts += _lexemes(form, text)
            parts.append(
                {"index": "/[0-9]+/", "number": "/[0-9]+/", "id": "/[0-9A-Za-z]{9}/"}.get(part, f"arguments{place}")
            )
            text = ""
    return " ".join([*parts, *_lexemes(form, text)])


def _lexemes(form: ToolFormat, text: str) -> list[str]:
    """Return a fixed text of a call as literals, divided as JSON is in an object.

    An answer that is an object may begin alike, and the library takes the longest lexeme that may be meant.
    """
    parts = _JSON_LEXEME.findall(text) if form.call.startswith('{"') else [text]
    return [literal(part) for part in parts if part]


_JSON_LEXEME = re.compile(r'"[^"]*"|[^"]+|"')


class _Rules:
    """The rules of arguments; each tool's number is in the names of its rules."""

    def __init__(self, form: ToolFormat) -> None:
        self._form = form
        self._is_listed = form.is_pythonic or bool(form.quote)  # parameters are separated by commas
        self._comma = "" if not self._is_listed else '", "' if form.is_pythonic else '","'
        self._colon = "=" if form.is_pythonic else ":"
        if form.parameter:
            self._first, _, rest = form.parameter.partition("{key}")
            self._between, self._end = rest.split("{value}")

    def arguments(self, tool: str, schema: Mapping[str, Any], place: int) -> Iterator[str]:
        if not self._form.parameter and not self._is_listed:
            yield f"arguments{place}: %json {json.dumps(json_style(schema))}"
            return
        for keyword in _OTHER_KEYS:
            if keyword in schema:
                raise InvalidRequest(
                    f"tools cannot be followed: the parameters of {tool} have {keyword}, which the {self._form.name} format of "
                    "calls has no form for; list the properties.",
                    field="tools",
                )
        yield from self._members(schema, f"{place}", schema, frozenset())

    def _members(
        self, schema: Mapping[str, Any], place: str, root: Mapping[str, Any], seen: frozenset[str]
    ) -> Iterator[str]:
        """Yield the rules of an object's members. `seen` are the references that led to it."""
        properties = schema.get("properties")
        listed = properties if isinstance(properties, Mapping) else {}
        required = schema.get("required")
        names = {*required} if isinstance(required, list) else set()
        yield from self._sequence([(key, key in names) for key in listed], place, _is_open(schema, listed))
        for number, (key, value) in enumerate(listed.items()):
            yield f"p{place}_{number}: {self._parameter(key, value, root, f'v{place}_{number}')}"
            yield from self._value(f"v{place}_{number}", value, root, key, seen)
        if _is_open(schema, listed):
            more = schema.get("additionalProperties", True)
            yield f"p{place}_more: {self._parameter(None, more, root, f'v{place}_more')}"
            yield from self._value(f"v{place}_more", more, root, None, seen)

    def _sequence(self, keys: Sequence[tuple[str, bool]], place: str, is_open: bool) -> Iterator[str]:
        """Yield rules of parameters in order, of which some may be left out.

        Rule s is what may follow if nothing is written yet, t the same after a parameter, with a comma where calls have
        any.
        """
        comma = self._comma + " "
        yield f"arguments{place}: s{place}_0"
        for number, (_, is_required) in enumerate(keys):
            here, after = f"{place}_{number}", f"{place}_{number + 1}"
            yield f"s{here}: p{here} t{after}" + ("" if is_required else f" | s{after}")
            yield f"t{here}: {comma}p{here} t{after}" + ("" if is_required else f" | t{after}")
        more = f"p{place}_more"
        last = f"{place}_{len(keys)}"
        yield f"s{last}: " + (f'"" | {more} ({comma}{more})*' if is_open else '""')
        yield f"t{last}: " + (f"({comma}{more})*" if is_open else '""')

    def _parameter(self, key: str | None, schema: Any, root: Mapping[str, Any], value: str) -> str:
        """Return the expression of one parameter; `key` None: any key that a schema does not list."""
        if self._is_listed:
            return (
                f'/[A-Za-z_][0-9A-Za-z_]*/ "{self._colon}" {value}'
                if key is None
                else f"{literal(key + self._colon)} {value}"
            )
        between = self._between
        if "{string}" in between:
            between = between.replace("{string}", "true" if _may_be_text(schema, root, _MAX_REFERENCES) else "false")
        if "{type}" in between:
            is_text = _may_be_text(schema, root, _MAX_REFERENCES)
            kinds = {"string"} if is_text else {_TYPES.get(one, one) for one in value_types(schema, root)}
            start, end = map(literal, between.split("{type}"))
            name = literal(self._first) + " /[0-9A-Za-z_.-]+/" if key is None else literal(self._first + key)
            return f"{name} {start} ({' | '.join(literal(kind) for kind in sorted(kinds))}) {end} {value}"
        if key is None:
            return f"{literal(self._first)} /[0-9A-Za-z_.-]+/ {literal(between)} {value}"
        return f"{literal(self._first + key + between)} {value}"

    def _value(
        self, rule: str, schema: Any, root: Mapping[str, Any], key: str | None, seen: frozenset[str]
    ) -> Iterator[str]:
        """Yield the rules of a value with the text that ends it."""
        if self._form.quote:
            yield from self._quoted(rule, schema, root, _MAX_REFERENCES)
            return
        document = _document(schema, root)
        if self._form.is_pythonic:
            is_flag = isinstance(schema, Mapping) and schema.get("type") == "boolean" and "enum" not in schema
            yield f"{rule}: " + ('"True" | "False"' if is_flag else f"%json {json.dumps(document)}")
            return
        end, tail = self._end.replace("{key}", key or ""), ""
        if self._form.element and key is None:  # the library cannot repeat the key
            end, tail = end.removesuffix(">"), " /[0-9A-Za-z_.-]+>/"
        texts = list(_texts(schema, root, _MAX_REFERENCES))
        if not texts:
            inner = list(self._elements(rule, schema, root, seen)) if self._form.element else []
            yield f"{rule}: {rule}_inner {literal(end)}{tail}"
            yield from inner or [f"{rule}_inner: %json {json.dumps(document)}"]
            return
        yield f"{rule}: (" + " | ".join(f"{rule}_{number}" for number in range(len(texts))) + f"){tail}"
        for number, (pattern, exact) in enumerate(texts):
            if exact:
                yield f"{rule}_{number}: {literal(pattern + end)}"
            elif pattern == _FREE_TEXT:
                yield f"{rule}_{number}[suffix={literal(end)}]: /{pattern}/"
            else:
                yield f"{rule}_{number}: /{_escaped(pattern)}/ {literal(end)}"

    def _elements(self, rule: str, schema: Any, root: Mapping[str, Any], seen: frozenset[str]) -> Iterator[str]:
        """Yield the rules of a value that is elements; none for one that is written as JSON, as in a schema's cycle."""
        while isinstance(schema, Mapping) and isinstance(name := schema.get("$ref"), str) and name not in seen:
            seen, schema = seen | {name}, target_of(root, name)
        if not isinstance(schema, Mapping) or any(keyword in schema for keyword in _OTHER_KEYS):
            return
        if isinstance(schema.get("items"), Mapping) and not {"minItems", "maxItems", "prefixItems"} & schema.keys():
            yield f"{rule}_inner: ({literal(self._first + 'item>')} {rule}_item)*"
            yield from self._value(f"{rule}_item", schema["items"], root, "item", seen)
        elif schema.get("properties") and isinstance(schema["properties"], Mapping):
            yield f"{rule}_inner: arguments{rule}"
            yield from self._members(schema, rule, root, seen)

    def _quoted(self, rule: str, schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[str]:
        """Yield the rules of a value with bare keys and the format's quotes.

        Lists follow their items' schema; objects inside of values may have any keys.
        """
        quote = literal(self._form.quote)
        given = schema if isinstance(schema, Mapping) and depth else {}
        if isinstance(reference := given.get("$ref"), str):
            yield from self._quoted(rule, target_of(root, reference), root, depth - 1)
            return
        options = next((given[name] for name in ("anyOf", "oneOf") if isinstance(given.get(name), list)), None)
        kinds = given.get("type")
        if options is None and isinstance(kinds, list):
            options = [{**given, "type": kind} for kind in kinds]
        values = given.get("enum", [given["const"]] if "const" in given else None)
        if options:
            yield f"{rule}: " + " | ".join(f"{rule}_{number}" for number in range(len(options)))
            for number, option in enumerate(options):
                yield from self._quoted(f"{rule}_{number}", option, root, depth - 1)
        elif isinstance(values, list):
            yield f"{rule}: " + " | ".join(literal(write_value(value, self._form.quote)) for value in values)
        elif kinds == "string" and (texts := list(_patterns(given))) and texts[0][0] != _FREE_TEXT:
            yield f"{rule}: {quote} /{_escaped(texts[0][0])}/ {quote}"
        elif kinds in ("integer", "number", "boolean", "null"):
            yield f"{rule}: %json {json.dumps(_document(given, root))}"
        elif kinds == "array":
            yield f'{rule}: "[" ({rule}_item ("," {rule}_item)*)? "]"'
            yield from self._quoted(f"{rule}_item", given.get("items"), root, depth - 1)
        else:
            yield f"{rule}: " + {"string": f"{rule}_text", "object": f"{rule}_object"}.get(str(kinds), f"{rule}_any")
            plain = json.dumps(_document({"type": ["number", "boolean", "null"]}, root))
            yield f"{rule}_any: {rule}_text | {rule}_object | {rule}_list | {rule}_plain"
            yield f"{rule}_plain: %json {plain}"
            yield f'{rule}_list: "[" ({rule}_any ("," {rule}_any)*)? "]"'
            member = f'{rule}_key ":" {rule}_any'
            yield f'{rule}_object: "{{" ({member} ("," {member})*)? "}}"'
            yield f"{rule}_key: /[0-9A-Za-z_.-]+/"
            yield f"{rule}_text: {quote} {rule}_rest"
            yield f"{rule}_rest[suffix={quote}]: /{_FREE_TEXT}/"


def _is_open(schema: Mapping[str, Any], listed: Mapping[str, Any]) -> bool:
    more = schema.get("additionalProperties")
    return bool(more) or isinstance(more, Mapping) if "additionalProperties" in schema else not listed


def _document(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of a property as one of its own, with the definitions to which it may refer."""
    own = dict(schema) if isinstance(schema, Mapping) else {} if schema is not False else {"not": {}}
    document = {**{name: root[name] for name in ("$defs", "definitions") if name in root}, **own}
    text = json.dumps(document)
    if _OTHER_REFERENCE.search(text):  # to the whole, or to a part of it that is no definition
        moved = json.dumps({**own, "$defs": {"root": root}}).replace('"$ref": "#', '"$ref": "#/$defs/root')
        document = json.loads(moved)
    return json_style(document)


_OTHER_REFERENCE = re.compile(r'"\$ref": "#(?!/\$defs/|/definitions/)')


def _may_be_text(schema: Any, root: Mapping[str, Any], depth: int) -> bool:
    return next(_texts(schema, root, depth), None) is not None


def _texts(schema: Any, root: Mapping[str, Any], depth: int) -> Iterator[tuple[str, bool]]:
    """Yield the texts that a value may be, as patterns or exact ones; none if it is never a string.

    Other values are written as JSON, and where a string is possible too, only texts are forced that read as either.
    """
    if not isinstance(schema, Mapping) or not depth:
        yield _FREE_TEXT, False
        return
    if isinstance(reference := schema.get("$ref"), str):
        yield from _texts(target_of(root, reference), root, depth - 1)
        return
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list):
            for option in options:
                yield from _texts(option, root, depth - 1)
            return
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if not isinstance(values, list):
        yield from _patterns(schema)
    elif any(isinstance(value, str) for value in values):
        for value in values:
            yield value if isinstance(value, str) else json.dumps(value), True


def _patterns(schema: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    kinds = schema.get("type", "object" if {"properties", "items"} & schema.keys() else "string")
    if kinds != "string" and not (isinstance(kinds, list) and "string" in kinds):
        return
    if isinstance(pattern := schema.get("pattern"), str):
        start, end = pattern.startswith("^"), pattern.endswith("$") and not pattern.endswith("\\$")
        inner = pattern[start : len(pattern) - end]
        yield (_FREE_TEXT if not start else "") + f"({inner})" + (_FREE_TEXT if not end else ""), False
    elif "minLength" in schema or "maxLength" in schema:
        yield f"(?s:.{{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}})", False
    else:
        yield _FREE_TEXT, False


def _escaped(pattern: str) -> str:
    """Return a regular expression as Lark has it, between slashes."""
    return re.sub(r"(?<!\\)/", r"\/", pattern).replace("\n", "\\n")
