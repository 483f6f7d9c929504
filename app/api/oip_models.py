"""Description of a served model for the Open Inference Protocol: its tensors, metadata, and validation of inputs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.api.oip_tensors import SIZES, from_binary, of_strings
from app.api.oip_wire import VERSION, Inference
from app.errors import InvalidRequest
from app.messages import Array, Signature, TensorSpec
from app.served import ServedEncoder, ServedModel, ServedProgram

Json = dict[str, Any]

TEXT = TensorSpec("text", "BYTES", (-1,))
# Optional inputs: `text_pair` is the second text of each pair; the others are an alternative to `text`.
OPTIONAL = (
    TensorSpec("text_pair", "BYTES", (-1,)),
    TensorSpec("input_ids", "INT64", (-1, -1)),
    TensorSpec("attention_mask", "INT64", (-1, -1)),
    TensorSpec("token_type_ids", "INT64", (-1, -1)),
)
GENERATES = Signature((TensorSpec("text_input", "BYTES", (1,)),), (TensorSpec("text_output", "BYTES", (1,)),))
# Datatypes that the model configuration extension does not name TYPE_ and the protocol's datatype.
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


def signature_of(model: ServedModel) -> Signature:
    """Return the input and output tensors of a model of any kind."""
    if isinstance(model, ServedProgram):
        return model.signature
    return Signature((TEXT, *OPTIONAL), _outputs(model)) if isinstance(model, ServedEncoder) else GENERATES


def _outputs(model: ServedEncoder) -> tuple[TensorSpec, ...]:
    """Return the model's outputs, and `scores` if it has logits."""
    sizes = dict(model.sizes)
    if "logits" in sizes:
        sizes["scores"] = sizes["logits"]
    by_token = ("last_hidden_state",)
    return tuple(TensorSpec(name, "FP32", (-1, -1, size) if name in by_token else (-1, size)) for name, size in sizes.items())


def metadata(model: ServedModel) -> Json:
    """Return the model metadata of the protocol."""
    signature = signature_of(model)
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": _platform(model),
        "inputs": [_tensor(spec) for spec in signature.inputs],
        "outputs": [_tensor(spec) for spec in signature.outputs],
    }


def config(model: ServedModel) -> Json:
    """Return the model configuration of the extension, which also says which inputs are optional."""
    signature = signature_of(model)
    return {
        "name": model.name,
        "platform": _platform(model),
        "backend": "armature",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,  # 0: `dims` include the batch dimension
        "input": [_config_tensor(spec) | ({"optional": True} if spec in OPTIONAL else {}) for spec in signature.inputs],
        "output": [_config_tensor(spec) for spec in signature.outputs],
    }


def _platform(model: ServedModel) -> str:
    return "pytorch_export" if isinstance(model, ServedProgram) else "pytorch_safetensors"


def _tensor(spec: TensorSpec) -> Json:
    return {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}


def _config_tensor(spec: TensorSpec) -> Json:
    return {"name": spec.name, "data_type": _CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"), "dims": list(spec.shape)}


# ---- validation of requests ----------------------------------------------------------------------------------------


def check_inputs(specs: tuple[TensorSpec, ...], inputs: Mapping[str, Array]) -> None:
    """Check names, datatypes and shapes. Missing inputs are allowed here.

    The first dimension is the batch; it must be the same in all inputs and not 0. Raises an `InvalidRequest`
    that names the input.
    """
    known = {spec.name: spec for spec in specs}
    batches: dict[str, int] = {}
    for name, array in inputs.items():
        if name not in known:
            raise InvalidRequest(f"The model has no input {name[:100]!r}: it takes {', '.join(known)}.", field=name[:100])
        _check_input(known[name], array)
        batches[name] = array.shape[0]
    if len(set(batches.values())) > 1:
        told = ", ".join(f"{name}: {batch}" for name, batch in batches.items())
        raise InvalidRequest(f"The inputs' first dimensions must be equal, not {told}.", field="inputs")
    if 0 in batches.values():
        raise InvalidRequest("The inputs are empty: their first dimension must be 1 or more.", field="inputs")


def check_complete(specs: tuple[TensorSpec, ...], inputs: Mapping[str, Array]) -> None:
    """Check that no input is missing. Raises `InvalidRequest`."""
    missing = [spec.name for spec in specs if spec.name not in inputs]
    if missing:
        raise InvalidRequest(f"The model also needs the input {missing[0]!r}.", field=missing[0])


def _check_input(spec: TensorSpec, array: Array) -> None:
    if array.datatype != spec.datatype:
        raise InvalidRequest(f"Input {spec.name!r} must be {spec.datatype}, not {array.datatype}.", field=spec.name)
    fits = len(array.shape) == len(spec.shape) and all(
        wanted in (-1, size) for wanted, size in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        wanted = f"{list(spec.shape)}, where -1 may be any"
        raise InvalidRequest(f"Input {spec.name!r} must have the shape {wanted}, not {list(array.shape)}.", field=spec.name)


def wanted_outputs(signature: Signature, inference: Inference) -> tuple[str, ...]:
    """Return the names of the requested outputs in the order of the request; all outputs if none was named."""
    known = [spec.name for spec in signature.outputs]
    wanted = tuple(known if inference.outputs is None else inference.outputs)
    for name in wanted:
        if name not in known:
            raise InvalidRequest(f"The model has no output {name[:100]!r}: it has {', '.join(known)}.", field="outputs")
    return wanted


def bare_inputs(signature: Signature, body: bytes) -> dict[str, Array]:
    """Return the single input of a binary body without JSON, which is a batch of one.

    The body is a UTF-8 text, or values whose shape follows from their number.
    """
    specs = [spec for spec in signature.inputs if spec not in OPTIONAL]
    if len(specs) != 1:
        raise InvalidRequest("A bare binary body needs a model with one input: send a JSON object before the bytes.")
    spec = specs[0]
    if spec.datatype == "BYTES":
        try:
            return {spec.name: of_strings([body.decode()], (1,))}
        except UnicodeDecodeError as error:
            raise InvalidRequest("A bare body must be text in UTF-8.") from error
    return {spec.name: from_binary(spec.name, spec.datatype, _bare_shape(spec, len(body)), body)}


def _bare_shape(spec: TensorSpec, num_bytes: int) -> tuple[int, ...]:
    rest = spec.shape[1:]
    row = SIZES[spec.datatype] * math.prod(size for size in rest if size != -1)
    free = rest.count(-1)
    if free > 1:
        raise InvalidRequest(
            f"A bare binary body does not determine the shape {list(spec.shape)}: send a JSON object before the bytes."
        )
    if not row or not num_bytes or num_bytes % row or (not free and num_bytes != row):
        wanted = f"a multiple of {row} bytes" if free else f"{row} bytes"
        raise InvalidRequest(f"A bare {spec.datatype} body of shape {[1, *rest]} is {wanted}, not {num_bytes}.")
    return (1, *(num_bytes // row if size == -1 else size for size in rest))
