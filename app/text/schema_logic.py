"""Two questions about JSON schemas: which values a schema refuses, and whether two schemas exclude each other.

The answers may be incomplete and are never wrong: a schema of `refusals` accepts only values that the given one refuses,
and `exclude_each_other` is true only if no value satisfies both.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import unquote

MAX_COMPLEMENT_CHARACTERS = 20_000
MAX_DIGITS = 64  # of a Decimal whose digits before and after the point are limited together
_LOOK = ("(?=", "(?!")
_META = frozenset(r"\^$.|?*+()[]{}")
# A Decimal of Python's pydantic: no text of signs and points alone, and then its digits.
_DECIMAL = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(.*)", re.DOTALL)
_DIGITS_TOGETHER = re.compile(
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d(?:\{0,(\d+)\}|\*)\\\.\\d(?:\{0,(\d+)\}|\*)0\*\$\)"
)
_DIGITS_AFTER_POINT = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_ONE_CHARACTER = re.compile(r"\[\^?(?:\\.|[^\[\]\\])+\]|\\[dwsDWS.\-/$+*?|()\[\]{}^\\]|[^\\^$.|?*+()\[\]{}]")


def patterns_without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that all hold exactly where this one holds; itself if it cannot be rewritten."""
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is not None:
        return [_decimal(decimal.group(1)) or pattern]
    if not pattern.startswith("^") or _has_top_alternative(pattern):
        return [pattern]
    found, rest = [], pattern[1:]
    while rest.startswith(_LOOK):
        end = _group_end(rest)
        if end is None:
            return [pattern]
        inner = rest[3:end]
        one = f"^(?:{inner})" if rest.startswith("(?=") else _without(inner)
        if one is None or any(mark in one for mark in ("(?=", "(?!", "(?<")):
            return [pattern]
        found.append(one)
        rest = rest[end + 1 :]
    return [*found, f"^{rest}"] if found else [pattern]


def _decimal(digits: str) -> str | None:
    """Return a pattern of Decimals for the part of pydantic's pattern that counts their digits."""
    if digits == r"\d*\.?\d*$":
        return r"^[+-]?(?:\d+\.?\d*|\.\d+)$"
    if (found := _DIGITS_AFTER_POINT.fullmatch(digits)) is not None:
        most = int(found.group(1))
        return rf"^[+-]?(?:\d+(?:\.\d{{0,{most}}}0*)?|\.{_some_digits(most)})$"
    found = _DIGITS_TOGETHER.fullmatch(digits)
    if found is None:
        return None
    alone, with_point = int(found.group(1)), int(found.group(2))
    before, after = (with_point - 1 if group is None else int(group) for group in found.group(3, 4))
    if max(alone, with_point, before, after) > MAX_DIGITS:
        return None
    parts = [rf"\d{{1,{alone}}}" if alone else "0"]
    for count in range(min(before, with_point - 1) + 1):
        rest = min(after, with_point - 1 - count)
        parts.append(rf"\d{{{count}}}\.\d{{0,{rest}}}0*" if count else rf"\.{_some_digits(rest)}")
    return rf"^[+-]?0*(?:{'|'.join(parts)})$"


def _some_digits(most: int) -> str:
    """Return a pattern of at least one digit, without counting zeros at the end."""
    return rf"(?:\d{{1,{most}}}0*)" if most else "0+"


def _without(inner: str) -> str | None:
    """Return a pattern of the texts that `^(?!inner)` allows, or None."""
    for anywhere in (".*", ".*?"):
        one = inner.removeprefix(anywhere)
        if one != inner and _ONE_CHARACTER.fullmatch(one):
            return f"^{_other_characters(one)}*$"
    whole: list[str] = []
    begun: list[str] = []
    for alternative in _alternatives(inner):
        text = _literal(alternative.removeprefix("^").removesuffix("$"))
        if text is None:
            return None
        (whole if alternative.endswith("$") else begun).append(text)
    return all_but(whole, begun)


def _other_characters(one: str) -> str:
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"


def _alternatives(pattern: str) -> list[str]:
    if pattern.startswith("(") and _group_end(pattern) == len(pattern) - 1:
        return _alternatives(pattern[1:-1].removeprefix("?:"))
    parts = _top_parts(pattern)
    if len(parts) == 1 and pattern.endswith(")$") and pattern.startswith("("):
        return [f"{one}$" for one in _alternatives(pattern[:-1])]
    return parts


def _literal(pattern: str) -> str | None:
    """Return the text that a pattern without operators matches, or None."""
    text, place = "", 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
            character = pattern[place : place + 1]
            if not character or character.isalnum():
                return None
        elif character in _META:
            return None
        text += character
        place += 1
    return text


