"""Served models in the Open Inference Protocol: tensors, metadata, validation of inputs, and encoders' conversions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray
from pydantic_core import from_json, to_json

from app.api.oip.predictions import check_classes
from app.api.oip.schemas import ConfigTensor, ModelConfiguration, ModelMetadata, TensorMetadata
from app.api.oip.tensors import (
    VALUE_BYTES,
    VERSION,
    InferRequest,
    check_json_datatype,
    from_binary,
    from_strings,
    to_strings,
)
from app.api.schemas import ReportIgnored
from app.api.tasks.requests import read_task
from app.errors import ContextLengthExceeded, InvalidRequest
from app.messages import Array, Signature, TensorSpec, Text
from app.service.encode import MAX_TEXTS
from app.service.requests import Encoded, EncodingRequest, TaskRequest, TaskResult, TextInput, Truncation
from app.service.served_model import ServedEncoder, ServedModel, ServedProgram, ServedTasks

TEXT_INPUT = TensorSpec("text", "BYTES", (-1,))
# Optional inputs: `text_pair` is the second text of each pair; the others are an alternative to `text`.
OPTIONAL_INPUTS = (
    TensorSpec("text_pair", "BYTES", (-1,)),
    TensorSpec("input_ids", "INT64", (-1, -1)),
    TensorSpec("attention_mask", "INT64", (-1, -1)),
    TensorSpec("token_type_ids", "INT64", (-1, -1)),
)
GENERATE_SIGNATURE = Signature((TensorSpec("text_input", "BYTES", (1,)),), (TensorSpec("text_output", "BYTES", (1,)),))
# Each input is a text, or the JSON of what the task reads in place of one; each result is JSON. The last two are optional.
TASK_SIGNATURE = Signature(
    (TensorSpec("inputs", "BYTES", (-1,)), TensorSpec("parameters", "BYTES", (1,)), TensorSpec("task", "BYTES", (1,))),
    (TensorSpec("result", "BYTES", (-1,)),),
)
# Datatypes that the model configuration extension does not name TYPE_ and the protocol's datatype.
_CONFIG_TYPES = {"BYTES": "TYPE_STRING"}


def signature_of(model: ServedModel) -> Signature:
    if isinstance(model, ServedProgram):
        return model.signature
    if isinstance(model, ServedTasks):
        return TASK_SIGNATURE
    return (
        Signature((TEXT_INPUT, *OPTIONAL_INPUTS), _outputs(model))
        if isinstance(model, ServedEncoder)
        else GENERATE_SIGNATURE
    )


def _outputs(model: ServedEncoder) -> tuple[TensorSpec, ...]:
    """Return the model's outputs, and `scores` if it has logits."""
    sizes = dict(model.sizes)
    if "logits" in sizes:
        sizes["scores"] = sizes["logits"]
    by_token = ("last_hidden_state",)
    return tuple(
        TensorSpec(name, "FP32", (-1, -1, size) if name in by_token else (-1, size)) for name, size in sizes.items()
    )


def metadata(model: ServedModel) -> ModelMetadata:
    signature = signature_of(model)
    return {
        "name": model.name,
        "versions": [VERSION],
        "platform": _platform(model),
        "inputs": [_tensor_metadata(spec, model) for spec in signature.inputs],
        "outputs": [_tensor_metadata(spec, model) for spec in signature.outputs],
    }


def config(model: ServedModel) -> ModelConfiguration:
    """Return the model configuration of the extension, which also says which inputs are optional."""
    signature = signature_of(model)
    return {
        "name": model.name,
        "platform": _platform(model),
        "backend": "armature",
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": 0,  # 0: `dims` include the batch dimension
        "input": [_config_tensor(spec) for spec in signature.inputs],
        "output": [_config_tensor(spec) for spec in signature.outputs],
    }


def _platform(model: ServedModel) -> str:
    return model.platform if isinstance(model, ServedProgram) else "pytorch_safetensors"


def _tensor_metadata(spec: TensorSpec, model: ServedModel) -> TensorMetadata:
    found: TensorMetadata = {"name": spec.name, "datatype": spec.datatype, "shape": list(spec.shape)}
    if isinstance(model, ServedProgram):
        if spec.name in model.description.pictures and spec in model.signature.inputs:
            found["parameters"] = {"picture": True}
        if spec.name in model.description.labels and spec in model.signature.outputs:
            found["parameters"] = {"labels": len(model.description.labels[spec.name])}
    return found


