"""Opens an exported program (`.pt2`) and validates it completely, without torch.

It checks the inputs, the outputs, and that the program can be batched and served. The first dimension of every
input is the batch, one free symbol for all. The outputs that have it too are served.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.hardware.facts import Needs
from app.messages import Signature, TensorSpec
from app.models.graph import LINEAR, SCHEMA_MAJOR, Graph, Ref, Value, read_argument, read_graph, refs
from app.models.outputs import output_names
from app.weights.archive import Archive, Stored
from app.weights.copies import check_fetched

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
_EVAL = "Was the model in eval() when it was exported?"
_EXPORT = (
    'torch.export.export(model.eval(), (example,), dynamic_shapes={"NAME": {0: torch.export.Dim("batch", min=1, max=1024)}}), '
    "with at least two rows in the example"
)


@dataclass(frozen=True)
class ProgramCheckpoint:
    """An archive that can be served. `states` are the program's stored tensors, by the graph's names."""

    path: Path
    graph: Graph
    signature: Signature
    gives: tuple[int, ...]  # indices of the signature's outputs among the graph's outputs
    states: Mapping[str, Stored]
    fewest_rows: int = 1
    most_rows: int | None = None
    kind: str = field(default="program", init=False)

    @property
    def directory(self) -> Path:
        """Directory of the archive."""
        return self.path.parent

    @property
    def name(self) -> str:
        """Name of the model: the file's name without its suffix."""
        return self.path.stem

    @cached_property
    def linears(self) -> Mapping[str, str | None]:
        """Weights [out, in] that only linear layers read, each with the name of its bias.

        They are held in this package's forms.
        """
        others = {ref for ref, where in _uses(self.graph) if where != (LINEAR, 1)}
        biases: dict[str, set[str | None]] = {}
        for node in self.graph.nodes:
            if node.target == LINEAR:
                _, weight, bias = _padded([_named(item) for item in (*node.arguments, *node.keywords.values())])
                biases.setdefault(weight or "", set()).add(bias)
        return {weight: next(iter(each)) for weight, each in biases.items() if weight not in others and self._packs(weight, each)}

    def _packs(self, weight: str, biases: set[str | None]) -> bool:
        """Return True for a floating-point matrix with exactly one bias, or without bias."""
        states, bias = self.states, next(iter(biases))
        floating = weight in states and states[weight].dtype in ("float32", "float16", "bfloat16")
        return floating and len(states[weight].shape) == 2 and len(biases) == 1 and (bias is None or bias in states)

    @cached_property
    def fingerprint(self) -> str:
        """Hash of the computation and of the weights' shapes, independent of the weights' values."""
        return hashlib.sha256(repr((self.graph, self.states, self.fewest_rows, self.most_rows)).encode()).hexdigest()

    def needs(self) -> Needs:
        """Return the program's requirements, from which the plan is made.

        Weights of linear layers are counted in the served precision, everything else as FP32.
        """
        sizes = {ref: stored.num_elements for ref, stored in self.states.items()}
        products = sum(sizes[ref] for ref in self.linears)
        rest = 4 * (sum(sizes.values()) - products)
        return Needs(
            kind="program",
            architecture="exported program",
            num_parameters=sum(sizes.values()),
            weight_bytes=sum(4 * size for size in sizes.values()),
            bytes_by_precision={"fp32": rest + 4 * products, "bf16": rest + 2 * products, "int8": rest + products},
            kv_elements_per_token=0,
            max_model_len=1,
            num_layers=0,
            hidden_size=0,
            vocab_size=0,
            stored_dtype="float32",
            rows_vary=any(size < 0 for spec in self.signature.inputs for size in spec.shape[1:]),
        )


def open_program(path: Path) -> ProgramCheckpoint:
    """Read and check everything except the weights' values.

    Raises:
        CheckpointInvalid: Something is missing, damaged or not supported.
        OSError: The file cannot be read.
    """
    check_fetched(path)
    archive = Archive(path)
    try:
        model = _model_of(archive)
        values = archive.read_json(f"models/{model}.json")
        stored = archive.stored("weights", model) | archive.stored("constants", model)
    finally:
        archive.close()
    try:
        major = values["schema_version"]["major"]
        if major != SCHEMA_MAJOR:
            raise CheckpointInvalid(f"{path.name} has version {major} of torch.export's schema; {SCHEMA_MAJOR} is supported.")
        graph = read_graph(values["graph_module"]["graph"])
        return _judged(path, graph, values, stored)
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise CheckpointInvalid(f"{path.name}: the program's description is damaged: {error!r}.") from error


def _model_of(archive: Archive) -> str:
    if archive.names("data/aotinductor/"):
        raise CheckpointInvalid(f"{archive.path.name} holds compiled code, which is not run. Save it with torch.export.save.")
    models = [name for name in archive.names("models/") if name.endswith(".json")]
    if len(models) != 1:
        raise CheckpointInvalid(f"{archive.path.name} holds {len(models)} programs; it must hold one.")
    return models[0].removesuffix(".json")