def _group_end(pattern: str) -> int | None:
    """Return the place of the bracket that closes a pattern's first group."""
    for place, depth, _ in _walk(pattern):
        if depth == 0:
            return place
    return None


def _top_parts(pattern: str) -> list[str]:
    bars = [place for place, depth, character in _walk(pattern) if depth == 0 and character == "|"]
    return [pattern[start + 1 : stop] for start, stop in zip([-1, *bars], [*bars, len(pattern)], strict=True)]


def _has_top_alternative(pattern: str) -> bool:
    return len(_top_parts(pattern)) > 1


def _walk(pattern: str) -> Iterable[tuple[int, int, str]]:
    """Yield the place, the depth of groups after it, and each character outside of classes and escapes."""
    depth, place = 0, 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 2
            continue
        if character == "[":
            place = _class_end(pattern, place)
            continue
        depth += (character == "(") - (character == ")")
        yield place, depth, character
        place += 1


def _class_end(pattern: str, start: int) -> int:
    place = start + 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def all_but(whole: Iterable[str], begun: Iterable[str] = ()) -> str | None:
    """Return a pattern of all texts but `whole`, and texts that begin with one of `begun`; None if too long."""
    tree: dict[str, Any] = {}
    for texts, mark in ((whole, "whole"), (begun, "begun")):
        for text in texts:
            node = tree
            for character in text:
                node = node.setdefault(character, {})
            node[mark] = {}
    pattern = _all_but(tree)
    return f"^(?:{pattern})$" if pattern is not None and len(pattern) <= MAX_COMPLEMENT_CHARACTERS else None


def _all_but(node: dict[str, Any]) -> str | None:
    if "begun" in node:
        return None
    following = {character: child for character, child in node.items() if len(character) == 1}
    parts = [] if "whole" in node else [""]
    parts.append(f"[^{''.join(map(_escaped, following))}](?s:.)*" if following else "(?s:.)+")
    for character, child in following.items():
        rest = _all_but(child)
        if rest is not None:
            parts.append(f"{_escaped(character)}(?:{rest})")
    return "|".join(parts)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


Schema = Mapping[str, Any]
MAX_DEPTH = 12  # of references and alternatives that are followed
MAX_STEPS = 50_000  # of one schema
REFUSAL = "x-refusal"  # marks schemas whose properties are no list of an object's properties
_TYPES = ("array", "boolean", "null", "number", "object", "string")
_BOUNDS = {
    "minLength": ("string", "maxLength", -1),
    "maxLength": ("string", "minLength", 1),
    "minItems": ("array", "maxItems", -1),
    "maxItems": ("array", "minItems", 1),
}
_LIMITS = {
    "minimum": "exclusiveMaximum",
    "maximum": "exclusiveMinimum",
    "exclusiveMinimum": "maximum",
    "exclusiveMaximum": "minimum",
}


def json_type(value: Any) -> str:
    """Return the type of a JSON value; integers are numbers."""
    if value is None:
        return "null"
    kinds = ((bool, "boolean"), (str, "string"), ((int, float), "number"), (Mapping, "object"), (Sequence, "array"))
    return next(name for kind, name in kinds if isinstance(value, kind))


def same(one: Any, other: Any) -> bool:
    """Return True if two JSON values are equal, so that 1 is 1.0 and not true."""
    if json_type(one) != json_type(other):
        return False
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def target_of(root: Any, reference: Any) -> Any:
    """Return the schema of a document that a reference within it names (RFC 6901); None if it names none."""
    if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
        return None
    found = root
    for part in unquote(reference).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, list) and key.isdigit():
            found = found[int(key)] if int(key) < len(found) else None
        else:
            found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, Mapping | bool) else None