def _config_tensor(spec: TensorSpec) -> ConfigTensor:
    tensor: ConfigTensor = {
        "name": spec.name,
        "data_type": _CONFIG_TYPES.get(spec.datatype, f"TYPE_{spec.datatype}"),
        "dims": list(spec.shape),
    }
    if spec in OPTIONAL_INPUTS or spec in TASK_SIGNATURE.inputs[1:]:
        tensor["optional"] = True
    return tensor


# ---- validation of requests ----------------------------------------------------------------------------------------


def check_inputs(
    specs: tuple[TensorSpec, ...], inputs: Mapping[str, Array], pictures: Mapping[str, int] | None = None
) -> None:
    """Check names, datatypes and shapes. Missing inputs are allowed here.

    The first dimension is the batch; it must be the same in all inputs and not 0. Of inputs in `pictures` it is the
    number of pictures. Raises an `InvalidRequest` that names the input.
    """
    known = {spec.name: spec for spec in specs}
    batches = dict(pictures or {})
    for name, array in inputs.items():
        if name not in known:
            raise InvalidRequest(
                f"The model has no input {name[:100]!r}: it takes {', '.join(known)}.", field=name[:100]
            )
        _check_input(known[name], array)
        batches[name] = array.shape[0]
    if len(set(batches.values())) > 1:
        sizes = ", ".join(f"{name}: {batch}" for name, batch in batches.items())
        raise InvalidRequest(f"The inputs' first dimensions must be equal, not {sizes}.", field="inputs")
    if 0 in batches.values():
        raise InvalidRequest("The inputs are empty: their first dimension must be 1 or more.", field="inputs")


def check_complete(specs: tuple[TensorSpec, ...], inputs: Mapping[str, Array]) -> None:
    """Raise `InvalidRequest` if an input is missing."""
    missing = [spec.name for spec in specs if spec.name not in inputs]
    if missing:
        raise InvalidRequest(f"The model also needs the input {missing[0]!r}.", field=missing[0])


def _check_input(spec: TensorSpec, array: Array) -> None:
    if array.datatype != spec.datatype:
        raise InvalidRequest(f"Input {spec.name!r} must be {spec.datatype}, not {array.datatype}.", field=spec.name)
    fits = len(array.shape) == len(spec.shape) and all(
        expected in (-1, size) for expected, size in zip(spec.shape, array.shape, strict=True)
    )
    if not fits:
        expected = f"{list(spec.shape)}, where -1 may be any"
        raise InvalidRequest(
            f"Input {spec.name!r} must have the shape {expected}, not {list(array.shape)}.", field=spec.name
        )


def requested_outputs(signature: Signature, inference: InferRequest) -> tuple[str, ...]:
    """Return the names of the requested outputs in the order of the request; all outputs if none was named."""
    known = {spec.name: spec for spec in signature.outputs}
    requested = tuple(known if inference.outputs is None else inference.outputs)
    for name in requested:
        if name not in known:
            raise InvalidRequest(f"The model has no output {name[:100]!r}: it has {', '.join(known)}.", field="outputs")
        if name in inference.classes:
            check_classes(known[name], inference.classes[name])
        elif not inference.is_binary(name):
            check_json_datatype(name, known[name].datatype)
    return requested


def parse_bare_body(signature: Signature, body: bytes) -> dict[str, Array]:
    """Return the single input of a binary body without JSON, which is a batch of one.

    The body is a UTF-8 text, or values that give the shape by their number.
    """
    specs = [spec for spec in signature.inputs if spec not in (*OPTIONAL_INPUTS, *TASK_SIGNATURE.inputs[1:])]
    if len(specs) != 1:
        raise InvalidRequest("A bare binary body needs a model with one input: send a JSON object before the bytes.")
    spec = specs[0]
    if spec.datatype == "BYTES":
        try:
            return {spec.name: from_strings([body.decode()], (1,))}
        except UnicodeDecodeError as error:
            raise InvalidRequest("A bare body must be text in UTF-8.") from error
    return {spec.name: from_binary(spec.name, spec.datatype, _bare_shape(spec, len(body)), body)}


