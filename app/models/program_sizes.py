"""Sizes for which a program was exported: what its archive says of the dimensions of its inputs.

Exporting decides branches by sizes, so a program that is run with other sizes may give a wrong answer without an error.
An archive states the form of each dimension (`s7`, `8*s7`, `s7 + 1`), the range of each symbol, and conditions
(`guards_code`) in Python's syntax. Their syntax trees are interpreted here with integers alone; nothing is executed.
Torch is not needed.
"""

from __future__ import annotations

import ast
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
        """Return the size for a value of the symbol."""
        return self.factor * value + self.offset

    @property
    def values(self) -> Range:
        """The range of the symbol's values."""
        low = -(-(self.low - self.offset) // self.factor)
        return low, None if self.high is None else (self.high - self.offset) // self.factor

    def __str__(self) -> str:
        form = f"{self.factor}*n" if self.factor > 1 else "n"
        form += f" {'-' if self.offset < 0 else '+'} {abs(self.offset)}" if self.offset else ""
        numbers = f"at least {self.low}" if self.high is None else f"in [{self.low}, {self.high}]"
        return numbers if form == "n" else f"{numbers}, of the form {form}"


def read_dimension(name: str, size: str, ranges: Mapping[str, Any]) -> Dimension:
    """Return the dimension of that text, with its range, else with that of its symbol.

    Raises `CheckpointInvalid` for any other form.
    """
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


class Condition:
    """A condition on the sizes of the inputs, as the archive states it."""

    def __init__(self, text: str, names: Sequence[str]) -> None:
        """Parse it. Raises `CheckpointInvalid` for what is not understood."""
        self.inputs: list[str] = []
        self._places: list[tuple[str, str, int]] = []
        self._names = names
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

    def holds(self, shapes: Shapes) -> bool:
        """Return True if sizes meet it."""
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


_Evaluate = Callable[[Sequence[int]], Any]


def _compiled(node: ast.AST) -> _Evaluate:
    """Return a function from the values of `_size_0`, `_size_1` … to the expression's value.

    Raises `ValueError` for a node that is not arithmetic.
    """
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

    - `dimensions`: the dimensions of each input after the batch, which is the first.
    - `conditions`: the archive's conditions, as texts.
    - `examples`: the sizes with which the program was exported, by input, without the batch.
    - `min_rows`, `max_rows`: the rows of a step, None: any number.
    """

    dimensions: Mapping[str, tuple[int | Dimension, ...]]
    conditions: tuple[str, ...] = ()
    examples: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    min_rows: int = 1
    max_rows: int | None = None

    def check(self, shapes: Shapes) -> None:
        """Check the shapes of a request's inputs, of which the first dimension is its own number of rows.

        Raises:
            InvalidRequest: The program was not exported for them; the message names the input and the dimension.
        """
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
        """Check that the conditions do not depend on the number of rows, since requests share steps.

        Raises:
            CheckpointInvalid: They do.
        """
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
        """Yield the input, the place and the form of each dimension that a client may choose."""
        for name, sizes in self.dimensions.items():
            for at, size in enumerate(sizes, 1):
                if isinstance(size, Dimension):
                    yield name, at, size