class SchemaLogic:
    """The schemas of one document. `ignores_siblings`: of a `$ref`, as JSON Schema did before the draft 2019-09."""

    def __init__(self, root: Any, ignores_siblings: bool) -> None:
        self._root, self._ignores_siblings = root, ignores_siblings
        self._steps = 0

    def target(self, reference: Any) -> Any:
        return target_of(self._root, reference)

    def is_circular(self, reference: Any) -> bool:
        """Return True if a schema refers to itself, also by others."""
        seen: set[str] = set()
        pending: list[Any] = [self.target(reference)]
        while pending:
            value = pending.pop()
            self._count()
            if isinstance(value, Mapping):
                found = value.get("$ref")
                if found == reference:
                    return True
                if isinstance(found, str) and found not in seen:
                    seen.add(found)
                    pending.append(self.target(found))
                pending += value.values()
            elif isinstance(value, list):
                pending += value
        return False

    def types(self, schema: Any) -> set[str]:
        return self._types(self.parts(schema))

    def refusals(self, schema: Any, known: Collection[str] | None = None, depth: int = 0) -> list[Any]:
        """Return schemas that each accept only values that `schema` refuses.

        `known`: the names of properties with values that may decide; None for all.
        """
        self._count()
        if schema is False or depth > MAX_DEPTH:
            return [True] if schema is False else []
        if not isinstance(schema, Mapping):
            return []
        if "$ref" in schema and self._ignores_siblings:
            return self.refusals(self.target(schema["$ref"]), known, depth + 1)
        found: list[Any] = [*self._refusals_of_values(schema), *self._refusals_of_objects(schema, known, depth)]
        for word, bound in schema.items():
            if word in _BOUNDS and isinstance(bound, int):
                kind, opposite, step = _BOUNDS[word]
                found += [{"type": kind, opposite: bound + step}] if bound + step >= 0 else []
            elif word in _LIMITS and json_type(bound) == "number":
                found.append({"type": "number", _LIMITS[word]: bound})
        return found + self._refusals_of_parts(schema, known, depth)

    def _refusals_of_parts(self, schema: Schema, known: Collection[str] | None, depth: int) -> list[Any]:
        found: list[Any] = []
        if "$ref" in schema:
            found += self.refusals(self.target(schema["$ref"]), known, depth + 1)
        if isinstance(schema.get("allOf"), list):
            found += [one for part in schema["allOf"] for one in self.refusals(part, known, depth + 1)]
        if isinstance(schema.get("anyOf"), list):
            each = [self.refusals(part, known, depth + 1) for part in schema["anyOf"]]
            if all(each):
                found.append({"allOf": [any_of(one) for one in each]})
        if isinstance(schema.get("not"), Mapping):
            found.append({**schema["not"], REFUSAL: True})
        return found

    def _refusals_of_values(self, schema: Schema) -> list[Any]:
        found: list[Any] = []
        kinds = _listed_types(schema)
        if kinds is not None:
            others = [name for name in _TYPES if name not in kinds and (name != "number" or "integer" not in kinds)]
            found += [{"type": others}] if others else []
        for word in ("const", "enum"):
            values = [schema[word]] if word == "const" and word in schema else schema.get(word)
            if isinstance(values, list):
                found += _all_other_values(values)
        return found

    def _refusals_of_objects(self, schema: Schema, known: Collection[str] | None, depth: int) -> list[Any]:
        found: list[Any] = [
            {"type": "object", "properties": {name: False}, REFUSAL: True}
            for name in _texts(schema.get("required"))
        ]  # fmt: skip
        properties = schema.get("properties")
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            refused = self.refusals(value, None, depth + 1) if known is None or name in known else []
            if refused:
                found.append(
                    {"type": "object", "required": [name], "properties": {name: any_of(refused)}, REFUSAL: True}
                )
        if schema.get("additionalProperties") is False and not schema.get("patternProperties") and known:
            others = [name for name in known if name not in (properties or ())]
            found += [{"type": "object", "required": [name], REFUSAL: True} for name in others]
        return found

    def exclude_each_other(self, one: Any, other: Any, depth: int = 0) -> bool:
        """Return True if no value satisfies both schemas."""
        self._count()
        if one is False or other is False:
            return True
        if depth > MAX_DEPTH:
            return False
        parts, others = self.parts(one), self.parts(other)
        for first, second in ((parts, others), (others, parts)):
            for part in first:
                for word in ("anyOf", "oneOf"):
                    branches = part.get(word)
                    if isinstance(branches, list) and all(
                        self.exclude_each_other(branch, {"allOf": [*second]}, depth + 1) for branch in branches
                    ):
                        return True
        return self._exclude(parts, others, depth)

    def _exclude(self, parts: list[Schema], others: list[Schema], depth: int) -> bool:
        shared = self._types(parts) & self._types(others)
        if not shared:
            return True
        values, other_values = listed_values(parts), listed_values(others)
        if values is not None and other_values is not None:
            return not any(same(value, other) for value in values for other in other_values)
        for listed, second in ((values, others), (other_values, parts)):
            if listed is not None and all(any(_refuses(part, value) for part in second) for value in listed):
                return True
        return shared == {"object"} and self._objects_exclude(parts, others, depth)

    def _objects_exclude(self, parts: list[Schema], others: list[Schema], depth: int) -> bool:
        properties, other_properties = _properties(parts), _properties(others)
        needed, other_needed = required(parts), required(others)
        for name in properties.keys() & other_properties.keys() & (needed | other_needed):
            if self.exclude_each_other(
                {"allOf": properties[name]}, {"allOf": other_properties[name]}, depth + 1
            ):  # fmt: skip
                return True
        return any(
            name not in _properties([part])
            for names, closed in ((needed, others), (other_needed, parts))
            for part in closed
            if part.get("additionalProperties") is False and not part.get("patternProperties")
            for name in names
        )

    def values(self, schema: Any) -> list[Any] | None:
        return listed_values(self.parts(schema))

    def _types(self, parts: Iterable[Schema], looks_inside: bool = True) -> set[str]:
        """Return the types that schemas which hold together may accept. `looks_inside`: also at their alternatives."""
        kinds = set(_TYPES)
        for part in parts:
            listed = _listed_types(part)
            if listed is not None:
                kinds &= {"number" if name == "integer" else name for name in listed}
            for word in ("anyOf", "oneOf") if looks_inside else ():
                branches = part.get(word)
                if isinstance(branches, list):
                    kinds &= {kind for branch in branches for kind in self._types(self.parts(branch), False)}
        values = listed_values(parts)
        return kinds if values is None else kinds & {json_type(value) for value in values}

    def parts(self, schema: Any) -> list[Schema]:
        """Return the schemas that a value must satisfy together."""
        found: list[Schema] = []
        pending, depth = [schema], 0
        while pending and depth < 10 * MAX_DEPTH:
            part, depth = pending.pop(), depth + 1
            if part is False:
                found.append({"enum": []})
            if not isinstance(part, Mapping):
                continue
            self._count()
            if "$ref" in part:
                pending.append(self.target(part["$ref"]))
                if self._ignores_siblings:
                    continue
            found.append(part)
            if isinstance(part.get("allOf"), list):
                pending += part["allOf"]
        return found

    def _count(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise ValueError("its alternatives and conditions are too many to be told apart")


def any_of(schemas: Sequence[Any]) -> Any:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _all_other_values(values: Sequence[Any]) -> list[Any]:
    kinds = {json_type(value) for value in values}
    others = [name for name in _TYPES if name not in kinds]
    found: list[Any] = [{"type": others}] if others else []
    if "string" in kinds:
        pattern = all_but([value for value in values if isinstance(value, str)])
        found += [{"type": "string", "pattern": pattern}] if pattern else []
    if "boolean" in kinds:
        left = [value for value in (True, False) if not any(value is one for one in values)]
        found += [{"enum": left}] if left else []
    if "number" in kinds:
        numbers = sorted({value for value in values if json_type(value) == "number"})
        edges = [None, *numbers, None]
        for low, high in itertools.pairwise(edges):
            limits = {"exclusiveMinimum": low, "exclusiveMaximum": high}
            found.append({"type": "number"} | {word: limit for word, limit in limits.items() if limit is not None})
    return found


def _refuses(schema: Schema, value: Any) -> bool:
    """Return True if a schema certainly refuses a value."""
    kinds = _listed_types(schema)
    if kinds is not None and json_type(value) not in {"number" if name == "integer" else name for name in kinds}:
        return True
    pattern = schema.get("pattern")
    if not isinstance(value, str) or not isinstance(pattern, str) or not value.isascii() or "\n" in value:
        return False
    with suppress(re.error):  # of such texts Python's expressions have the same meaning
        return re.search(pattern, value) is None
    return False


def _listed_types(schema: Schema) -> list[str] | None:
    kinds = schema.get("type")
    return [kinds] if isinstance(kinds, str) else _texts(kinds) if isinstance(kinds, list) else None


def _texts(value: Any) -> list[str]:
    return [one for one in value if isinstance(one, str)] if isinstance(value, list) else []


def listed_values(parts: Iterable[Schema]) -> list[Any] | None:
    """Return the values that schemas which hold together list; None if they list none."""
    found: list[Any] | None = None
    for part in parts:
        for word in ("const", "enum"):
            values = [part[word]] if word == "const" and word in part else part.get(word)
            if isinstance(values, list):
                found = values if found is None else [one for one in found if any(same(one, value) for value in values)]
    return found


def _properties(parts: Iterable[Schema]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for part in parts:
        properties = part.get("properties")
        for name, value in properties.items() if isinstance(properties, Mapping) else ():
            found.setdefault(name, []).append(value)
    return found


def required(parts: Iterable[Schema]) -> set[str]:
    """Return the names that schemas which hold together require."""
    return {name for part in parts for name in _texts(part.get("required"))}
