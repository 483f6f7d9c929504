"""Lower bounds for a step of an exported program: operations and bytes read, computed from its graph without torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.models.graph import LINEAR, Graph, Node, Ref
from app.weights.program import ProgramCheckpoint

CONVOLUTIONS = frozenset(f"torch.ops.aten.{name}.default" for name in ("conv1d", "conv2d", "conv3d", "convolution"))
_TRANSPOSED = 6  # position of `transposed` among a convolution's arguments


def operations_per_row(checkpoint: ProgramCheckpoint, free_size: int) -> float:
    """Return the operations of linear layers and convolutions per row: twice their multiply-adds.

    Dynamic dimensions other than the batch are taken as `free_size`.
    """
    first = checkpoint.graph.values[checkpoint.signature.inputs[0].name].shape[0]
    return _of_graph(checkpoint.graph, Sizes(first, free_size))


def read_bytes(checkpoint: ProgramCheckpoint, precision: str) -> int:
    """Return the bytes of the weights of linear layers and convolutions as they are held.

    Embedding tables are left out, since a step reads only some of their rows.
    """
    in_forms = {"fp32": 4, "bf16": 2, "int8": 1}[precision]
    weights = (node.arguments[1] for node in checkpoint.graph.nodes if node.target in CONVOLUTIONS)
    convolved = {each.name for each in weights if isinstance(each, Ref) and each.name in checkpoint.states}
    products = sum(checkpoint.states[name].num_elements for name in checkpoint.linears)
    others = sum(checkpoint.states[name].num_elements for name in convolved)
    return in_forms * products + (2 if precision == "bf16" else 4) * others


@dataclass(frozen=True, slots=True)
class Sizes:
    """Values for the dimensions of the graph's tensors, for one row of the batch."""

    batch: int | str
    free: int

    def product(self, shape: Sequence[int | str]) -> int:
        """Return the number of elements of a shape."""
        return math.prod(map(self._of, shape))

    def _of(self, size: int | str) -> int:
        """Return the value of a number, a symbol or a product of them; other expressions count as a free dimension."""
        if isinstance(size, int):
            return size
        return math.prod(int(part) if part.isdecimal() else 1 if part == self.batch else self.free for part in size.split("*"))


def _of_graph(graph: Graph, sizes: Sizes) -> float:
    inner = sum(_of_graph(each, sizes) for node in graph.nodes for each in _within(node))
    return inner + sum(_operations(node, graph, sizes) for node in graph.nodes)


def _within(node: Node) -> Iterator[Graph]:
    return (item for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Graph))


def _operations(node: Node, graph: Graph, sizes: Sizes) -> float:
    """Return the operations of a node: each output element sums over all but the weight's first dimension."""
    if node.target != LINEAR and node.target not in CONVOLUTIONS:
        return 0.0
    if node.arguments[_TRANSPOSED : _TRANSPOSED + 1] == (True,):
        return 0.0  # a transposed convolution sums over other dimensions
    weight, result = node.arguments[1], node.outputs[0]
    if not isinstance(weight, Ref) or not {weight.name, result} <= graph.values.keys():
        return 0.0
    return 2.0 * sizes.product(graph.values[result].shape) * sizes.product(graph.values[weight.name].shape[1:])
