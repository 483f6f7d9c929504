"""JSON schemas as the grammar follows them: objects are closed, as in OpenAI's strict mode.

Without `additionalProperties: false` a schema allows any further keys, and a model may write them until its limit,
because a grammar cannot remember which ones it has seen. Therefore an object that lists its properties has no others,
unless the schema says `additionalProperties`. An object that lists none has any keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_MAPS_OF_SCHEMAS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
_IN_PLACE = ("allOf", "anyOf", "oneOf")  # their schemas describe the same value
_SCHEMAS = frozenset(
    {"items", "prefixItems", "additionalItems", "additionalProperties", "contains", "if", "then", "else", "not"}
)
_OBJECT_WORDS = frozenset({"properties", "patternProperties", "required", "minProperties", "maxProperties"})
# The formats that the library enforces. Any other is an annotation, as the specification says.
_FORMATS = frozenset({"date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"})
# Python's pydantic describes a Decimal with a look-ahead, which no grammar follows. The second means the same.
_PATTERNS = {r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$": r"^[+-]?(\d+\.?\d*|\.\d+)$"}


def close_schema(schema: Any) -> Any:
    """Return a schema whose objects are closed. What is no schema is returned unchanged.

    Raises:
        RecursionError: The schema is nested too deeply.
    """
    return _Closing(schema).result() if isinstance(schema, Mapping) else schema


class _Closing:
    """One schema while its objects are closed.

    Schemas that describe one object together (`allOf`, a `$ref` beside other keywords) are closed together. A
    definition that is used in such a place is copied without being closed.
    """

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._copies: dict[str, Any] = {}  # open definitions by name
        self._names: dict[str, str] = {}  # their names by reference

    def result(self) -> dict[str, Any]:
        done: dict[str, Any] = self._whole(self._root)
        return done | {"$defs": {**done.get("$defs", {}), **self._copies}} if self._copies else done

    def _whole(self, schema: Any) -> Any:
        """Return a schema that describes a value alone."""
        if not isinstance(schema, Mapping):
            return schema
        in_place = [word for word in (*_IN_PLACE, "$ref") if word in schema]
        is_union = in_place in (["anyOf"], ["oneOf"]) and not _OBJECT_WORDS & schema.keys()
        is_reference = in_place == ["$ref"] and not _OBJECT_WORDS & schema.keys()
        done = self._copy(schema, is_part=bool(in_place) and not is_union and not is_reference)
        if is_union or is_reference or "additionalProperties" in schema:
            return done
        listed = _Listed()
        self._list(schema, listed, set())
        if listed.is_open or not (listed.properties or listed.patterns or "properties" in schema):
            return done
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
            if word in _MAPS_OF_SCHEMAS and isinstance(value, Mapping):
                done[word] = {name: self._whole(one) for name, one in value.items()}
            elif word in _IN_PLACE and isinstance(value, list):
                done[word] = [self._part(one) if is_part else self._whole(one) for one in value]
            elif word in _SCHEMAS:
                done[word] = [self._whole(one) for one in value] if isinstance(value, list) else self._whole(value)
            elif word == "$ref" and is_part:
                done[word] = self._open_reference(value)
            elif word == "pattern" and isinstance(value, str):
                done[word] = _PATTERNS.get(value, value)
            elif word != "format" or value in _FORMATS:
                done[word] = value
        return done

    def _part(self, schema: Any) -> Any:
        return self._copy(schema, is_part=True) if isinstance(schema, Mapping) else schema

    def _open_reference(self, reference: Any) -> Any:
        """Return a reference to a copy of a definition that is not closed."""
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
        """Return the schema that a reference within this document names."""
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            return None
        found: Any = self._root
        for part in reference.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else None

    def _list(self, schema: Any, listed: _Listed, seen: set[str]) -> None:
        """Note the properties that a schema and all that describe the same value list, in order."""
        if not isinstance(schema, Mapping):
            return
        for word, value in schema.items():
            if word == "properties" and isinstance(value, Mapping):
                listed.properties |= dict.fromkeys(value)
            elif word == "patternProperties" and isinstance(value, Mapping):
                listed.patterns |= dict.fromkeys(value)
            elif word == "additionalProperties":
                listed.is_open |= value is not False
            elif word in _IN_PLACE and isinstance(value, list):
                for one in value:
                    self._list(one, listed, seen)
            elif word == "$ref" and isinstance(value, str) and value not in seen:
                seen.add(value)
                self._list(self._target(value), listed, seen)
        required = schema.get("required")
        if isinstance(required, list) and (listed.properties or listed.patterns):
            listed.properties |= dict.fromkeys(name for name in required if isinstance(name, str))


class _Listed:
    """What the schemas of one object list. `is_open`: one of them allows further keys."""

    def __init__(self) -> None:
        self.properties: dict[str, None] = {}
        self.patterns: dict[str, None] = {}
        self.is_open = False
