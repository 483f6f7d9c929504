"""Opens an ONNX file as an exported program, without torch and without reading its weights.

The first dimension of every input is the batch, free or fixed. ONNX Runtime computes the file; here its inputs, outputs
and sizes are read, its linear layers and convolutions are counted, and what could read other files or call other code is
refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.hardware.facts import Needs
from app.messages import Signature, TensorSpec
from app.models.program_graph import (
    LINEAR_TARGET,
    Dimension,
    Graph,
    Node,
    ProgramSizes,
    Ref,
    TensorMeta,
    read_dimension,
)
from app.weights.files import check_not_lfs_pointer, remedy
from app.weights.program import DATATYPES, ITEM_BYTES, ProgramCheckpoint, StoredTensor, library_version

# Domains of operators that ONNX Runtime has itself. Any other needs a library, which is not loaded.
_DOMAINS = frozenset({"", "ai.onnx", "ai.onnx.ml", "com.microsoft"})
# Types of tensors: number in onnx.proto -> name in torch.
_DTYPES: Mapping[int, str] = {
    1: "float32",
    2: "uint8",
    3: "int8",
    5: "int16",
    6: "int32",
    7: "int64",
    9: "bool",
    10: "float16",
    11: "float64",
}
_CONVOLUTION = "torch.ops.aten.convolution.default"
_LARGE_BYTES = 4096  # of a constant whose values no shape depends on
_EXTRA = "pip install 'armature-serve[onnx]'"
_BATCH = "batch"


@dataclass(frozen=True)
class OnnxCheckpoint(ProgramCheckpoint):
    """An ONNX file that can be served. Of `states` only shapes and types are known."""

    def needs(self) -> Needs:
        stored = sum(each.num_elements * ITEM_BYTES[each.dtype] for each in self.states.values())
        return replace(
            super().needs(),
            architecture="ONNX file",
            weight_bytes=stored,
            bytes_by_precision={"fp32": stored},
            engine="onnxruntime",
        )


def open_onnx(path: Path) -> OnnxCheckpoint:
    """Read and check everything except the weights' values. Raises `CheckpointInvalid` or `OSError`."""
    check_not_lfs_pointer(path)
    if not library_version("onnxruntime"):
        raise CheckpointInvalid(f"{path.name} is an ONNX file, which ONNX Runtime serves: {_EXTRA}.")
    try:
        import onnx
        from google.protobuf.message import DecodeError, EncodeError
    except ImportError as error:
        raise CheckpointInvalid(f"{path.name} cannot be read without the package onnx ({error}): {_EXTRA}.") from error
    try:
        model = onnx.load_model(path, load_external_data=False)
    except (DecodeError, ValueError) as error:
        raise CheckpointInvalid(f"{path.name} is not an ONNX file: {error}. {remedy(path)}") from error
    _check_operators(path, model)
    _check_external_files(path, model)
    for tensor in model.graph.initializer:  # shapes of layers do not depend on values of weights
        if len(tensor.raw_data) > _LARGE_BYTES:
            tensor.ClearField("raw_data")
    try:
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
    except (onnx.shape_inference.InferenceError, DecodeError, EncodeError, ValueError) as error:
        raise CheckpointInvalid(f"{path.name}: the graph is damaged: {str(error)[:300]}") from error
    return _validated(path, model.graph)


# ---- safety ----------------------------------------------------------------------------------------------------------


def _nodes(graph: Any) -> Iterator[Any]:
    """Yield the nodes of a graph or function, with those of the graphs within it."""
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                yield from _nodes(inner)


def _check_operators(path: Path, model: Any) -> None:
    own = {(function.domain, function.name) for function in model.functions}
    for graph in (model.graph, *model.functions):
        for node in _nodes(graph):
            if node.domain not in _DOMAINS and (node.domain, node.op_type) not in own:
                raise CheckpointInvalid(
                    f"{path.name} calls {node.domain[:60]}.{node.op_type[:60]}, an operator of another library, which is"
                    " not loaded: export the model with ONNX's own operators."
                )


def _tensors(graph: Any) -> Iterator[Any]:
    yield from getattr(graph, "initializer", ())
    for sparse in getattr(graph, "sparse_initializer", ()):
        yield from (sparse.values, sparse.indices)
    for node in graph.node:
        for attribute in node.attribute:
            yield from (attribute.t, *attribute.tensors)
            for inner in (attribute.g, *attribute.graphs):
                yield from _tensors(inner)


def _check_external_files(path: Path, model: Any) -> None:
    """Refuse weights in files that are outside of the model's directory, or too short."""
    folder = path.parent.resolve()
    for graph in (model.graph, *model.functions):
        for tensor in _tensors(graph):
            if tensor.data_location != tensor.EXTERNAL:
                continue
            entry = {item.key: item.value for item in tensor.external_data}
            file = (folder / entry.get("location", "")).resolve()
            if not file.is_relative_to(folder) or not file.is_file():
                raise CheckpointInvalid(
                    f"{path.name}: the weights of {tensor.name[:80]!r} are in {entry.get('location', '')[:120]!r}, which is no"
                    " file of the model's directory."
                )
            end = _whole(path, entry.get("offset", "0")) + _whole(path, entry.get("length", "0"))
            if end > file.stat().st_size:
                raise CheckpointInvalid(f"{path.name}: {file.name} is too short for {tensor.name[:80]!r}.")


