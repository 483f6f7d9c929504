"""Names of a program's outputs: the keys of the dictionary that the model returned, otherwise their numbers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def output_names(calls: Sequence[Mapping[str, Any]], count: int) -> list[str]:
    """Return the names of `count` outputs.

    `calls` is the archive's module_call_graph, whose first entry describes the structure of the whole result.
    """
    signature = calls[0].get("signature") if calls else None
    try:
        spec = json.loads(signature["out_spec"])[1] if signature else None
        names = [".".join(path) for path in _paths(spec)] if spec else []
    except (KeyError, TypeError, ValueError, IndexError):
        names = []
    if len(names) != count or len(set(names)) != count or not all(names):
        return ["output"] if count == 1 else [f"output_{index}" for index in range(count)]
    return names


def _paths(spec: Mapping[str, Any], before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of keys to each leaf."""
    children = spec["children_spec"]
    if spec["type"] is None:
        yield before
        return
    for key, child in zip(_keys(spec, len(children)), children, strict=True):
        yield from _paths(child, (*before, key))


def _keys(spec: Mapping[str, Any], count: int) -> list[str]:
    context = json.loads(spec["context"]) if isinstance(spec["context"], str) else None
    if isinstance(context, list) and len(context) == count and all(isinstance(key, str) for key in context):
        return context
    return [f"output_{index}" for index in range(count)]
