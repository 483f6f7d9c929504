"""Converts an exported program to a graph of ONNX with torch's exporter.

The graph has no weights: ONNX Runtime gets the program's own tensors, and the graph is kept for the next start. torch's
loader is not used; the exporter traces our own calls. A program is left alone if its errors depend on values that ONNX
treats otherwise.
"""

from __future__ import annotations

import hashlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.engine.onnx.session import OnnxProgram
from app.hardware.imports import only_errors_logged
from app.models.program import ATEN, AUTOCAST, SET_GRAD, SKIPPED_OPERATORS, Program
from app.models.program_graph import Graph, Node, Ref, refs
from app.weights.cache_file import FileUnusable, atomic_write, log_not_kept, open_trusted
from app.weights.program import CONVERTERS, ProgramCheckpoint, library_version

log = logging.getLogger(__name__)

_FORMAT = 3  # raise it when older graphs would be wrong
_FOLDER = "programs"
_ATTENTION_OPSET = 23  # the first with an operator for attention: a ViT of one picture takes a tenth less time by it
_MAX_BYTES = 64 * 2**20  # of a kept graph, which has no weights
_EMBEDDED_BYTES = 2**20  # of constants that the exporter made
_NO_FILE = "weights"  # the file that the graph names for its weights; they are given instead

# Arguments of operators that index a table, by the operator's name.
_INDICES: Mapping[str, tuple[int, ...]] = {
    "embedding": (1,),
    "embedding_bag": (1, 2),
    "_embedding_bag": (1, 2),
    "_embedding_bag_forward_only": (1, 2),
    "gather": (2,),
    "index_select": (2,),
    "index": (1,),
}
# Results without a negative value if the operands have none.
_KEEP_SIGN = frozenset(
    "view reshape _unsafe_view select slice squeeze unsqueeze split split_with_sizes unbind chunk permute transpose t"
    " expand expand_as clone contiguous flatten unflatten cat stack to _to_copy alias detach repeat lift_fresh_copy"
    " lift_fresh add mul narrow movedim arange".split()
)
# Operators that refuse values, or whose results are random: ONNX has no such errors.
_VALUE_ERRORS = (
    "scatter", "index_put", "index_add", "index_fill", "index_copy", "index_reduce", "take", "put", "multinomial", "bincount",
    "one_hot", "item", "_local_scalar_dense", "nonzero", "masked_", "unique", "repeat_interleave", "_assert", "rand",
    "bernoulli", "normal", "exponential", "poisson", "sym_constrain", "linalg_inv", "linalg_solve", "cholesky", "histc",
)  # fmt: skip
_DIVISIONS = frozenset(("div", "floor_divide", "remainder", "fmod"))
_INTEGERS = frozenset(("uint8", "int8", "int16", "int32", "int64"))

_last: dict[str, bytes] = {}  # without a folder: the last graph, made for the measurement and used for serving


class NotConvertible(Exception):
    """Raised with the reason, a clause, if a program is not converted."""


def convert(
    checkpoint: ProgramCheckpoint,
    states: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    folder: Path | None,
) -> OnnxProgram:
    """Return the program in ONNX Runtime, for `states` by their names. Raises `NotConvertible`.

    `example` are inputs with at least two rows, if the program takes them. A graph of an earlier start is read from
    `folder`.
    """
    missing = [name for name in CONVERTERS if not library_version(name)]
    if missing:
        raise NotConvertible(f"{missing[0]} is not installed")
    if any(tensor.dtype == torch.bfloat16 for tensor in states.values()):
        raise NotConvertible("its weights are BF16")
    indices = index_inputs(checkpoint, states)
    exact = Program(checkpoint.graph, states, {})
    key = _key(checkpoint)
    kept = None if folder is None else folder / _FOLDER / f"{key}.onnx"
    model = _last.get(key) if kept is None else _read(kept)
    if model is None:
        model = _exported(checkpoint, exact, states, example)
        _last.clear()
        if kept is None:
            _last[key] = model
        else:
            _keep(kept, model)
    asked = set(checkpoint.output_indices)
    outputs = [_output_name(index) if index in asked else "" for index in range(len(checkpoint.graph.outputs))]
    inputs = {spec.name: _input_name(at) for at, spec in enumerate(checkpoint.signature.inputs)}
    given = {_state_name(at): tensor.contiguous() for at, tensor in enumerate(states.values())}
    return OnnxProgram(model, outputs, {name: given[name] for name in _weights(model)}, exact, indices, inputs)


