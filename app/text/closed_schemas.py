"""JSON schemas as the grammar follows them: objects are closed, as in OpenAI's strict mode.

Without `additionalProperties: false` a schema allows any further keys, and a model may write them until its limit,
because a grammar cannot remember which ones it has seen. Therefore an object that lists its properties has no others,
unless the schema says `additionalProperties`. An object that lists none has any keys.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from app.text.schema_logic import REFUSAL, Schema, target_of
from app.text.schema_narrowing import IN_PLACE, MAPS_OF_SCHEMAS, SCHEMAS

_OBJECT_WORDS = frozenset({"properties", "patternProperties", "required", "minProperties", "maxProperties"})


def close_schema(schema: Any, is_open: bool = False) -> Any:
    """Return a schema whose objects are closed. What is no schema is returned unchanged.

    `is_open`: only those are closed that forbid unevaluated properties.

    Raises:
        RecursionError: The schema is nested too deeply.
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
        """Return the object schema that a reference within this document names."""
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