def _judged(path: Path, graph: Graph, values: Mapping[str, Any], stored: Mapping[str, Stored]) -> ProgramCheckpoint:
    signature = values["graph_module"]["signature"]
    given: list[str] = []
    states: dict[str, Stored] = {}
    for name, spec in zip(graph.inputs, _specs(signature["input_specs"]), strict=True):
        kind, content = spec
        state = _state_name(kind, content)
        if state is None:
            given.append(name)
        elif state in stored:
            states[name] = stored[state]
        else:
            raise CheckpointInvalid(f"{path.name} has no tensor for {state!r}.")
    _check_states(graph, states)
    batch = _batch_of(graph, given)
    low, high = _range(values.get("range_constraints", {}).get(batch, {}))
    results = _results(graph, signature["output_specs"])
    named = list(zip(output_names(values["graph_module"].get("module_call_graph", ()), len(results)), results, strict=True))
    outputs = {name: index for name, index in named if _batched(graph, index, batch)}
    if not outputs:
        raise CheckpointInvalid(f"{path.name}: no output of the program has a row for each row of the batch.")
    return ProgramCheckpoint(
        path,
        graph,
        Signature(
            tuple(_spec(name, graph.values[name]) for name in given),
            tuple(_spec(name, graph.values[graph.outputs[index].name]) for name, index in outputs.items()),
        ),
        tuple(outputs.values()),
        states,
        low,
        high,
    )


def _check_states(graph: Graph, states: Mapping[str, Stored]) -> None:
    """Refuse a program that writes into its stored tensors: one request would change the results of the next."""
    for node in graph.nodes:
        written = node.arguments[:1] if node.target.rpartition(".")[0].endswith("_") else ()
        if any(isinstance(item, Ref) and item.name in states for item in written):
            raise CheckpointInvalid(f"The program writes into its own tensor {written[0].name!r} ({node.target}): {_EVAL}")


def _specs(specs: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for spec in specs:
        ((kind, content),) = spec.items()
        yield kind, content


def _state_name(kind: str, content: Mapping[str, Any]) -> str | None:
    """Return the stored tensor's name for an input of the graph, or None if the caller provides the input."""
    names = {"parameter": "parameter_name", "buffer": "buffer_name", "tensor_constant": "tensor_constant_name"}
    if kind in names:
        return str(content[names[kind]])
    if kind == "user_input" and "as_tensor" in content["arg"]:
        return None
    raise CheckpointInvalid(f"The program has an input that is not a tensor ({kind}); export it with tensors only.")


def _batch_of(graph: Graph, given: list[str]) -> str:
    """Return the symbol of the batch, the first dimension of all inputs."""
    if not given:
        raise CheckpointInvalid("The program takes no input.")
    firsts = {name: (*graph.values[name].shape, None)[0] for name in given}
    fixed = [name for name, size in firsts.items() if not isinstance(size, str)]
    if fixed:
        raise CheckpointInvalid(
            f"The first dimension of input {fixed[0]!r} is not the free size of a batch. Export with {_EXPORT}."
        )
    symbols = set(firsts.values())
    symbol = str(firsts[given[0]])
    if len(symbols) != 1 or not _SYMBOL.fullmatch(symbol):
        told = ", ".join(f"{name} {size}" for name, size in firsts.items())
        raise CheckpointInvalid(f"The inputs' first dimensions are not the same batch size: {told[:200]}. Export with {_EXPORT}.")
    return symbol


def _range(limits: Mapping[str, Any]) -> tuple[int, int | None]:
    low, high = limits.get("min_val"), limits.get("max_val")
    return max(1, low or 1), high if isinstance(high, int) and high < 2**31 else None


def _results(graph: Graph, specs: Any) -> list[int]:
    """Return the indices of the graph's outputs that the caller receives.

    A program that changes its stored tensors is refused: requests would change each other's results.
    """
    found = []
    for index, (kind, content) in enumerate(_specs(specs)):
        if kind == "user_output" and isinstance(read_argument(content["arg"]), Ref):
            found.append(index)
        else:
            raise CheckpointInvalid(
                f"The program has an output that is not supported ({kind}): it must return tensors only and not change its own. {_EVAL}"
            )
    return found


def _batched(graph: Graph, index: int, batch: str) -> bool:
    value = graph.values.get(graph.outputs[index].name)
    return value is not None and bool(value.shape) and value.shape[0] == batch


def _spec(name: str, value: Value) -> TensorSpec:
    return TensorSpec(name, DATATYPES[value.dtype], tuple(size if isinstance(size, int) else -1 for size in value.shape))


def _uses(graph: Graph) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield each name with the operation and the argument position at which it is read."""
    for node in graph.nodes:
        for place, argument in enumerate((*node.arguments, *node.keywords.values())):
            yield from ((ref.name, (node.target, place)) for ref in refs(argument))
    yield from ((ref.name, ("output", 0)) for ref in refs(graph.outputs))


def _named(argument: Any) -> str | None:
    return argument.name if isinstance(argument, Ref) else None


def _padded(names: list[str | None]) -> tuple[str | None, str | None, str | None]:
    """Return x, weight and bias of a linear operation."""
    x, weight, bias = (*names, None, None, None)[:3]
    return x, weight, bias
