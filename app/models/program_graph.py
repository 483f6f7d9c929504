"""Reads the graph of an exported program and its output names from the JSON that `torch.export.save` writes.

It needs no torch and evaluates nothing. Targets stay names here; `models/program.py` defines which may run. Any content
that can hold code or objects is rejected by name. Follows torch/_export/serde/schema.py, major version 8.
"""

from __future__ import annotations

import ast
import json
import math
import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from app.errors import CheckpointInvalid, InvalidRequest

Shapes = Mapping[str, Sequence[int]]  # the sizes of the inputs, by their names
Range = tuple[int, int | None]

SAMPLE_SIZE = 16  # of a dimension that a client may choose, in synthetic inputs, if the program accepts it
_MAX_CONDITION = 10_000  # characters
_LINEAR = re.compile(r"(?:(\d{1,9})\*)?([A-Za-z_]\w*)(?: ([+-]) (\d{1,9}))?")
# ---- conditions ----------------------------------------------------------------------------------------------------

_Number = int | float
_BINARY: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    **{function.__name__: function for function in (min, max, abs, int, float)},
    **{f"math.{name}": getattr(math, name) for name in ("floor", "ceil", "trunc", "sqrt")},
}
_EVALUATION_ERRORS = (ArithmeticError, ValueError, TypeError)
_SIZE = re.compile(
    r"L((?:\[(?:'\w+'|\d+)\])+)\.(size|stride)\(\)\[(\d+)\]|L((?:\[(?:'\w+'|\d+)\])+)\.storage_offset\(\)"
)
_Evaluate = Callable[[Sequence[int]], Any]
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


