"""Opens an exported program (`.pt2`) and validates it completely, without torch.

The first dimension of every input is the batch, one free symbol for all; the outputs that have it too are served.
`Archive` reads the zip file. Lower bounds for a step, its operations and bytes read, are computed from the graph.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import re
import struct
import zipfile
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.hardware.facts import Needs
from app.messages import Signature, TensorSpec
from app.models.program_graph import (
    LINEAR_TARGET,
    SCHEMA_MAJOR,
    Dimension,
    Graph,
    Node,
    ProgramSizes,
    Ref,
    TensorMeta,
    dtype_name,
    output_names,
    read_argument,
    read_dimension,
    read_graph,
    read_range,
    read_size,
    refs,
)
from app.weights.files import check_not_lfs_pointer, remedy
from app.weights.program_description import ProgramDescription

_MAX_JSON_BYTES = 256 * 2**20  # limit for a graph: a thousand layers take about ten megabytes
# Exceptions of zipfile for damaged files: ValueError for names that are not text, RuntimeError for unknown versions
# and ciphers.
_DAMAGE_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile)
_HEADER_BYTES, _ALIGNMENT, _ENCRYPTED = 30, 64, 1  # of a member's data: torch aligns them
_SAVE_AGAIN = "Save it again with torch.export.save of torch 2.10 or newer"
ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}
# torch's dtype names to those of the Open Inference Protocol.
DATATYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "uint8": "UINT8",
    "int8": "INT8",
    "int16": "INT16",
    "int32": "INT32",
    "int64": "INT64",
    "float16": "FP16",
    "bfloat16": "BF16",
    "float32": "FP32",
    "float64": "FP64",
}
_SYMBOL = re.compile(r"[A-Za-z_]\w*")
_EVAL_HINT = "Was the model in eval() when it was exported?"
_EXPORT_EXAMPLE = (
    'torch.export.export(model.eval(), (example,), dynamic_shapes={"NAME": {0: torch.export.Dim("batch", min=1, max=1024)}}), '
    "with at least two rows in the example"
)
CONVOLUTIONS = frozenset(f"torch.ops.aten.{name}.default" for name in ("conv1d", "conv2d", "conv3d", "convolution"))
_TRANSPOSED_POSITION = 6  # position of `transposed` among a convolution's arguments


# Packages of the extra `onnx`: what computes a graph of ONNX, what reads it, and what torch's exporter writes it with.
CONVERTERS = ("onnxruntime", "onnx", "onnxscript")


def library_version(package: str) -> str:
    """Return the version of an installed package, without importing it; empty if it is not there."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the archive: a strided view of the elements of `member`."""

    member: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        number = 1
        for size in self.shape:
            number *= size
        return number

    @property
    def min_member_elements(self) -> int:
        if not self.num_elements:
            return 0
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1