def _weights(model: bytes) -> list[str]:
    import onnx

    graph = onnx.load_model_from_string(model).graph
    return [tensor.name for tensor in graph.initializer if tensor.data_location == tensor.EXTERNAL]


def _key(checkpoint: ProgramCheckpoint) -> str:
    versions = [str(_FORMAT), torch.__version__, *map(library_version, CONVERTERS)]
    return hashlib.sha256(" ".join([checkpoint.fingerprint, *versions]).encode()).hexdigest()[:32]


def _read(file: Path) -> bytes | None:
    try:
        with os.fdopen(open_trusted(file), "rb") as stream:
            return stream.read(_MAX_BYTES)
    except (OSError, FileUnusable):
        return None


def _keep(file: Path, model: bytes) -> None:
    if len(model) > _MAX_BYTES:
        return
    try:
        with atomic_write(file) as stream:
            stream.write(model)
    except OSError as error:
        log_not_kept(file, "the program's ONNX graph", error)


# ---- what ONNX computes otherwise ------------------------------------------------------------------------------------


def index_inputs(checkpoint: ProgramCheckpoint, states: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Return the inputs from which a table is indexed. Raises `NotConvertible` if ONNX would hide a client's error."""
    graph, found = checkpoint.graph, dict[str, None]()
    for inner in _graphs(graph):
        for node in inner.nodes:
            _check_values(node, inner)
            if inner is not graph and _name(node) in _INDICES:
                raise NotConvertible("a table is indexed in a part with settings of its own")
    made = {name: node for node in graph.nodes for name in _made(node.outputs)}
    inputs = {spec.name for spec in checkpoint.signature.inputs}
    waiting = [ref.name for node in graph.nodes for ref in _index_operands(node)]
    seen = set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in inputs:
            found[name] = None
        elif name in states:
            if states[name].numel() and float(states[name].min()) < 0:
                raise NotConvertible(f"the indices {name!r} count from the end")
        else:
            waiting += _operands_with_sign(name, made.get(name))
    return tuple(found)


def _operands_with_sign(name: str, node: Node | None) -> list[str]:
    """Return what must not be negative so that a value is not. Raises `NotConvertible` if that is not known."""
    arguments = () if node is None else (*node.arguments, *node.keywords.values())
    is_getitem = node is not None and node.target == "_operator.getitem"
    negative = any(isinstance(item, int | float) and item < 0 for item in arguments)
    keeps = node is not None and (is_getitem or _name(node) in _KEEP_SIGN)
    if not keeps or (negative and node is not None and _name(node) in ("add", "mul", "arange")):
        raise NotConvertible(f"the indices {name!r} are computed")
    return [ref.name for ref in refs(list(arguments))]


def _graphs(graph: Graph) -> Iterator[Graph]:
    yield graph
    for node in graph.nodes:
        for item in (*node.arguments, *node.keywords.values()):
            if isinstance(item, Graph):
                yield from _graphs(item)


def _name(node: Node) -> str:
    return node.target.removeprefix(ATEN).partition(".")[0]


def _check_values(node: Node, graph: Graph) -> None:
    if node.target in (*SKIPPED_OPERATORS, SET_GRAD, AUTOCAST) or not node.target.startswith(ATEN):
        return
    name = _name(node)
    makes_integers = any(one in graph.values and graph.values[one].dtype in _INTEGERS for one in _made(node.outputs))
    if name.startswith(_VALUE_ERRORS) or (name in _DIVISIONS and makes_integers):
        raise NotConvertible(f"the errors of {name} depend on values")
    if name.endswith("_") and makes_integers:
        raise NotConvertible(f"{name} changes integers in place")


def _index_operands(node: Node) -> Iterator[Ref]:
    for at in _INDICES.get(_name(node), ()):
        if at < len(node.arguments):
            yield from refs(node.arguments[at])


def _made(outputs: Sequence[Any]) -> Iterator[str]:
    for output in outputs:
        yield from (_made(output) if isinstance(output, list) else () if output is None else (output,))


# ---- the exporter ----------------------------------------------------------------------------------------------------


def _input_name(at: int) -> str:
    return f"input_{at}"


def _output_name(at: int) -> str:
    return f"output_{at}"


def _state_name(at: int) -> str:
    return f"state_{at}"


class _Traced(nn.Module):
    """The program as a module whose first inputs are its states: the exporter computes nothing with their values."""

    def __init__(self, program: Program, names: Sequence[str], outputs: Sequence[int]) -> None:
        super().__init__()
        self._program, self._names, self._outputs = program, tuple(names), tuple(outputs)

    def forward(self, *given: Tensor) -> tuple[Tensor, ...]:
        results = self._program.trace(dict(zip(self._names, given, strict=True)))
        return tuple(results[index] for index in self._outputs)


def _exported(
    checkpoint: ProgramCheckpoint, program: Program, states: Mapping[str, Tensor], example: Mapping[str, Tensor]
) -> bytes:
    specs = checkpoint.signature.inputs
    module = _Traced(program, [*states, *(spec.name for spec in specs)], checkpoint.output_indices)
    free = tuple(
        {at: torch.export.Dim.DYNAMIC for at, size in enumerate(spec.shape) if size < 0} for spec in specs
    )  # the first is the batch
    arguments = (*states.values(), *(example[spec.name] for spec in specs))
    names = [_state_name(at) for at in range(len(states))] + [_input_name(at) for at in range(len(specs))]
    try:
        with warnings.catch_warnings(), torch.no_grad(), only_errors_logged("torch.onnx", "onnxscript", "onnx_ir"):
            warnings.simplefilter("ignore")
            traced = torch.export.export(
                module.eval(), arguments, dynamic_shapes={"given": (*(None for _ in states), *free)}
            )
            exported = torch.onnx.export(
                traced,
                dynamo=True,
                input_names=names,
                output_names=[_output_name(at) for at in checkpoint.output_indices],
                opset_version=_ATTENTION_OPSET if _has_plain_attention(checkpoint.graph) else None,
                verbose=False,
            )
        return _with_states(exported, list(states.values()))
    except NotConvertible:
        raise
    except (
        RuntimeError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ImportError,
        NotImplementedError,
    ) as error:
        # The exporter's own text is about its steps; the reason is what it was raised from.
        said = (str(error.__cause__ or error).splitlines() or [""])[0][:200]
        raise NotConvertible(f"torch's exporter refuses it: {said or type(error).__name__}") from error


def _has_plain_attention(graph: Graph) -> bool:
    """Return whether there is attention, all without masks: a row that is masked everywhere may differ from torch's."""
    nodes = [node for inner in _graphs(graph) for node in inner.nodes if _name(node) == "scaled_dot_product_attention"]
    masks = [mask for node in nodes for mask in (*node.arguments[3:4], node.keywords.get("attn_mask"))]
    return bool(masks) and all(mask is None for mask in masks)


def _with_states(exported: Any, states: Sequence[Tensor]) -> bytes:
    """Return the graph's bytes, in which states are not inputs but weights, in a file that does not exist."""
    import onnx_ir as ir

    _join_lookups(exported.model)
    graph = exported.model.graph
    for name, tensor in graph.initializers.items():
        if tensor.const_value is None or tensor.const_value.nbytes > _EMBEDDED_BYTES:
            raise NotConvertible(f"the exporter makes {name}, which is large")
    inputs = {value.name: value for value in graph.inputs}
    for at, state in enumerate(states):
        value = inputs[_state_name(at)]
        graph.inputs.remove(value)
        if value.uses():
            value.const_value = ir.ExternalTensor(
                _NO_FILE, 0, state.nbytes, value.dtype, shape=ir.Shape(state.shape), name=value.name
            )
            graph.register_initializer(value)
    content: bytes = ir.to_proto(exported.model).SerializeToString()
    return content


def _join_lookups(model: Any) -> None:
    """Read tables that are stacked by ids of the shape [rows, 1]: of small programs each call of an operator counts."""
    from onnxscript.rewriter import pattern

    def found(op: Any, table: Any, ids: Any, column: Any, axes: Any) -> Any:
        return op.Unsqueeze(op.Gather(table, op.Gather(ids, column, axis=1), axis=0), axes)

    def joined(op: Any, table: Any, ids: Any, column: Any, axes: Any) -> Any:
        at = int(column.const_value.numpy())
        ends = [op.Constant(value_ints=[end]) for end in (at, at + 1, 1)]
        return op.Gather(table, op.Slice(ids, *ends), axis=0)

    def is_column(_: Any, table: Any, ids: Any, column: Any, axes: Any) -> bool:
        if any(value.const_value is None for value in (column, axes)) or ids.shape is None or table.shape is None:
            return False
        at, axis = column.const_value.numpy(), axes.const_value.numpy()
        return bool(at.ndim == 0 and at >= 0 and axis.tolist() == [1] and len(ids.shape) == len(table.shape) == 2)

    pattern.RewriteRuleSet([pattern.RewriteRule(found, joined, is_column)]).apply_to_model(model)