def _whole(path: Path, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise CheckpointInvalid(f"{path.name}: a place of external weights is damaged: {text[:40]!r}.")
    return int(text)


# ---- the graph -------------------------------------------------------------------------------------------------------


def _validated(path: Path, graph: Any) -> OnnxCheckpoint:
    weights = {tensor.name: tensor for tensor in graph.initializer}
    inputs = {value.name: _meta(value) for value in graph.input if value.name not in weights}
    values = {value.name: meta for value in graph.value_info if (meta := _meta(value)) is not None}
    outputs = {value.name: _meta(value) for value in graph.output}
    for name, meta in inputs.items():
        if meta is None:
            raise CheckpointInvalid(
                f"{path.name}: the input {name[:80]!r} is no tensor of a supported type (booleans, signed integers, UINT8 and"
                " floats up to 64 bits) with a known number of dimensions."
            )
    known = {name: meta for name, meta in inputs.items() if meta is not None}
    batch, rows = _batch(path, known)
    served = {
        index: (name, meta)
        for index, (name, meta) in enumerate(outputs.items())
        if meta is not None
        and meta.shape
        and (isinstance(meta.shape[0], str) if rows is None else meta.shape[0] == rows)
    }
    if not served:
        raise CheckpointInvalid(f"{path.name}: no output of the model has a row for each row of the batch.")
    forms = {name: _dimensions(name, meta.shape[1:]) for name, meta in known.items()}
    for name, form in forms.items():
        if any(isinstance(one, Dimension) and one.symbol == batch for one in form):
            raise CheckpointInvalid(
                f"Input {name!r} has a second dimension that is as large as the batch, so requests cannot share one."
            )
    sizes = ProgramSizes(forms, min_rows=rows or 1, max_rows=rows)
    states = {name: stored for name, tensor in weights.items() if (stored := _stored(tensor)) is not None}
    metas = {**values, **known, **{name: meta for name, meta in outputs.items() if meta is not None}}
    metas |= {name: TensorMeta(stored.dtype, stored.shape) for name, stored in states.items()}
    nodes = tuple(node for each in _nodes(graph) if (node := _product(each, metas, states)) is not None)
    return OnnxCheckpoint(
        path,
        Graph(tuple(known), tuple(Ref(name) for name in outputs), nodes, metas),
        Signature(
            tuple(_spec(name, meta.shape, meta.dtype, sizes.samples[name]) for name, meta in known.items()),
            tuple(_spec(name, meta.shape, meta.dtype) for name, meta in served.values()),
        ),
        tuple(served),
        states,
        sizes,
    )


def _meta(value: Any) -> TensorMeta | None:
    """Return a tensor's type and shape; None if it is another thing, or of an unknown rank."""
    kind = value.type.tensor_type
    if not value.type.HasField("tensor_type") or kind.elem_type not in _DTYPES or not kind.HasField("shape"):
        return None
    shape = tuple(
        dim.dim_value if dim.HasField("dim_value") else dim.dim_param or f"{value.name}_{at}"
        for at, dim in enumerate(kind.shape.dim)
    )
    return TensorMeta(_DTYPES[kind.elem_type], shape)


def _batch(path: Path, inputs: Mapping[str, TensorMeta]) -> tuple[str, int | None]:
    """Return the name of the batch's free size, and its number if it is fixed."""
    if not inputs:
        raise CheckpointInvalid(f"{path.name}: the model takes no input.")
    firsts = {name: (*meta.shape, None)[0] for name, meta in inputs.items()}
    first = next(iter(firsts.values()))
    if first in (None, 0) or len(set(firsts.values())) != 1:
        sizes = ", ".join(f"{name} {'none' if size is None else size}" for name, size in firsts.items())
        raise CheckpointInvalid(
            f"{path.name}: the inputs' first dimensions are not the same batch size: {sizes[:200]}. Export with one free first"
            " dimension of all inputs."
        )
    return (first, None) if isinstance(first, str) else (_BATCH, first)


def _dimensions(name: str, shape: Sequence[int | str]) -> tuple[int | Dimension, ...]:
    found: list[int | Dimension] = []
    for at, size in enumerate(shape, 1):
        if isinstance(size, int):
            found.append(size)
            continue
        try:
            found.append(replace(read_dimension(name, size, {}), low=1))
        except CheckpointInvalid:  # a name that is no formula, such as `width / 2`
            found.append(Dimension(f"{name}_{at}", low=1))
    return tuple(found)


def _stored(tensor: Any) -> StoredTensor | None:
    shape = tuple(tensor.dims)
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    dtype = _DTYPES.get(tensor.data_type)
    return None if dtype is None else StoredTensor(tensor.name, dtype, shape, tuple(reversed(strides)), 0)


def _spec(name: str, shape: Sequence[int | str], dtype: str, sample: tuple[int, ...] = ()) -> TensorSpec:
    free = tuple(size if isinstance(size, int) else -1 for size in shape[1:])
    return TensorSpec(name, DATATYPES[dtype], (-1, *free), sample)


def _product(node: Any, metas: dict[str, TensorMeta], states: Mapping[str, StoredTensor]) -> Node | None:
    """Return a linear layer or convolution as a call of torch's operator, by which operations are counted."""
    if node.op_type not in ("Conv", "MatMul", "Gemm") or len(node.input) < 2 or node.input[1] not in states:
        return None
    weight, out = node.input[1], node.output[0]
    if node.op_type == "Conv":
        return Node(_CONVOLUTION, (Ref(node.input[0]), Ref(weight)), {}, (out,))
    shape = states[weight].shape
    transposed = any(attribute.name == "transB" and attribute.i for attribute in node.attribute)
    if len(shape) == 2 and not transposed:  # torch's order is [out, in]
        metas[weight] = TensorMeta(states[weight].dtype, shape[::-1])
    return Node(LINEAR_TARGET, (Ref(node.input[0]), Ref(weight)), {}, (out,)) if len(shape) == 2 else None
