"""The graph of an exported program as `torch.export.save` writes it, read from its JSON into plain values: no torch, nothing evaluated.

Targets stay names here; `models/operators.py` knows which may run. Whatever can hold code or objects is refused by name.
Written after torch/_export/serde/schema.py, major version 8.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid

SCHEMA_MAJOR = 8
# The schema's numbers for scalar types, as torch names them.
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
LINEAR = "torch.ops.aten.linear.default"  # a product of rows: x, weight, and a bias perhaps
_SYMBOL = re.compile(r"Symbol\('(\w+)'[\w=, ]*\)")  # as sympy writes one that stands alone
_KEYWORD = 2
_DEEPEST = 16  # graphs within graphs, lists within lists


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of that name, made by an earlier node or given."""

    name: str


@dataclass(frozen=True, slots=True)
class Word:
    """A constant that only torch has, by kind (dtype, layout, memory_format, device) and name."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `outputs`: a name for each thing returned, a list of names where that is a list, None where nothing asks for it."""

    target: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Value:
    """What is known of a tensor: an integer, or the text of an expression, for each dimension."""

    dtype: str
    shape: tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class Graph:
    """`inputs` are names in order, `outputs` arguments; nodes follow each other as they must."""

    inputs: tuple[str, ...]
    outputs: tuple[Any, ...]
    nodes: tuple[Node, ...]
    values: Mapping[str, Value]
    single: bool = False  # gives one tensor and not a list of one


def refs(argument: Any) -> Iterator[Ref]:
    """All that an argument reads, lists within it included. A graph within it reads only what it is given beside itself."""
    if isinstance(argument, Ref):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from refs(item)


def read_graph(values: Mapping[str, Any], depth: int = 0) -> Graph:
    """Raises `CheckpointInvalid` with what is not understood."""
    if depth > _DEEPEST:
        raise CheckpointInvalid("The program's graphs lie too deep within each other.")
    try:
        return Graph(
            inputs=tuple(_name(read_argument(item, depth)) for item in values["inputs"]),
            outputs=tuple(read_argument(item, depth) for item in values["outputs"]),
            nodes=tuple(_node(item, depth) for item in values["nodes"]),
            values={str(name): _value(name, item) for name, item in values["tensor_values"].items()},
            single=bool(values.get("is_single_tensor_return", False)),
        )
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CheckpointInvalid(f"The program's graph is damaged, or of another version: {error!r}.") from error


def read_argument(values: Mapping[str, Any], depth: int = 0) -> Any:
    """An argument of a node: plain values, `Ref`, `Word`, `Graph`, lists of them."""
    ((kind, value),) = values.items()
    if kind == "as_graph":
        return read_graph(value["graph"], depth + 1)
    reader = _READERS.get(kind)
    if reader is None:
        raise CheckpointInvalid(f"The program's graph has an argument of a kind that is not served: {kind[:40]}.")
    return reader(value)


def read_size(values: Mapping[str, Any]) -> int | str:
    """A dimension: its size, the symbol that stands for it, or a longer expression as text."""
    ((kind, value),) = values.items()
    if kind == "as_int":
        return int(value)
    text = str(value["expr_str"])
    symbol = _SYMBOL.fullmatch(text)
    return symbol[1] if symbol else text


def dtype_name(number: Any) -> str:
    """Raises `CheckpointInvalid` for types that no program here is served in."""
    if number not in DTYPES:
        raise CheckpointInvalid(
            f"The program has tensors of a type that is not served (number {number!r} of torch.export's schema)."
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
        raise ValueError(f"an input that is no name: {argument!r}")
    return argument.name


def _value(name: str, meta: Mapping[str, Any]) -> Value:
    if meta.get("layout", 7) != 7:
        raise CheckpointInvalid(f"The program's tensor {name!r} is not a plain (strided) one.")
    return Value(dtype_name(meta["dtype"]), tuple(read_size(size) for size in meta["sizes"]))


def _ref(value: Mapping[str, Any]) -> Ref:
    return Ref(str(value["name"]))


def _number(value: Mapping[str, Any]) -> Any:
    """A number that may depend on the batch."""
    ((kind, content),) = value.items()
    return Ref(str(content)) if kind == "as_name" else _plain(content)


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"not a plain value: {value!r}")
    return value


def _float(value: Any) -> float:
    """JSON has no infinity: the schema writes it as text."""
    return float(value)


def _each(reader: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    return lambda values: [reader(value) for value in values]


def _optional(value: Mapping[str, Any]) -> Ref | None:
    return _ref(value["as_tensor"]) if "as_tensor" in value else None


def _memory_format(number: int) -> Word | None:
    return Word("memory_format", MEMORY_FORMATS[number]) if number else None


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
    "as_scalar_type": lambda number: Word("dtype", dtype_name(number)),
    "as_memory_format": _memory_format,
    "as_layout": lambda number: Word("layout", "strided"),
    "as_device": lambda device: Word("device", "cpu"),  # wherever it was exported, here is where it runs
}
