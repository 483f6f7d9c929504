"""Values of a tool's parameters that a model writes as plain text, as formats with tags have them.

A schema says what a text stands for: `5` is a text for a parameter of the type string, and a number for an integer.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

_ANY = frozenset({"any"})
_MAX_REFERENCES = 16  # from one schema to another


def parameter_types(schema: Mapping[str, Any] | None, key: str) -> frozenset[str]:
    """Return the types of JSON that a parameter may have; `any` if its schema does not say."""
    if not isinstance(schema, Mapping):
        return _ANY
    properties = schema.get("properties")
    more = schema.get("additionalProperties")
    found = properties.get(key, more) if isinstance(properties, Mapping) else more
    return _types(found, schema, _MAX_REFERENCES) if isinstance(found, Mapping) else _ANY


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth == 0:
        return _ANY
    if isinstance(reference := schema.get("$ref"), str):
        return _types(resolve(reference, root), root, depth - 1)
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return frozenset({kinds})
    if isinstance(kinds, list):
        return frozenset(kind for kind in kinds if isinstance(kind, str)) or _ANY
    for name in ("anyOf", "oneOf"):
        if isinstance(options := schema.get(name), list) and options:
            return frozenset().union(*(_types(option, root, depth - 1) for option in options))
    for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
        if (found := _types(part, root, depth - 1)) != _ANY:
            return found
    if isinstance(values := schema.get("enum"), list) and values:
        return frozenset(map(_type_of, values))
    return frozenset({_type_of(schema["const"])}) if "const" in schema else _ANY


def resolve(reference: str, root: Mapping[str, Any]) -> Any:
    """Return what a reference `#/…` within a schema means; None if there is nothing."""
    value: Any = root
    for name in reference.removeprefix("#").split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        value = value.get(name) if isinstance(value, Mapping) else None
    return value if reference.startswith("#") else None


def _type_of(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def read_value(text: str, types: frozenset[str]) -> str:
    """Return the JSON of a value that was written as plain text.

    What is none of its types becomes a string, which whoever checks the arguments sees.
    """
    bare = text.strip()
    value = _json_value(bare)
    if value is _NOTHING and types & {"object", "array", "any", "boolean", "null"} and bare[:1] in "{[TFN":
        value = _python_value(bare)
        bare = "" if value is _NOTHING else json.dumps(value, ensure_ascii=False)
    if value is not _NOTHING:
        kind = _type_of(value)
        if kind in types or (kind == "integer" and "number" in types) or ("any" in types and kind != "string"):
            return bare
        if kind == "number" and "integer" in types and isinstance(value, float) and value.is_integer():
            return str(int(value))
        if kind == "string" and "string" not in types and "any" not in types:
            return bare
    return json.dumps(text, ensure_ascii=False)


_NOTHING = object()


def _json_value(text: str) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(text, parse_constant=_not_finite)
    return _NOTHING


def _python_value(text: str) -> Any:
    """Return a value that was written as Python writes it, as some templates show values to their models."""
    with suppress(SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
        return value
    return _NOTHING


def _not_finite(name: str) -> Any:
    raise ValueError(f"{name} is no JSON")