def plain_size(text: str) -> str:
    """Return a dimension as sympy prints it (`8*s7`) for the text of its tree (`Mul(Integer(8), Symbol('s7'))`)."""
    try:
        return _printed(ast.parse(text[:_MAX_CONDITION], mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return text


def _printed(node: ast.AST) -> str:
    if isinstance(node, ast.Constant):
        return str(node.value)
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
        return ast.unparse(node)
    parts = [_printed(argument) for argument in node.args]
    name = node.func.id
    if name in ("Integer", "Symbol") and parts:
        return parts[0]
    if name == "Mul":
        return "*".join(f"({part})" if " " in part else part for part in parts)
    if name == "Add":
        # Sympy prints a number after the symbols.
        ordered = sorted(parts, key=lambda part: part.lstrip("-").isdigit())
        return " + ".join(ordered).replace("+ -", "- ")
    return f"{name}({', '.join(parts)})"


@dataclass(frozen=True, slots=True)
class Dimension:
    """A dimension of an input whose size is `factor * symbol + offset`, within its range."""

    symbol: str
    factor: int = 1
    offset: int = 0
    low: int = 0
    high: int | None = None

    def value(self, size: int) -> int | None:
        """Return the symbol's value for a size; None if there is none."""
        rest = size - self.offset
        return None if rest % self.factor else rest // self.factor

    def size(self, value: int) -> int:
        return self.factor * value + self.offset

    @property
    def values(self) -> Range:
        low = -(-(self.low - self.offset) // self.factor)
        return low, None if self.high is None else (self.high - self.offset) // self.factor

    def __str__(self) -> str:
        form = f"{self.factor}*n" if self.factor > 1 else "n"
        form += f" {'-' if self.offset < 0 else '+'} {abs(self.offset)}" if self.offset else ""
        numbers = f"at least {self.low}" if self.high is None else f"in [{self.low}, {self.high}]"
        return numbers if form == "n" else f"{numbers}, of the form {form}"


def read_dimension(name: str, size: str, ranges: Mapping[str, Any]) -> Dimension:
    """Return the dimension of that text, with its or its symbol's range. Raises `CheckpointInvalid`."""
    found = _LINEAR.fullmatch(size)
    if found is None or found[1] == "0":
        raise CheckpointInvalid(
            f"Input {name!r} has a dimension of the size {size[:80]!r}, which is not supported: export with sizes that are a "
            "torch.export.Dim, or such a Dim times a number, plus or minus one."
        )
    factor, symbol = int(found[1] or 1), found[2]
    offset = int(found[4] or 0) * (-1 if found[3] == "-" else 1)
    low, high = read_range(ranges.get(symbol))
    if size in ranges:
        low, high = read_range(ranges[size])
    else:
        low, high = factor * low + offset, None if high is None else factor * high + offset
    return Dimension(symbol, factor, offset, low, high)


def read_range(limits: Any) -> Range:
    """Return the smallest and the largest value; None: there is no largest."""
    limits = limits if isinstance(limits, dict) else {}
    low, high = limits.get("min_val"), limits.get("max_val")
    return (
        low if isinstance(low, int) else 0,
        high if isinstance(high, int) and high < 2**31 else None,
    )


class Condition:
    """A condition on the sizes of the inputs, as the archive states it."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        self.inputs: list[str] = []
        self._places: list[tuple[str, str, int]] = []
        self._source, self._names = text, names
        try:
            if len(text) > _MAX_CONDITION:
                raise ValueError
            replaced = _SIZE.sub(self._place, text)
            self._tree = ast.parse(replaced, mode="eval").body
            self._result = _compiled(self._tree)
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            raise CheckpointInvalid(
                f"The program has a condition on its inputs that is not understood: {text[:200]}."
            ) from None
        self.text = re.sub(
            r"_size_(\d+)", lambda found: "{}.{}({})".format(*self._places[int(found[1])]), ast.unparse(self._tree)
        )

    def __reduce__(self) -> tuple[Any, ...]:
        """A process of an engine gets the text: functions cannot be sent."""
        return Condition, (self._source, self._names)

    def holds(self, shapes: Shapes) -> bool:
        try:
            return bool(self._result([_read_place(place, shapes) for place in self._places]))
        except _EVALUATION_ERRORS:
            return False

    def _place(self, found: re.Match[str]) -> str:
        if found[4] is not None:
            return "0"  # an input is contiguous and begins where its memory does
        keys = re.findall(r"\w+", found[1])
        name = next((one for one in ("_".join(keys), keys[-1]) if one in self._names), None)
        if name is None:
            raise ValueError("an input without a name")
        self.inputs.append(name)
        self._places.append((name, found[2], int(found[3])))
        return f"_size_{len(self._places) - 1}"


def _read_place(place: tuple[str, str, int], shapes: Shapes) -> int:
    name, kind, dimension = place
    shape = shapes[name]
    if dimension >= len(shape):
        raise ValueError("no such dimension")
    return shape[dimension] if kind == "size" else math.prod(shape[dimension + 1 :])


def _compiled(node: ast.AST) -> _Evaluate:
    """Return a function from `_size_0`, `_size_1` … to the value. Raises `ValueError` if it is no arithmetic."""
    reader = _NODES.get(type(node))
    if reader is None:
        raise ValueError("not arithmetic")
    return reader(node)


def _constant(node: Any) -> _Evaluate:
    if not isinstance(node.value, bool | int | float):
        raise ValueError("not a number")
    value = node.value
    return lambda sizes: value


def _name(node: Any) -> _Evaluate:
    if not node.id.startswith("_size_"):
        raise ValueError("not a size")
    place = int(node.id.removeprefix("_size_"))
    return lambda sizes: sizes[place]


def _binary(node: Any) -> _Evaluate:
    left, right = _compiled(node.left), _compiled(node.right)
    if isinstance(node.op, ast.Pow):
        return lambda sizes: _power(left(sizes), right(sizes))
    function = _BINARY.get(type(node.op))
    if function is None:
        raise ValueError("another operator")
    return lambda sizes: function(left(sizes), right(sizes))


def _power(base: _Number, exponent: _Number) -> _Number:
    if not -64 <= exponent <= 64:
        raise ValueError("too large")
    result: _Number = base**exponent
    return result


def _unary(node: Any) -> _Evaluate:
    operand = _compiled(node.operand)
    if isinstance(node.op, ast.Not):
        return lambda sizes: not operand(sizes)
    if isinstance(node.op, ast.USub):
        return lambda sizes: -operand(sizes)
    raise ValueError("another operator")


def _both(node: Any) -> _Evaluate:
    values = [_compiled(value) for value in node.values]
    combine = all if isinstance(node.op, ast.And) else any
    return lambda sizes: combine(value(sizes) for value in values)


def _comparison(node: Any) -> _Evaluate:
    operands = [_compiled(one) for one in (node.left, *node.comparators)]
    if not all(type(one) in _COMPARISONS for one in node.ops):
        raise ValueError("another comparison")
    functions = [_COMPARISONS[type(one)] for one in node.ops]

    def holds(sizes: Sequence[int]) -> bool:
        values = [operand(sizes) for operand in operands]
        return all(function(values[at], values[at + 1]) for at, function in enumerate(functions))

    return holds


def _choice(node: Any) -> _Evaluate:
    test, body, other = (_compiled(one) for one in (node.test, node.body, node.orelse))
    return lambda sizes: body(sizes) if test(sizes) else other(sizes)


def _call(node: Any) -> _Evaluate:
    function = _FUNCTIONS.get(ast.unparse(node.func))
    if function is None or node.keywords:
        raise ValueError("another function")
    arguments = [_compiled(one) for one in node.args]
    return lambda sizes: function(*(argument(sizes) for argument in arguments))


_NODES: Mapping[type[ast.AST], Callable[[Any], _Evaluate]] = {
    ast.Constant: _constant,
    ast.Name: _name,
    ast.BinOp: _binary,
    ast.UnaryOp: _unary,
    ast.BoolOp: _both,
    ast.Compare: _comparison,
    ast.IfExp: _choice,
    ast.Call: _call,
}


def _small_value(dimensions: Sequence[Dimension]) -> int:
    """Return a symbol's value that gives each of its dimensions at most 16 elements, or as few as the ranges allow."""
    low = max(dimension.values[0] for dimension in dimensions)
    high = min((one for dimension in dimensions if (one := dimension.values[1]) is not None), default=None)
    wanted = max(1, min((SAMPLE_SIZE - dimension.offset) // dimension.factor for dimension in dimensions))
    return max(low, wanted) if high is None else max(low, min(high, wanted))


# ---- the inputs together --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ProgramSizes:
    """What a program demands of the sizes of its inputs.

    - `dimensions`: the dimensions of each input after the batch.
    - `conditions`: the archive's conditions, as texts.
    - `examples`: the sizes of the export, by input, without the batch.
    - `min_rows`, `max_rows`: the rows of a step, None: any number.
    """

    dimensions: Mapping[str, tuple[int | Dimension, ...]]
    conditions: tuple[str, ...] = ()
    examples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    min_rows: int = 1
    max_rows: int | None = None

    def check(self, shapes: Shapes) -> None:
        """Check a request's shapes, with its own number of rows. Raises `InvalidRequest`, with input and dimension."""
        known: dict[str, tuple[int, str]] = {}
        for name, at, dimension in self._free():
            self._check_dimension(name, at, dimension, shapes[name][at], known)
        rows = min(max(self.min_rows, next(iter(shapes.values()))[0]), self.max_rows or 2**31)
        step = {name: (rows, *shape[1:]) for name, shape in shapes.items()}
        failed = next((condition for condition in self._conditions if not condition.holds(step)), None)
        if failed is not None:
            name = failed.inputs[0] if failed.inputs else next(iter(shapes))
            raise InvalidRequest(
                f"input {name!r}: the program was not exported for the shape {list(shapes[name])}; it needs {failed.text[:300]}.",
                field=name,
            )

    def _check_dimension(
        self, name: str, at: int, dimension: Dimension, size: int, known: dict[str, tuple[int, str]]
    ) -> None:
        value = dimension.value(size)
        if value is None or not dimension.low <= size <= (size if dimension.high is None else dimension.high):
            raise InvalidRequest(
                f"input {name!r}: dimension {at} must be {dimension}, for which the program was exported, not {size}.",
                field=name,
            )
        before, where = known.setdefault(dimension.symbol, (value, f"dimension {at} of input {name!r}"))
        if before != value:
            raise InvalidRequest(
                f"input {name!r}: dimension {at} must be {dimension.size(before)}, as {where} demands, not {size}.",
                field=name,
            )

    def check_batches(self) -> None:
        """Check that conditions do not depend on rows, as requests share steps. Raises `CheckpointInvalid`."""
        inner = self.samples
        counts = range(self.min_rows, min(self.min_rows + 8, (self.max_rows or 2**31) + 1))
        for condition in self._conditions:
            found = {condition.holds({name: (rows, *sizes) for name, sizes in inner.items()}) for rows in counts}
            if len(found) > 1:
                raise CheckpointInvalid(
                    f"The program accepts only some numbers of rows ({condition.text[:200]}), so requests cannot share a step."
                )

    @cached_property
    def samples(self) -> Mapping[str, tuple[int, ...]]:
        """Sizes that the program accepts, by input, without the batch: small ones, else those of its export."""
        alike: dict[str, list[Dimension]] = {}
        for _, _, dimension in self._free():
            alike.setdefault(dimension.symbol, []).append(dimension)
        values = {symbol: _small_value(dimensions) for symbol, dimensions in alike.items()}
        small = {
            name: tuple(one if isinstance(one, int) else one.size(values[one.symbol]) for one in sizes)
            for name, sizes in self.dimensions.items()
        }
        try:
            self.check({name: (self.min_rows, *sizes) for name, sizes in small.items()})
        except InvalidRequest:
            return {**small, **self.examples}
        return small

    @cached_property
    def _conditions(self) -> tuple[Condition, ...]:
        return tuple(Condition(text, tuple(self.dimensions)) for text in self.conditions)

    def _free(self) -> Iterator[tuple[str, int, Dimension]]:
        for name, sizes in self.dimensions.items():
            for at, size in enumerate(sizes, 1):
                if isinstance(size, Dimension):
                    yield name, at, size


@dataclass(frozen=True, slots=True)
class Ref:
    name: str


@dataclass(frozen=True, slots=True)
class TorchConstant:
    """A torch constant, by kind (dtype, layout, memory_format, device) and name."""

    kind: str
    name: str


@dataclass(frozen=True, slots=True)
class Node:
    """One call. `outputs` has a name per value, a list of names for a list, and None for unused values."""

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
            inputs=tuple(_argument_name(read_argument(item, depth)) for item in values["inputs"]),
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


def _argument_name(argument: Any) -> str:
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
    ((kind, content),) = value.items()
    return Ref(str(content)) if kind == "as_name" else _plain(content)


def _plain(value: Any) -> Any:
    if not isinstance(value, bool | int | float | str):
        raise ValueError(f"not a plain value: {value!r}")
    return value


def _float(value: Any) -> float:
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
    """Return the names of `count` outputs, from the archive's module_call_graph."""
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
