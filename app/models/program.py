"""Runs the graph of an exported program. Calls run in order, and values are released after their last use.

torch's loader resolves any name below `torch.`; here the operator of a call must be in a table or be an aten operator
that accesses no file.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from app.errors import CheckpointInvalid
from app.models.program_graph import LINEAR_TARGET, Graph, Node, Ref, TorchConstant, refs
from armature_kernels.linear.linear import LinearForm

Values = dict[str, Any]
ATEN = "torch.ops.aten."
# They read or write files or arbitrary memory.
_REFUSED = frozenset({"from_file", "data_ptr", "set_", "resize_", "resize_as_", "_resize_output_"})
# Assertions of types. They are skipped: types may differ here, where products are BF16. Assertions of values are run.
SKIPPED_OPERATORS = frozenset({f"{ATEN}_assert_tensor_metadata.default"})
SET_GRAD = "torch.ops.higher_order.wrap_with_set_grad_enabled"
AUTOCAST = "torch.ops.higher_order.wrap_with_autocast"
_ARITHMETIC = "add sub mul truediv floordiv mod neg eq ne lt le gt ge and_ or_ getitem"
_SIZES: Mapping[str, Callable[..., Any]] = {
    **{f"_operator.{name}": getattr(operator, name) for name in _ARITHMETIC.split()},
    **{f"math.{name}": getattr(math, name) for name in ("ceil", "floor", "trunc", "sqrt")},
    "torch.sym_int": int,
    "torch.sym_float": float,
    "torch.sym_max": max,
    "torch.sym_min": min,
    "torch.sym_not": operator.not_,
    "torch.sym_sum": sum,
    "torch._sym_sqrt": math.sqrt,
}


@dataclass(frozen=True, slots=True)
class Call:
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]
    outputs: tuple[Any, ...]
    last_uses: tuple[str, ...]


class PackedProduct:
    """A product of rows [..., in] to [..., out], in the form's dtype if `bf16`, otherwise that of x."""

    def __init__(self, form: LinearForm, dtype: torch.dtype, bf16: bool) -> None:
        self._form, self._dtype, self._bf16 = form, dtype, bf16

    def __call__(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1]).to(self._dtype).contiguous()
        result = self._form.multiply(rows).view(*x.shape[:-1], -1)
        return result if self._bf16 else result.to(x.dtype)


class Subgraph:
    """A graph within a graph that runs under another torch setting: gradients (never used here) or autocast."""

    def __init__(self, graph: Graph, autocast: Sequence[Any] | None) -> None:
        self._program = Program(graph, {}, {})
        self._single, self._autocast = graph.returns_tensor, autocast

    def __call__(self, *operands: Any) -> Any:
        """Return the outputs for these operands: one value if the graph returns a single tensor, else a list."""
        with nullcontext() if self._autocast is None else _autocast(*self._autocast):
            results = self._program.trace(dict(zip(self._program.inputs, operands, strict=True)))
        return results[0] if self._single else results


class Program:
    """A program that can run.

    `states` are the graph's tensors by name, `products` the packed weights of its linear layers. With `bf16`, the
    operations that torch's autocast allows run in BF16.
    """

    def __init__(
        self, graph: Graph, states: Mapping[str, Tensor], products: Mapping[str, PackedProduct], bf16: bool = False
    ) -> None:
        self.inputs, self.outputs, self._bf16 = graph.inputs, graph.outputs, bf16
        self._states = dict(states)
        keep = {*self._states, *products, *_names(graph.outputs)}
        self._calls = _with_last_uses(
            [_call(node, products) for node in graph.nodes if node.target not in SKIPPED_OPERATORS], keep
        )

    @torch.inference_mode()
    def run(self, given: Mapping[str, Any]) -> list[Any]:
        """Return the graph's outputs for inputs by name."""
        return self.trace(given)

    def trace(self, given: Mapping[str, Any]) -> list[Any]:
        """Do the same in the caller's mode, for a graph within another, and for torch's exporter."""
        with torch.autocast("cpu", torch.bfloat16) if self._bf16 else nullcontext():
            return self._run(given)

    def _run(self, given: Mapping[str, Any]) -> list[Any]:
        values: Values = {**self._states, **given}
        for call in self._calls:
            result = call.function(
                *[_resolved(argument, values) for argument in call.arguments],
                **{name: _resolved(argument, values) for name, argument in call.keywords.items()},
            )
            _bind(call.outputs, result, values)
            for name in call.last_uses:
                values.pop(name, None)
        return [_resolved(output, values) for output in self.outputs]


