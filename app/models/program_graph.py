"""Reads the graph of an exported program and its output names from the JSON that `torch.export.save` writes.

It needs no torch and evaluates nothing. Targets stay names here; `models/program.py` defines which may run. Any
content that can hold code or objects is rejected by name. Follows torch/_export/serde/schema.py, major version 8.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid
from app.models.program_sizes import plain_size

SCHEMA_MAJOR = 8
# Scalar types: number in the schema -> name in torch.
DTYPES: Mapping[int, str] = {
    1: "uint8",
    2: "int8",
    3: "int16",
    4: "int32",
    5: "int64",
    6: "float16",
    7: "float32",
    8: "float64",
    12: "bool",
    13: "bfloat16",
}
MEMORY_FORMATS: Mapping[int, str] = {
    1: "contiguous_format",
    2: "channels_last",
    3: "channels_last_3d",
    4: "preserve_format",
}
LINEAR_TARGET = "torch.ops.aten.linear.default"  # arguments: x, weight and an optional bias
_KEYWORD = 2
_MAX_DEPTH = 16  # nesting of graphs and lists


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to the value of that name, which an earlier node returned or the caller passed."""

    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A torch constant, by kind (dtype, layout, memory_format, device) and name."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call.

    `outputs` has a name for each returned value, a list of names for a list, and None for a value that is not used.
    """

    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TensorMeta:
    """The known properties of a tensor: for each dimension, an integer or the text of an expression."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """A graph: names of inputs, arguments that are its outputs, and nodes in execution order."""

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, TensorMeta]
    returns_tensor: bool = False  # returns one tensor instead of a list of one


def refs(argument: Any) -> Iterator[Ref]:
    """Yield all references in an argument, including nested lists. A subgraph only reads its own arguments."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from refs(item)


def read_graph(values: Mapping[str, Any], depth: int = 0) -> Graph:
    """Parse a graph. Raises `CheckpointInvalid` for content that is not understood."""
    if depth > _MAX_DEPTH:
        raise CheckpointInvalid("The program's graphs are nested too deeply.")
    try:
        return Graph(
            inputs=tuple(_name(read_argument(item, depth)) for item in values["inputs"]),
            outputs=tuple(read_argument(item, depth) for item in values["outputs"]),
            nodes=tuple(_node(item, depth) for item in values["nodes"]),
            values={str(name): _value(name, item) for name, item in values["tensor_values"].items()},
            returns_tensor=bool(values.get("is_single_tensor_return", False)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointInvalid(f"The program's graph is damaged, or of another version: {error!r}.") from error


def read_argument(values: Mapping[str, Any], depth: int = 0) -> Any:
    """Parse an argument of a node: plain values, `Ref`, `TorchConstant`, `Graph` and lists of them."""
    ((kind, value),) = values.items()
    if kind == "as_graph":
        return read_graph(value["graph"], depth + 1)
    reader = _READERS.get(kind)
    if reader is None:
        raise CheckpointInvalid(f"The program's graph has an argument of an unsupported kind: {kind[:40]}.")
    return reader(value)


def read_size(values: Mapping[str, Any]) -> int | str:
    """Parse a dimension: its size, the name of its symbol, or a longer expression, such as `8*s7`."""
    ((kind, value),) = values.items()
    return int(value) if kind == "as_int" else plain_size(str(value["expr_str"]))


def dtype_name(number: Any) -> str:
    """Return the name of a dtype. Raises `CheckpointInvalid` for unsupported types."""
    if number not in DTYPES:
        raise CheckpointInvalid(
            f"The program has tensors of an unsupported type (number {number!r} of torch.export's schema)."
        )
    return DTYPES[number]


def _node(values: Mapping[str, Any], depth: int) -> Node:
    positional: list[Any] = []
    keywords: dict[str, Any] = {}
    for item in values["inputs"]:
        argument = read_argument(item["arg"], depth)
        if item.get("kind") == _KEYWORD:
            keywords[str(item["name"])] = argument
        else:
            positional.append(argument)
    outputs = tuple(_output(read_argument(item, depth)) for item in values["outputs"])
    return Node(str(values["target"]), tuple(positional), keywords, outputs)


def _output(argument: Any) -> Any:
    if isinstance(argument, list):
        return [_output(item) for item in argument]
    return argument.name if isinstance(argument, Ref) else None


def _name(argument: Any) -> str:
    if not isinstance(argument, Ref):
        raise ValueError(f"an input that is not a name: {argument!r}")
    return argument.name


def _value(name: str, meta: Mapping[str, Any]) -> TensorMeta:
    if meta.get("layout", 7) != 7:
        raise CheckpointInvalid(f"The program's tensor {name!r} is not a plain (strided) one.")
    return TensorMeta(dtype_name(meta["dtype"]), tuple(read_size(size) for size in meta["sizes"]))


def _ref(value: Mapping[str, Any]) -> Ref:
    return Ref(str(value["name"]))


def _number(value: Mapping[str, Any]) -> Any:
    """Parse a number that may depend on the batch size."""
    ((kind, content),) = value.items()
    return Ref(str(content)) if kind == "as_name" else _plain(content)


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"not a plain value: {value!r}")
    return value


def _float(value: Any) -> float:
    """Parse a float. JSON has no infinity, so the schema writes it as text."""
    return float(value)


def _each(reader: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda values: [reader(value) for value in values]


def _optional(value: Mapping[str, Any]) -> Ref | None:
    return _ref(value["as_tensor"]) if "as_tensor" in value else None


def _memory_format(number: int) -> TorchConstant | None:
    return TorchConstant("memory_format", MEMORY_FORMATS[number]) if number else None


_READERS: Mapping[str, Callable[[Any], Any]] = {
    "as_none": lambda value: None,
    "as_tensor": _ref,
    "as_tensors": _each(_ref),
    "as_nested_tensors": _each(_each(_ref)),
    "as_optional_tensor": _optional,
    "as_optional_tensors": _each(_optional),
    "as_int": int,
    "as_ints": _each(int),
    "as_int_lists": _each(_each(int)),
    "as_float": _float,
    "as_floats": _each(_float),
    "as_float_lists": _each(_each(_float)),
    "as_string": str,
    "as_strings": _each(str),
    "as_bool": bool,
    "as_bools": _each(bool),
    "as_sym_int": _number,
    "as_sym_ints": _each(_number),
    "as_sym_float": _number,
    "as_sym_floats": _each(_number),
    "as_sym_bool": _number,
    "as_sym_bools": _each(_number),
    "as_scalar_type": lambda number: TorchConstant("dtype", dtype_name(number)),
    "as_memory_format": _memory_format,
    "as_layout": lambda number: TorchConstant("layout", "strided"),
    # programs run on the CPU, regardless of the device of the export
    "as_device": lambda device: TorchConstant("device", "cpu"),
}


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
