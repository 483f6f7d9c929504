"""What a step of an exported program reads and multiplies at the least, worked out from its graph without torch."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator

from app.models.graph import LINEAR, Graph, Node, Ref
from app.weights.program import ProgramCheckpoint

CONVOLUTIONS = frozenset(f"torch.ops.aten.{name}.default" for name in ("conv1d", "conv2d", "conv3d", "convolution"))
_TRANSPOSED = 6  # the place of that word among a convolution's arguments
_REPEATED = re.compile(r"(\d+)\*\w+")  # as sympy writes so many places of each row


def operations_per_row(graph: Graph, free_size: int) -> float:
    """Multiply-adds of linear layers and convolutions for a row, times two; the caller's own dimensions are taken for `free_size`."""
    return sum(_operations(node, graph, free_size) for node in graph.nodes) + sum(
        operations_per_row(inner, free_size) for node in graph.nodes for inner in _within(node)
    )


def read_bytes(checkpoint: ProgramCheckpoint, precision: str) -> int:
    """Weights of linear layers and convolutions as they are held; of a table a step reads but some rows."""
    in_forms = {"fp32": 4, "bf16": 2, "int8": 1}[precision]
    weights = (node.arguments[1] for node in checkpoint.graph.nodes if node.target in CONVOLUTIONS)
    convolved = {each.name for each in weights if isinstance(each, Ref) and each.name in checkpoint.states}
    products = sum(checkpoint.states[name].num_elements for name in checkpoint.linears)
    others = sum(checkpoint.states[name].num_elements for name in convolved)
    return in_forms * products + (2 if precision == "bf16" else 4) * others


def _within(node: Node) -> Iterator[Graph]:
    return (item for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Graph))


def _operations(node: Node, graph: Graph, free_size: int) -> float:
    """Each number of the result is a sum over all but the first dimension of the weight."""
    if node.target != LINEAR and node.target not in CONVOLUTIONS:
        return 0.0
    if node.arguments[_TRANSPOSED : _TRANSPOSED + 1] == (True,):
        return 0.0  # whose sums run the other way
    weight, result = node.arguments[1], node.outputs[0]
    if not isinstance(weight, Ref) or not {weight.name, result} <= graph.values.keys():
        return 0.0
    first, *rest = graph.values[result].shape
    sums = _repeated(first) * math.prod(free_size if isinstance(size, str) else size for size in rest)
    return 2.0 * sums * math.prod(size for size in graph.values[weight.name].shape[1:] if isinstance(size, int))


def _repeated(first: int | str) -> int:
    """Rows of a result for each of the batch."""
    found = _REPEATED.fullmatch(first) if isinstance(first, str) else None
    return int(found[1]) if found else 1