def _call(node: Node, products: Mapping[str, PackedProduct]) -> Call:
    arguments, keywords = (
        [_with_torch_constants(item) for item in node.arguments],
        {name: _with_torch_constants(item) for name, item in node.keywords.items()},
    )
    if node.target == LINEAR_TARGET and isinstance(node.arguments[1], Ref) and node.arguments[1].name in products:
        product = products[node.arguments[1].name]
        return Call(product, (arguments[0],), {}, node.outputs, ())
    if node.target in (SET_GRAD, AUTOCAST):
        return _subgraph(node)
    return Call(resolve_operator(node.target), tuple(arguments), keywords, node.outputs, ())


def _subgraph(node: Node) -> Call:
    arguments = [*node.arguments, *node.keywords.values()]
    at = next((index for index, item in enumerate(arguments) if isinstance(item, Graph)), None)
    if at is None:
        raise CheckpointInvalid(f"The program calls {node.target} without a graph.")
    settings = [_with_torch_constants(item) for item in arguments[:at]] if node.target == AUTOCAST else None
    graph: Graph = arguments[at]
    # Operands have other names inside the subgraph, so a packed weight would not be found there. Such a graph
    # therefore reads none.
    return Call(Subgraph(graph, settings), tuple(arguments[at + 1 :]), {}, node.outputs, ())


def _autocast(device: str, dtype: torch.dtype | None, enabled: bool, *_: Any) -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16 if enabled else dtype, enabled=enabled)


def _with_torch_constants(argument: Any) -> Any:
    if isinstance(argument, TorchConstant):
        return torch_constant(argument)
    if isinstance(argument, list):
        return [_with_torch_constants(item) for item in argument]
    return argument


def _resolved(argument: Any, values: Values) -> Any:
    if isinstance(argument, Ref):
        return values[argument.name]
    if isinstance(argument, list):
        return [_resolved(item, values) for item in argument]
    return argument


def _bind(outputs: tuple[Any, ...], result: Any, values: Values) -> None:
    if len(outputs) == 1 and not isinstance(outputs[0], list):
        if outputs[0] is not None:
            values[outputs[0]] = result[0] if isinstance(result, list | tuple) and len(result) == 1 else result
        return
    results = [result] if len(outputs) == 1 else result
    for output, one in zip(outputs, results, strict=False):
        for name, value in zip(output, one, strict=True) if isinstance(output, list) else ((output, one),):
            if name is not None:
                values[name] = value


def _with_last_uses(calls: list[Call], keep: set[str]) -> list[Call]:
    seen, result = set(keep), []
    for call in reversed(calls):
        read = {*_names([*call.arguments, *call.keywords.values()]), *_bound_names(call.outputs)}
        drops = tuple(read - seen)
        seen |= read
        result.append(Call(call.function, call.arguments, call.keywords, call.outputs, drops))
    return result[::-1]


def _names(arguments: Sequence[Any]) -> set[str]:
    return {ref.name for argument in arguments for ref in refs(argument)}


def _bound_names(outputs: tuple[Any, ...]) -> set[str]:
    return {
        name for output in outputs for name in (output if isinstance(output, list) else [output]) if name is not None
    }


def resolve_operator(target: str) -> Callable[..., Any]:
    """Return the operator of that name. Raises `CheckpointInvalid` if it is not allowed or does not exist."""
    if target in _SIZES:
        return _SIZES[target]
    name, _, overload = target.removeprefix(ATEN).partition(".")
    if not target.startswith(ATEN) or not overload.isidentifier() or name in _REFUSED or not name.isidentifier():
        raise CheckpointInvalid(
            f"The program calls {target[:120]!r}, which is not one of torch's own operators and is not allowed."
        )
    packet = getattr(torch.ops.aten, name, None)
    found = getattr(packet, overload, None)
    if not isinstance(found, torch._ops.OpOverload):
        raise CheckpointInvalid(f"The program calls {target[:120]!r}, which torch {torch.__version__} does not have.")
    return found


def torch_constant(value: TorchConstant) -> Any:
    return torch.device("cpu") if value.kind == "device" else getattr(torch, value.name)