def _bare_shape(spec: TensorSpec, num_bytes: int) -> tuple[int, ...]:
    rest = spec.shape[1:]
    row = VALUE_BYTES[spec.datatype] * math.prod(size for size in rest if size != -1)
    free = rest.count(-1)
    if free > 1:
        raise InvalidRequest(
            f"A bare binary body does not determine the shape {list(spec.shape)}: send a JSON object before the bytes."
        )
    if not row or not num_bytes or num_bytes % row or (not free and num_bytes != row):
        expected = f"a multiple of {row} bytes" if free else f"{row} bytes"
        raise InvalidRequest(f"A bare {spec.datatype} body of shape {[1, *rest]} is {expected}, not {num_bytes}.")
    return (1, *(num_bytes // row if size == -1 else size for size in rest))


# A client can request much padding with a small body, and the response is in memory until it was read.
def task_request(model: ServedTasks, inference: InferRequest, identity: str, report: ReportIgnored) -> TaskRequest:
    """Return the request of a task for these tensors. Raises `InvalidRequest`."""
    for name, tensor in inference.inputs.items():  # not together: only one of them has rows
        check_inputs(TASK_SIGNATURE.inputs, {name: tensor})
    check_complete(TASK_SIGNATURE.inputs[:1], inference.inputs)
    given = {name: to_strings(name, tensor) for name, tensor in inference.inputs.items()}
    task = given["task"][0] if "task" in given else model.tasks[0]
    texts: list[Any] = given["inputs"]
    try:
        parameters = from_json(given["parameters"][0]) if "parameters" in given else None
        inputs = [from_json(text) for text in texts] if task == "question-answering" else texts
    except ValueError as error:
        raise InvalidRequest(f"An element is not JSON: {error}.", field="inputs") from error
    body = to_json({"inputs": inputs, "parameters": parameters})
    return read_task(model, task, body, "oip", identity, report)[0]


def task_tensors(result: TaskResult) -> dict[str, Array]:
    """Return the results of a task's inputs, each as JSON."""
    rows = [to_json(row).decode() for row in from_json(result.content)]
    return {"result": from_strings(rows, (len(rows),))}


# 64 MiB are 85 rows of 512 × 384.
MAX_PADDED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class TextInference:
    """An encoding request with what its response needs.

    `outputs` are the names that the client used. `masks` is set if token ids were sent: one byte per position of each
    row, 1 where there is a token; `width` is the row length.
    """

    request: EncodingRequest
    outputs: tuple[str, ...]
    masks: Sequence[bytes] | None = None
    width: int = 0


def parse_text_inputs(model: ServedEncoder, inference: InferRequest, identity: str) -> TextInference:
    """Convert the input tensors to an encoding request. Raises an `InvalidRequest` that names the input."""
    inputs, parameters = inference.inputs, inference.parameters
    check_inputs((TEXT_INPUT, *OPTIONAL_INPUTS), inputs)
    outputs = requested_outputs(signature_of(model), inference)
    if ("text" in inputs) == ("input_ids" in inputs):
        raise InvalidRequest("Send either the input text or the input input_ids.", field="text")
    masks, width = None, 0
    if "text" in inputs:
        field, texts = "text", _text_inputs(inputs)
    else:
        width = inputs["input_ids"].shape[1]
        masks = _masks(inputs)
        field, texts = "input_ids", _token_rows(inputs, masks, model.limits.max_model_len, bool(parameters.truncate))
        _check_padded(model, outputs, len(masks), width)
    request = EncodingRequest(
        inputs=texts,
        outputs=tuple(dict.fromkeys("logits" if name == "scores" else name for name in outputs)),
        api="oip",
        request_id=identity,
        truncation=Truncation(bool(parameters.truncate)),
        normalize=parameters.normalize,
        dimensions=parameters.dimensions,
        prompt=parameters.prompt_name,
        field=field,
    )
    return TextInference(request, outputs, masks, width)


def _text_inputs(inputs: Mapping[str, Array]) -> tuple[TextInput, ...]:
    _refuse_together("text", inputs, "attention_mask", "token_type_ids")
    first = to_strings("text", inputs["text"])
    if "text_pair" not in inputs:
        return tuple(first)
    return tuple(zip(first, to_strings("text_pair", inputs["text_pair"]), strict=True))


def _masks(inputs: Mapping[str, Array]) -> list[bytes]:
    """Return one byte per position of each row, 1 where there is a token; all 1 without an attention mask."""
    _refuse_together("input_ids", inputs, "text_pair")
    batch, width = inputs["input_ids"].shape
    if batch > MAX_TEXTS:
        raise InvalidRequest(f"input_ids takes 1 to {MAX_TEXTS} rows, not {batch}.", field="input_ids")
    for name in ("attention_mask", "token_type_ids"):
        if name in inputs and inputs[name].shape != (batch, width):
            given = list(inputs[name].shape)
            raise InvalidRequest(
                f"Input {name!r} must have the shape of input_ids, {[batch, width]}, not {given}.", field=name
            )
    if "attention_mask" not in inputs:
        return [b"\1" * width] * batch
    values = _as_int64(inputs["attention_mask"])
    if (values & ~1).any():
        raise InvalidRequest(
            "Input 'attention_mask' must be 1 where there is a token and 0 elsewhere.", field="attention_mask"
        )
    return [row.tobytes() for row in values.astype(numpy.bool_)]


def _token_rows(inputs: Mapping[str, Array], masks: Sequence[bytes], longest: int, truncate: bool) -> tuple[Text, ...]:
    """Return the rows' tokens without padding.

    Only as many ids as the model can read are converted to Python integers: a body may have millions, and conversion
    blocks the event loop.
    """
    ids = _as_int64(inputs["input_ids"])
    types = _as_int64(inputs["token_type_ids"]) if "token_type_ids" in inputs else None
    texts = []
    for number, mask in enumerate(masks):
        positions = numpy.frombuffer(mask, numpy.bool_).nonzero()[0]
        if len(positions) > longest and not truncate:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens. However, input_ids[{number}] has {len(positions)} tokens. "
                "Please shorten it, or set the parameter truncate.",
                field="input_ids",
            )
        read = positions[:longest]
        texts.append(
            Text(tuple(ids[number, read].tolist()), () if types is None else tuple(types[number, read].tolist()))
        )
    return tuple(texts)


def _as_int64(array: Array) -> NDArray[numpy.int64]:
    return numpy.frombuffer(array.data, "<i8").reshape(array.shape)


def _refuse_together(name: str, inputs: Mapping[str, Array], *others: str) -> None:
    for other in others:
        if other in inputs:
            raise InvalidRequest(f"The input {other!r} does not go with {name!r}.", field=other)


# ---- responses -----------------------------------------------------------------------------------------------------


def output_tensors(model: ServedEncoder, inference: TextInference, encoded: Encoded) -> dict[str, Array]:
    """Return the arrays under the names and in the order of the request."""
    arrays: dict[str, Array] = {}
    for name in inference.outputs:
        if name == "scores":
            arrays[name] = model.scores(encoded.arrays["logits"])
        elif name == "last_hidden_state":
            arrays[name] = _pad(model, inference, encoded)
        else:
            arrays[name] = encoded.arrays[name]
    return arrays


def _pad(model: ServedEncoder, inference: TextInference, encoded: Encoded) -> Array:
    """Return hidden states [tokens, size] as [batch, width, size], with zeros at positions without a token."""
    packed = memoryview(encoded.arrays["last_hidden_state"].data)
    lengths, row_bytes = encoded.lengths, 4 * encoded.arrays["last_hidden_state"].shape[1]
    width = inference.width if inference.masks is not None else max(lengths)
    _check_padded(model, inference.outputs, len(lengths), width)
    masks = inference.masks if inference.masks is not None else [b"\1" * length for length in lengths]
    parts: list[memoryview | bytes] = []
    read = 0
    for mask, length in zip(masks, lengths, strict=True):
        filled = 0
        for position, run in _runs(mask, length):
            parts += [bytes((position - filled) * row_bytes), packed[read : read + run * row_bytes]]
            read, filled = read + run * row_bytes, position + run
        parts.append(bytes((width - filled) * row_bytes))
    return Array("FP32", (len(lengths), width, row_bytes // 4), b"".join(parts))


def _runs(mask: bytes, length: int) -> list[tuple[int, int]]:
    """Return the position and length of each run of tokens in a row, up to `length` tokens, where it was truncated."""
    runs: list[tuple[int, int]] = []
    position = mask.find(1)
    while length and position >= 0:
        end = mask.find(0, position)
        run = min((len(mask) if end < 0 else end) - position, length)
        runs.append((position, run))
        length -= run
        position = -1 if end < 0 else mask.find(1, end)
    return runs


def _check_padded(model: ServedEncoder, outputs: Sequence[str], batch: int, width: int) -> None:
    """Check the size of the hidden states, which are padded to the longest row."""
    if "last_hidden_state" not in outputs:
        return
    num_bytes = 4 * math.prod((batch, width, model.sizes["last_hidden_state"]))
    if num_bytes > MAX_PADDED_BYTES:
        raise InvalidRequest(
            f"The output last_hidden_state would be {num_bytes >> 20} MiB with its padding, and the limit is "
            f"{MAX_PADDED_BYTES >> 20} MiB: name the outputs that you need, or send fewer texts of similar length.",
            field="outputs",
        )
