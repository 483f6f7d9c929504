"""Keywords of JSON schemas that the library does not know, in words that it knows.

A schema after this accepts only what it accepted before, and mostly all of it. Conditions and `not` become alternatives
(`schema_logic.py` has their opposites), `oneOf` becomes `anyOf` of alternatives that exclude each other, and names of
properties are listed. What cannot be said otherwise stays, and the library refuses it by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from itertools import combinations
from typing import Any
from urllib.parse import quote

from app.text.schema_logic import (
    REFUSAL,
    Schema,
    SchemaLogic,
    all_but,
    any_of,
    patterns_without_look_ahead,
    required,
    same,
    target_of,
)

MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
IN_PLACE = ("allOf", "anyOf", "oneOf")  # their schemas describe the same value
SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "additionalProperties", "contains", "if", "then", "else", "not"}
)
_SAFE_IN_REFERENCES = "#/%~:?!$&'()*+,;=@"
MAX_CHAIN = 16  # references that lead to one another for one value
MAX_LIMIT = 9 * 10**18  # of numbers: the library cannot follow a larger range
_ALL_NAMES = frozenset({"", ".*", "^.*$", ".*$", "^.*"})  # patterns that match every name of one line
_BESIDE_REFERENCE = ("$ref", "$defs", "definitions", "$schema")
_CONDITION = ("if", "then", "else")
_OLD_DRAFTS = ("draft-03/", "draft-04/", "draft-05/", "draft-06/", "draft-07/")  # in `$schema`
MAX_CONDITIONS = 3  # that may hold together: their alternatives multiply
MAX_COMBINATIONS = 32
# Formats whose meaning the library enforces. Any other is an annotation, as the specification says.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})


def narrow_schema(schema: Any, is_open: bool = False, has_repeats: bool = False) -> Any:
    """Return a schema in words that the library knows, as far as possible. What is no schema is returned unchanged.

    `is_open`: objects that list their properties may have others, if the schema does not forbid it. `has_repeats`:
    repeated items are noticed elsewhere. Raises `RecursionError` if it is nested too deeply, and `ValueError` if it has
    too many alternatives, or refers to a schema at another address.
    """
    return _Narrowing(schema, is_open, has_repeats).schema(schema) if isinstance(schema, Mapping) else schema


class _Narrowing:
    def __init__(self, root: Schema, is_open: bool, has_repeats: bool) -> None:
        self._root, self._is_open, self._has_repeats = root, is_open, has_repeats
        written = root.get("$schema")
        self._is_old = isinstance(written, str) and any(draft in written for draft in _OLD_DRAFTS)
        self._has_listed_items = self._is_old or (isinstance(written, str) and "2019-09" in written)
        self._logic = SchemaLogic(root, self._is_old)

    def schema(self, schema: Any) -> Any:
        if not isinstance(schema, Mapping):
            return schema
        if isinstance(name := schema.get("$ref"), str):
            self._check_progress(schema, ())
            schema = {**self._without_siblings(schema), "$ref": quote(name, safe=_SAFE_IN_REFERENCES)}
        done: dict[str, Any] = {}
        for word, value in schema.items():
            if word in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                done[word] = {name: self.schema(one) for name, one in value.items()}
            elif word in IN_PLACE and isinstance(value, list):
                done[word] = [self.schema(one) for one in value]
            elif word in SCHEMAS:
                done[word] = [self.schema(one) for one in value] if isinstance(value, list) else self.schema(value)
            elif word != "format" or value in _FORMATS:
                done[word] = value
        together: list[Any] = []
        for rule in _RULES:
            together += rule(self, schema, done)
        if together:
            done["allOf"] = [*done.get("allOf", ()), *together]
        return done

    def _check_progress(self, schema: Any, seen: tuple[str, ...]) -> None:
        """Check that a schema does not lead to itself for the same value, which nothing could follow."""
        if not isinstance(schema, Mapping):
            return
        name = schema.get("$ref")
        if name in seen:
            raise ValueError(f"the reference {name} leads to itself")
        if isinstance(name, str) and len(seen) < MAX_CHAIN:
            self._check_progress(self._logic.target(name), (*seen, name))
        parts = schema.get("allOf")
        for part in parts if isinstance(parts, list) and seen else ():
            self._check_progress(part, seen)

    def _without_siblings(self, schema: Schema) -> Schema:
        """Drop the words beside a `$ref`, if it leads back to itself and they say nothing.

        The library does not combine such a reference with other words.
        """
        if len(schema) == 1 or not self._logic.is_circular(schema["$ref"]):
            return schema
        target = self._logic.target(schema["$ref"])
        types = self._logic.types(target)
        listed = schema.get("type", [])
        says_nothing = types <= {*([listed] if isinstance(listed, str) else listed)}
        return {
            word: value
            for word, value in schema.items()
            if word in _BESIDE_REFERENCE
            or not (self._is_old or word in _ANNOTATIONS or (word == "type" and says_nothing))
        }

    # Each rule reads a schema, takes its keyword out of `done`, and returns schemas that must hold too.

    def old_words(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """Words of older drafts, and limits that are too large."""
        for limit in ("minimum", "maximum"):
            word = f"exclusive{limit.title()}"
            if isinstance(schema.get(word), bool):
                del done[word]
                if schema[word] and limit in done:
                    done[word] = done.pop(limit)
            for key in (limit, word):
                bound = done.get(key)
                if isinstance(bound, int | float) and not isinstance(bound, bool):
                    done[key] = max(bound, -MAX_LIMIT) if limit == "minimum" else min(bound, MAX_LIMIT)
        if "$ref" in schema and self._is_old and schema is not self._root:
            done.pop("$id", None)  # it does not count beside a reference, as all that is beside one
        name = schema.get("$id")
        if isinstance(name, str) and name.startswith("#") and not self._is_old and "$anchor" not in done:
            done.pop("$id", None)
            if len(name) > 1:
                done["$anchor"] = name[1:]
        return []

    def patterns(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        pattern = schema.get("pattern")
        if not isinstance(pattern, str):
            return []
        done["pattern"], *others = patterns_without_look_ahead(pattern)
        return [{"pattern": other} for other in others]

    def one_of(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        branches = schema.get("oneOf")
        if not isinstance(branches, list) or "anyOf" in schema:
            return []
        alternatives = [self._alone(place, branches, done["oneOf"][place]) for place in range(len(branches))]
        if None in alternatives:
            return []
        # the order of words is that of an object's properties
        words = done if "properties" in done else {"anyOf" if word == "oneOf" else word: done[word] for word in done}
        kept = {word: value for word, value in words.items() if word != "oneOf"}
        done.clear()
        done |= kept | {"anyOf": alternatives}
        return []

    def _alone(self, place: int, branches: list[Any], done: Any) -> Any:
        """Return a schema of the values that satisfy this one of the alternatives; None if it cannot be said."""
        branch = branches[place]
        known = _names(self._logic, branch)
        others: list[Any] = []
        for other in branches[:place] + branches[place + 1 :]:
            if self._logic.exclude_each_other(branch, other):
                continue
            refused = [
                one
                for one in self._logic.refusals(other, known)
                if not self._logic.exclude_each_other(branch, one)
            ]  # fmt: skip
            if not refused:
                return None
            others.append(self.schema(any_of(refused)))
        return {"allOf": [done, *others]} if others else done

    def negation(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        if "not" not in schema:
            return []
        rest = {word: value for word, value in schema.items() if word != "not"}
        if rest and self._logic.exclude_each_other(rest, schema["not"]):
            del done["not"]
            return []
        refused = [one for one in self._logic.refusals(schema["not"]) if not self._logic.exclude_each_other(rest, one)]
        if not refused:
            return []
        del done["not"]
        return [self.schema(any_of(refused))]

    def conditions(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """`if`, `then` and `else` of a schema and of its `allOf` together."""
        listed = schema.get("allOf")
        found = [one for one in listed if _is_condition(one)] if isinstance(listed, list) else []
        found += [schema] if "if" in schema else []
        for word in _CONDITION:
            done.pop(word, None)
        found = [one for one in found if "then" in one or "else" in one]
        if isinstance(listed, list):
            done["allOf"] = [new for old, new in zip(listed, done["allOf"], strict=True) if not _is_condition(old)]
            if not done["allOf"]:
                del done["allOf"]
        if not found:
            return []
        strict = [_with_required(one["if"]) for one in found]
        if all(
            self._logic.exclude_each_other(first, second["if"])
            for place, first in enumerate(strict)
            for second in found[:place] + found[place + 1 :]
        ):
            return [any_of(self._exclusive(found, strict))]
        if len(found) > MAX_CONDITIONS:
            raise ValueError(f'more than {MAX_CONDITIONS} conditions ("if") of one value that may hold together')
        return [any_of(self._branches(one)) for one in found]

    def _exclusive(self, found: list[Any], strict: list[Any]) -> list[Any]:
        """Return alternatives of conditions of which only one holds: each one, and none."""
        alternatives = []
        for place, one in enumerate(found):
            others = [other["else"] for other in found[:place] + found[place + 1 :] if "else" in other]
            parts = [strict[place], one.get("then", True), *others]
            alternatives.append(self._together(parts))
        refused = [self._logic.refusals(one["if"]) for one in found]
        if all(refused):
            alternatives.append(self._together([*map(any_of, refused), *(one.get("else", True) for one in found)]))
        elif len(found) == 1:
            alternatives.append(self._together([found[0].get("then", True), found[0].get("else", True)]))
        return alternatives

    def _branches(self, one: Schema) -> list[Any]:
        refused = self._logic.refusals(one["if"])
        # without an opposite of the condition: what satisfies both branches is valid in any case
        other = [any_of(refused)] if refused else [one.get("then", True)]
        return [
            self._together([one["if"], one.get("then", True)]),
            self._together([*other, one.get("else", True)]),
        ]

    def _together(self, parts: list[Any]) -> Any:
        parts = [self.schema(part) for part in parts if part is not True and part != {}]
        return parts[0] if len(parts) == 1 else {"allOf": parts} if parts else True

    def dependencies(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        together = []
        for word in ("dependencies", "dependentRequired", "dependentSchemas"):
            value = schema.get(word)
            if not isinstance(value, Mapping):
                continue
            del done[word]
            needed = required([schema])
            for name, dependency in value.items():
                then = {"required": dependency} if isinstance(dependency, list) else dependency
                if isinstance(dependency, list) and set(dependency) <= needed:
                    continue
                if name in needed:
                    together.append(self.schema(then))
                else:
                    together.append({"anyOf": [{"properties": {name: False}}, self.schema(then)]})
        return together

    def names(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """`propertyNames`: the listed names that it allows, and others by its list or its pattern."""
        if "propertyNames" not in schema:
            return []
        names = schema["propertyNames"]
        if isinstance(names, Mapping) and isinstance(target := self._logic.target(names.get("$ref")), Mapping):
            names = target
        words = {word for word in names if word not in _ANNOTATIONS} if isinstance(names, Mapping) else set()
        words -= {"type"} if words and names.get("type") == "string" else set()
        words -= {"format"} if words and names.get("format") not in _FORMATS else set()
        if names is True or (isinstance(names, Mapping) and not words):
            done.pop("propertyNames")
            return []
        listed, others = done.get("properties", {}), done.get("additionalProperties", True)
        patterns = done.get("patternProperties")
        if isinstance(patterns, Mapping) and not listed and len(patterns) == 1 and set(patterns) <= _ALL_NAMES:
            ((_, others),) = done.pop("patternProperties").items()
        if "patternProperties" in done or not isinstance(listed, Mapping) or not isinstance(names, Mapping):
            return []
        if words in ({"enum"}, {"const"}):
            allowed = names.get("enum", [names.get("const")])
            kept = {name: one if name in allowed else False for name, one in listed.items()}
            kept |= {name: others for name in allowed if isinstance(name, str) and name not in kept}
            closed = {"properties": kept, "additionalProperties": False}
        elif (pattern := _name_pattern(names, words)) is not None and (others in (True, False, {}) or not listed):
            kept = {name: one if re.search(pattern, name) else False for name, one in listed.items()}
            closed = {"properties": kept} if kept else {}
            closed |= {"patternProperties": {pattern: others}} if others is not False else {}
        else:
            return []
        del done["propertyNames"]
        done |= closed | {"additionalProperties": False}
        return []

    def contained(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """`contains`: the first items satisfy it."""
        if "contains" not in schema:
            for word in ("minContains", "maxContains"):
                done.pop(word, None)
            return []
        least, most = schema.get("minContains", 1), schema.get("maxContains")
        if "prefixItems" in schema or isinstance(schema.get("items"), list) or not isinstance(least, int):
            return []
        rest = []
        if most is not None:
            rest = self._logic.refusals(schema["contains"])
            if not rest or not isinstance(most, int) or least > most:
                return []
        if least > MAX_COMBINATIONS:
            return []
        items = done.get("items", True)
        for word in ("contains", "minContains", "maxContains"):
            done.pop(word, None)
        others = {"allOf": [items, self.schema(any_of(rest))]} if rest else items
        if not least:
            done["items"] = others
            return []
        first, following = ("items", "additionalItems") if self._has_listed_items else ("prefixItems", "items")
        done[first] = [{"allOf": [items, self.schema(schema["contains"])]}] * least
        done[following] = others
        done["minItems"] = max(least, schema.get("minItems", 0))
        return []

    def numbers_of_properties(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """`minProperties` and `maxProperties` of objects with optional properties, which the library does not count."""
        least, most = schema.get("minProperties"), schema.get("maxProperties")
        listed, needed = schema.get("properties"), required([schema])
        if not isinstance(listed, Mapping) or not listed or set(listed) <= needed:
            return []
        optional = [name for name in listed if name not in needed]
        together: list[Any] = []
        if isinstance(least, int):
            choices = list(combinations(optional, least - len(needed))) if 0 < least - len(needed) <= 2 else []
            if least <= len(needed) or 0 < len(choices) <= MAX_COMBINATIONS:
                del done["minProperties"]
                if choices:
                    together.append({"anyOf": [{"required": list(names)} for names in choices]})
        if isinstance(most, int) and not self._has_others(schema):
            absent = len(optional) - max(most - len(needed), 0)
            choices = list(combinations(optional, absent)) if absent > 0 and len(optional) <= 10 else []
            if absent <= 0 or 0 < len(choices) <= MAX_COMBINATIONS:
                del done["maxProperties"]
                done["additionalProperties"] = False  # also if others describe the object, and it stays open there
                if choices:
                    together.append({"anyOf": [{"properties": dict.fromkeys(names, False)} for names in choices]})
        return together

    def _has_others(self, schema: Schema) -> bool:
        return bool(schema.get("additionalProperties", self._is_open) is not False or "patternProperties" in schema)

    def repeated_items(self, schema: Schema, done: dict[str, Any]) -> list[Any]:
        """`uniqueItems`, which `json_repeats.py` sees to: no more items than there are values."""
        if "uniqueItems" not in schema or not (self._has_repeats or schema["uniqueItems"] is False):
            return []
        del done["uniqueItems"]
        items = schema.get("items", True)
        values = None if isinstance(items, list) or "prefixItems" in schema else self._logic.values(items)
        if values is not None and schema["uniqueItems"] is True:
            different = [
                value for place, value in enumerate(values) if not any(same(value, one) for one in values[:place])
            ]
            listed = schema.get("maxItems")
            done["maxItems"] = min(len(different), listed) if isinstance(listed, int) else len(different)
        return []


_ANNOTATIONS = frozenset(
    {"title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly", "$id", "$schema"}
)
_RULES: tuple[Callable[[_Narrowing, Schema, dict[str, Any]], list[Any]], ...] = (
    _Narrowing.old_words,
    _Narrowing.patterns,
    _Narrowing.conditions,
    _Narrowing.one_of,
    _Narrowing.negation,
    _Narrowing.dependencies,
    _Narrowing.names,
    _Narrowing.contained,
    _Narrowing.numbers_of_properties,
    _Narrowing.repeated_items,
)


def _is_condition(schema: Any) -> bool:
    return isinstance(schema, Mapping) and "if" in schema and not set(schema) - {*_CONDITION, *_ANNOTATIONS}


def _with_required(schema: Any) -> Any:
    """Return a schema that demands the properties with values that it describes."""
    listed = schema.get("properties") if isinstance(schema, Mapping) else None
    if not isinstance(listed, Mapping):
        return schema
    return {"type": "object", **schema, "required": [*dict.fromkeys([*required([schema]), *listed])]}


def _names(logic: SchemaLogic, schema: Any) -> set[str]:
    return {name for part in logic.parts(schema) for name in part.get("properties", ()) if isinstance(name, str)}


def _name_pattern(names: Any, words: set[str]) -> str | None:
    if words == {"not"} and isinstance(names["not"], Mapping) and set(names["not"]) == {"enum"}:
        return all_but([name for name in names["not"]["enum"] if isinstance(name, str)])
    if words == {"pattern"} and isinstance(names["pattern"], str):
        patterns = patterns_without_look_ahead(names["pattern"])
        with suppress(re.error):
            re.compile(patterns[0])
            return patterns[0] if len(patterns) == 1 else None
    least, most = (names.get(word, default) for word, default in (("minLength", 0), ("maxLength", "")))
    if words <= {"minLength", "maxLength"} and isinstance(least, int) and (most == "" or isinstance(most, int)):
        return f"^(?s:.){{{least},{most}}}$"
    return None


_OBJECT_WORDS = frozenset({"properties", "patternProperties", "required", "minProperties", "maxProperties"})


def close_schema(schema: Any, is_open: bool = False) -> Any:
    """Close the objects of a schema. What is no schema is returned unchanged.

    `is_open`: only objects that forbid unevaluated properties are closed. Raises `RecursionError` if it is nested too
    deeply.
    """
    return _Closing(schema, is_open).result() if isinstance(schema, Mapping) else schema


class _Closing:
    """One schema while its objects are closed.

    Schemas that describe one object together (`allOf`, a `$ref` beside other keywords) are closed together. A
    definition that is used in such a place is copied without being closed.
    """

    def __init__(self, root: Schema, is_open: bool) -> None:
        self._root, self._is_open = root, is_open
        self._copies: dict[str, Any] = {}  # open definitions by name
        self._names: dict[str, str] = {}  # their names by reference

    def result(self) -> dict[str, Any]:
        done: dict[str, Any] = self._whole(self._root)
        return done | {"$defs": {**done.get("$defs", {}), **self._copies}} if self._copies else done

    def _whole(self, schema: Any) -> Any:
        """Return a schema that describes a value alone."""
        if not isinstance(schema, Mapping):
            return schema
        in_place = [word for word in (*IN_PLACE, "$ref") if word in schema]
        is_union = in_place in (["anyOf"], ["oneOf"]) and not _OBJECT_WORDS & schema.keys()
        is_reference = in_place == ["$ref"] and not _OBJECT_WORDS & schema.keys()
        done = self._copy(schema, is_part=bool(in_place) and not is_union and not is_reference)
        is_evaluated = schema.get("unevaluatedProperties") is False
        if is_union or is_reference or "additionalProperties" in schema or REFUSAL in schema:
            return done
        if self._is_open and not is_evaluated:
            return done
        listed = _Listed(IN_PLACE if not is_evaluated else ("allOf",))
        self._list(schema, listed, set())
        if listed.is_open or not (listed.properties or listed.patterns or schema.get("properties") == {}):
            return done
        done.pop("unevaluatedProperties", None)
        closed = {"properties": dict.fromkeys(listed.properties, True), "additionalProperties": False}
        if listed.patterns:
            closed["patternProperties"] = dict.fromkeys(listed.patterns, True)
        if in_place:
            return done | {"allOf": [*done.get("allOf", ()), closed]}
        return done | {"properties": closed["properties"] | done.get("properties", {}), "additionalProperties": False}

    def _copy(self, schema: Schema, is_part: bool) -> dict[str, Any]:
        """Return a copy of a schema with closed schemas in it. `is_part`: others describe the same value."""
        done: dict[str, Any] = {}
        for word, value in schema.items():
            if word in MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                done[word] = {name: self._whole(one) for name, one in value.items()}
            elif word in IN_PLACE and isinstance(value, list):
                done[word] = [self._part(one) if is_part else self._whole(one) for one in value]
            elif word in SCHEMAS:
                done[word] = [self._whole(one) for one in value] if isinstance(value, list) else self._whole(value)
            elif word == "$ref" and is_part:
                done[word] = self._open_reference(value)
            elif word != REFUSAL:
                done[word] = value
        return done

    def _part(self, schema: Any) -> Any:
        return self._copy(schema, is_part=True) if isinstance(schema, Mapping) else schema

    def _open_reference(self, reference: Any) -> Any:
        target = self._target(reference)
        if target is None:
            return reference
        if reference not in self._names:
            name = f"open-{len(self._names)}"
            while name in self._root.get("$defs", ()):
                name += "-"
            self._names[reference] = f"#/$defs/{name}"
            without = {word: value for word, value in target.items() if word not in ("$defs", "definitions")}
            self._copies[name] = self._copy(without, is_part=True)
        return self._names[reference]

    def _target(self, reference: Any) -> Schema | None:
        found = target_of(self._root, reference)
        return found if isinstance(found, Mapping) else None

    def _list(self, schema: Any, listed: _Listed, seen: set[str]) -> None:
        """Note the properties that a schema and all that describe the same value list, in order."""
        if not isinstance(schema, Mapping) or REFUSAL in schema:
            return
        for word, value in schema.items():
            if word == "properties" and isinstance(value, Mapping):
                listed.properties |= dict.fromkeys(name for name, one in value.items() if one is not False)
            elif word == "patternProperties" and isinstance(value, Mapping):
                listed.patterns |= dict.fromkeys(value)
            elif word == "additionalProperties":
                listed.is_open |= value is not False
            elif word in listed.branches and isinstance(value, list):
                for one in value:
                    self._list(one, listed, seen)
            elif word == "$ref" and isinstance(value, str) and value not in seen:
                seen.add(value)
                self._list(self._target(value), listed, seen)
        required = schema.get("required")
        if isinstance(required, list) and (listed.properties or listed.patterns):
            listed.properties |= dict.fromkeys(name for name in required if isinstance(name, str))


class _Listed:
    """What the schemas of one object list. `is_open`: one of them allows further keys. `branches`: words to follow."""

    def __init__(self, branches: Collection[str]) -> None:
        self.branches = branches
        self.properties: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.is_open = False