class Archive:
    """An open archive; no member is compressed, so the sizes in the directory are the sizes of the data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE_ERRORS as error:
            raise CheckpointInvalid(
                f"{path.name} is not an archive of torch.export.save: {error}. {remedy(path)}"
            ) from error
        members = self._zip.infolist()
        roots = {member.filename.partition("/")[0] for member in members}
        if len(roots) != 1:
            raise CheckpointInvalid(f"{path.name} is not an archive of torch.export.save: it has {len(roots)} roots.")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointInvalid(f"{path.name} is compressed, which torch.export.save does not do. {_SAVE_AGAIN}.")
        self._root = roots.pop()
        self._sizes = {member.filename.removeprefix(f"{self._root}/"): member.file_size for member in members}

    def close(self) -> None:
        self._zip.close()

    def names(self, folder: str) -> list[str]:
        return sorted(name.removeprefix(folder) for name in self._sizes if name.startswith(folder))

    def has(self, name: str) -> bool:
        return name in self._sizes

    def size(self, name: str) -> int:
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """Return a member's bytes; their checksum is verified."""
        if name not in self._sizes:
            raise CheckpointInvalid(f"{self.path.name} has no {name}. {_SAVE_AGAIN}.")
        try:
            return self._zip.read(f"{self._root}/{name}")
        except _DAMAGE_ERRORS as error:
            raise CheckpointInvalid(f"{self.path.name}: {name} is damaged: {error}.") from error

    def map(self, name: str) -> memoryview:
        """Return a member's bytes, mapped from the file and private to this process; their checksum is verified."""
        if name not in self._sizes:
            return memoryview(self.read(name))  # raises
        info = self._zip.getinfo(f"{self._root}/{name}")
        with self.path.open("rb") as stream:
            stream.seek(info.header_offset)
            header = stream.read(_HEADER_BYTES)
            start = info.header_offset + _HEADER_BYTES + sum(struct.unpack("<HH", header[-4:].rjust(4, b"\0")))
            is_plain = len(header) == _HEADER_BYTES and not start % _ALIGNMENT and not info.flag_bits & _ENCRYPTED
            if not is_plain or start + info.file_size > self.path.stat().st_size:
                return memoryview(bytearray(self.read(name)))  # another program wrote the archive
            pages = mmap.mmap(stream.fileno(), 0, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        data = memoryview(pages)[start : start + info.file_size]
        if zlib.crc32(data) != info.CRC:
            raise CheckpointInvalid(f"{self.path.name}: {name} is damaged: its checksum is another.")
        return data

    def read_json(self, name: str) -> Mapping[str, Any]:
        if self._sizes.get(name, 0) > _MAX_JSON_BYTES:
            raise CheckpointInvalid(f"{self.path.name}: {name} is larger than the limit for a graph.")
        try:
            values = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(f"{self.path.name}: {name} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise CheckpointInvalid(f"{self.path.name}: {name} is not a JSON object.")
        return values

    def stored_tensors(self, kind: str, model: str) -> dict[str, StoredTensor]:
        """Return the tensors of `kind` (weights or constants) by name. Raises `CheckpointInvalid` for code."""
        folder = f"data/{kind}/"
        if self.has(f"{folder}{model}.pt"):
            raise CheckpointInvalid(
                f"{self.path.name}: its {kind} are a pickle, which can run code when read. {_SAVE_AGAIN}."
            )
        config = self.read_json(f"{folder}{model}_{kind}_config.json").get("config")
        if not isinstance(config, dict):
            raise CheckpointInvalid(f"{self.path.name}: the list of {kind} is damaged.")
        return {name: self._stored(folder, name, entry) for name, entry in config.items()}

    def _stored(self, folder: str, name: str, entry: Any) -> StoredTensor:
        if not isinstance(entry, dict) or entry.get("use_pickle") or not isinstance(entry.get("tensor_meta"), dict):
            raise CheckpointInvalid(
                f"{self.path.name}: {name} is stored as a pickle, which can run code when "
                f"read. Only plain tensors are served. {_SAVE_AGAIN}"
                ", without custom objects or tensor subclasses."
            )
        try:
            meta, member = entry["tensor_meta"], folder + str(entry["path_name"])
            sizes, strides = ([_static_size(size) for size in meta[what]] for what in ("sizes", "strides"))
            stored = StoredTensor(
                member, dtype_name(meta["dtype"]), tuple(sizes), tuple(strides), _static_size(meta["storage_offset"])
            )
            enough = stored.min_member_elements * ITEM_BYTES[stored.dtype] <= self._sizes.get(
                member, 0 if stored.min_member_elements == 0 else -1
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointInvalid(f"{self.path.name}: the description of {name} is damaged: {error!r}.") from error
        if not enough or len(sizes) != len(strides):
            raise CheckpointInvalid(f"{self.path.name}: {member} is missing, or too short for {name} of shape {sizes}.")
        return stored


def _static_size(size: Mapping[str, Any]) -> int:
    number = read_size(size)
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"the size {number!r} of a stored tensor is not a number >= 0")
    return number


@dataclass(frozen=True)
class ProgramCheckpoint:
    """An archive that can be served. `states` are the program's stored tensors, by the graph's names."""

    path: Path
    graph: Graph
    signature: Signature
    output_indices: tuple[int, ...]  # indices of the signature's outputs among the graph's outputs
    states: Mapping[str, StoredTensor]
    sizes: ProgramSizes
    description: ProgramDescription = field(default_factory=ProgramDescription)
    kind: str = field(default="program", init=False)

    @property
    def min_rows(self) -> int:
        return self.sizes.min_rows

    @property
    def max_rows(self) -> int | None:
        """The most rows of a step; None: any number."""
        return self.sizes.max_rows

    @property
    def location(self) -> Path:
        return self.path

    @property
    def directory(self) -> Path:
        return self.path.parent

    @property
    def name(self) -> str:
        return self.path.stem

    @cached_property
    def linears(self) -> Mapping[str, str | None]:
        """Weights [out, in] that only linear layers read, each with the name of its bias; held in our forms."""
        others = {ref for ref, where in _operand_uses(self.graph) if where != (LINEAR_TARGET, 1)}
        biases: dict[str, set[str | None]] = {}
        for node in self.graph.nodes:
            if node.target == LINEAR_TARGET:
                _, weight, bias = _linear_operands(
                    [_ref_name(item) for item in (*node.arguments, *node.keywords.values())]
                )
                biases.setdefault(weight or "", set()).add(bias)
        return {
            weight: next(iter(each))
            for weight, each in biases.items()
            if weight not in others and self._can_pack(weight, each)
        }

    def _can_pack(self, weight: str, biases: set[str | None]) -> bool:
        states, bias = self.states, next(iter(biases))
        floating = weight in states and states[weight].dtype in ("float32", "float16", "bfloat16")
        return floating and len(states[weight].shape) == 2 and len(biases) == 1 and (bias is None or bias in states)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the computation and of the weights' shapes, independent of the weights' values."""
        return hashlib.sha256(repr((self.graph, self.states, self.min_rows, self.max_rows)).encode()).hexdigest()

    def needs(self) -> Needs:
        """Return the program's requirements, with everything but weights of linear layers as FP32."""
        sizes = {ref: stored.num_elements for ref, stored in self.states.items()}
        linear_elements = sum(sizes[ref] for ref in self.linears)
        other_bytes = 4 * (sum(sizes.values()) - linear_elements)
        return Needs(
            kind="program",
            architecture="exported program",
            num_parameters=sum(sizes.values()),
            weight_bytes=sum(4 * size for size in sizes.values()),
            bytes_by_precision={
                "fp32": other_bytes + 4 * linear_elements,
                "bf16": other_bytes + 2 * linear_elements,
                "int8": other_bytes + linear_elements,
            },
            kv_elements_per_token=0,
            max_model_len=1,
            num_layers=0,
            hidden_size=0,
            vocab_size=0,
            stored_dtype="float32",
            rows_vary=any(size < 0 for spec in self.signature.inputs for size in spec.shape[1:]),
            operations_per_token=operations_per_row(self, 1),
            convolution_operations=operations_per_row(self, 1, CONVOLUTIONS),
            table_bytes=max(0, 4 * sum(sizes.values()) - read_bytes(self, "fp32")),
            engine="auto" if all(map(library_version, CONVERTERS)) else "native",
        )


def open_program(path: Path) -> ProgramCheckpoint:
    """Read and check everything except the weights' values. Raises `CheckpointInvalid` or `OSError`."""
    check_not_lfs_pointer(path)
    archive = Archive(path)
    try:
        model = _model_name(archive)
        values = archive.read_json(f"models/{model}.json")
        stored = archive.stored_tensors("weights", model) | archive.stored_tensors("constants", model)
    finally:
        archive.close()
    try:
        major = values["schema_version"]["major"]
        if major != SCHEMA_MAJOR:
            raise CheckpointInvalid(
                f"{path.name} has version {major} of torch.export's schema; {SCHEMA_MAJOR} is supported."
            )
        graph = read_graph(values["graph_module"]["graph"])
        return _validated(path, graph, values, stored)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CheckpointInvalid(f"{path.name}: the program's description is damaged: {error!r}.") from error


def _model_name(archive: Archive) -> str:
    if archive.names("data/aotinductor/"):
        raise CheckpointInvalid(
            f"{archive.path.name} holds compiled code, which is not run. Save it with torch.export.save."
        )
    models = [name for name in archive.names("models/") if name.endswith(".json")]
    if len(models) != 1:
        raise CheckpointInvalid(f"{archive.path.name} holds {len(models)} programs; it must hold one.")
    return models[0].removesuffix(".json")


def _validated(
    path: Path, graph: Graph, values: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> ProgramCheckpoint:
    signature = values["graph_module"]["signature"]
    user_inputs: list[str] = []
    states: dict[str, StoredTensor] = {}
    for name, spec in zip(graph.inputs, _specs(signature["input_specs"]), strict=True):
        kind, content = spec
        state = _state_name(kind, content)
        if state is None:
            user_inputs.append(name)
        elif state in stored:
            states[name] = stored[state]
        else:
            raise CheckpointInvalid(f"{path.name} has no tensor for {state!r}.")
    _check_states(graph, states)
    batch = _batch_symbol(graph, user_inputs)
    sizes = _sizes(values, graph, user_inputs, batch)
    results = _output_indices(graph, signature["output_specs"])
    named_outputs = list(
        zip(output_names(values["graph_module"].get("module_call_graph", ()), len(results)), results, strict=True)
    )
    outputs = {name: index for name, index in named_outputs if _has_batch_dimension(graph, index, batch)}
    if not outputs:
        raise CheckpointInvalid(f"{path.name}: no output of the program has a row for each row of the batch.")
    return ProgramCheckpoint(
        path,
        graph,
        Signature(
            tuple(_spec(name, graph.values[name], sizes.samples[name]) for name in user_inputs),
            tuple(_spec(name, graph.values[graph.outputs[index].name]) for name, index in outputs.items()),
        ),
        tuple(outputs.values()),
        states,
        sizes,
    )


def _check_states(graph: Graph, states: Mapping[str, StoredTensor]) -> None:
    """Refuse a program that writes into its stored tensors: one request would change the results of the next."""
    for node in graph.nodes:
        written = node.arguments[:1] if node.target.rpartition(".")[0].endswith("_") else ()
        if any(isinstance(item, Ref) and item.name in states for item in written):
            raise CheckpointInvalid(
                f"The program writes into its own tensor {written[0].name!r} ({node.target}): {_EVAL_HINT}"
            )


def _specs(specs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for spec in specs:
        ((kind, content),) = spec.items()
        yield kind, content


def _state_name(kind: str, content: Mapping[str, Any]) -> str | None:
    names = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
    if kind in names:
        return str(content[names[kind]])
    if kind == "user_input" and "as_tensor" in content["arg"]:
        return None
    raise CheckpointInvalid(f"The program has an input that is not a tensor ({kind}); export it with tensors only.")


def _batch_symbol(graph: Graph, user_inputs: list[str]) -> str:
    if not user_inputs:
        raise CheckpointInvalid("The program takes no input.")
    firsts = {name: (*graph.values[name].shape, None)[0] for name in user_inputs}
    fixed = [name for name, size in firsts.items() if not isinstance(size, str)]
    if fixed:
        raise CheckpointInvalid(
            f"The first dimension of input {fixed[0]!r} is not the free size of a batch. Export with {_EXPORT_EXAMPLE}."
        )
    symbols = set(firsts.values())
    symbol = str(firsts[user_inputs[0]])
    if len(symbols) != 1 or not _SYMBOL.fullmatch(symbol):
        sizes = ", ".join(f"{name} {size}" for name, size in firsts.items())
        raise CheckpointInvalid(
            f"The inputs' first dimensions are not the same batch size: {sizes[:200]}. Export with {_EXPORT_EXAMPLE}."
        )
    return symbol


def _sizes(values: Mapping[str, Any], graph: Graph, user_inputs: Sequence[str], batch: str) -> ProgramSizes:
    ranges = values.get("range_constraints") or {}
    low, high = read_range(ranges.get(batch))
    forms = {
        name: tuple(
            size if isinstance(size, int) else read_dimension(name, size, ranges)
            for size in graph.values[name].shape[1:]
        )
        for name in user_inputs
    }
    tied = [
        name for name, form in forms.items() if any(isinstance(one, Dimension) and one.symbol == batch for one in form)
    ]
    if tied:
        raise CheckpointInvalid(
            f"Input {tied[0]!r} has a second dimension that is as large as the batch, so requests cannot share one."
        )
    stored = values["graph_module"]["graph"]["tensor_values"]
    examples = {name: _example(stored[name]["sizes"][1:]) for name in user_inputs}
    conditions = tuple(str(one) for one in values.get("guards_code") or ())
    known = {name: sizes for name, sizes in examples.items() if sizes is not None}
    found = ProgramSizes(forms, conditions, known, max(1, low), high)
    found.check_batches()
    return found


def _example(sizes: Sequence[Mapping[str, Any]]) -> tuple[int, ...] | None:
    found = [size.get("as_int", ((size.get("as_expr") or {}).get("hint") or {}).get("as_int")) for size in sizes]
    return tuple(found) if all(isinstance(size, int) for size in found) else None


def _output_indices(graph: Graph, specs: Any) -> list[int]:
    """Return the graph's outputs that the caller receives. A program that changes its tensors is refused."""
    found = []
    for index, (kind, content) in enumerate(_specs(specs)):
        if kind == "user_output" and isinstance(read_argument(content["arg"]), Ref):
            found.append(index)
        else:
            raise CheckpointInvalid(
                f"The program has an output that is not supported ({kind}): it must return "
                f"tensors only and not change its own. {_EVAL_HINT}"
            )
    return found


def _has_batch_dimension(graph: Graph, index: int, batch: str) -> bool:
    value = graph.values.get(graph.outputs[index].name)
    return value is not None and bool(value.shape) and value.shape[0] == batch


def _spec(name: str, value: TensorMeta, sample: tuple[int, ...] = ()) -> TensorSpec:
    shape = tuple(size if isinstance(size, int) else -1 for size in value.shape)
    return TensorSpec(name, DATATYPES[value.dtype], shape, sample)


def _operand_uses(graph: Graph) -> Iterator[tuple[str, tuple[str, int]]]:
    for node in graph.nodes:
        for place, argument in enumerate((*node.arguments, *node.keywords.values())):
            yield from ((ref.name, (node.target, place)) for ref in refs(argument))
    yield from ((ref.name, ("output", 0)) for ref in refs(graph.outputs))


def _ref_name(argument: Any) -> str | None:
    return argument.name if isinstance(argument, Ref) else None


def _linear_operands(names: list[str | None]) -> tuple[str | None, str | None, str | None]:
    x, weight, bias = (*names, None, None, None)[:3]
    return x, weight, bias


def operations_per_row(
    checkpoint: ProgramCheckpoint, free_size: int, targets: Collection[str] = (LINEAR_TARGET, *CONVOLUTIONS)
) -> float:
    """Return twice the multiply-adds per row of calls of `targets`; dynamic dimensions besides the batch are `free_size`."""
    first = checkpoint.graph.values[checkpoint.signature.inputs[0].name].shape[0]
    return _graph_operations(checkpoint.graph, DimensionValues(first, free_size), targets)


def read_bytes(checkpoint: ProgramCheckpoint, precision: str) -> int:
    """Return the bytes of the held weights of linear layers and convolutions, without embedding tables."""
    in_forms = {"fp32": 4, "bf16": 2, "int8": 1}[precision]
    nodes = (node for node in checkpoint.graph.nodes if node.target in CONVOLUTIONS and len(node.arguments) > 1)
    weights = (node.arguments[1] for node in nodes)
    convolved = {each.name for each in weights if isinstance(each, Ref) and each.name in checkpoint.states}
    products = sum(checkpoint.states[name].num_elements for name in checkpoint.linears)
    others = sum(checkpoint.states[name].num_elements for name in convolved)
    return in_forms * products + (2 if precision == "bf16" else 4) * others


@dataclass(frozen=True, slots=True)
class DimensionValues:
    """Values for the dimensions of the graph's tensors, for one row of the batch."""

    batch: int | str
    free: int

    def product(self, shape: Sequence[int | str]) -> int:
        return math.prod(map(self._of, shape))

    def _of(self, size: int | str) -> int:
        """Return the value of a number, a symbol or a product of them; other expressions count as a free dimension."""
        if isinstance(size, int):
            return size
        return math.prod(
            int(part) if part.isdecimal() else 1 if part == self.batch else self.free for part in size.split("*")
        )


def _graph_operations(graph: Graph, sizes: DimensionValues, targets: Collection[str]) -> float:
    inner = sum(_graph_operations(each, sizes, targets) for node in graph.nodes for each in _subgraphs(node))
    return inner + sum(_operations(node, graph, sizes) for node in graph.nodes if node.target in targets)


def _subgraphs(node: Node) -> Iterator[Graph]:
    return (item for item in (*node.arguments, *node.keywords.values()) if isinstance(item, Graph))


def _operations(node: Node, graph: Graph, sizes: DimensionValues) -> float:
    """Return the operations of a node: each output element sums over all but the weight's first dimension."""
    if node.arguments[_TRANSPOSED_POSITION : _TRANSPOSED_POSITION + 1] == (True,):
        return 0.0  # a transposed convolution sums over other dimensions
    if len(node.arguments) < 2 or not node.outputs:
        return 0.0  # damaged; refused when the program is loaded
    weight, result = node.arguments[1], node.outputs[0]
    if not isinstance(weight, Ref) or not {weight.name, result} <= graph.values.keys():
        return 0.0
    return 2.0 * sizes.product(graph.values[result].shape) * sizes.product(graph.values[weight.name].shape[1:])
