"""Encoders in the Open Inference Protocol: input tensors to texts or token ids, and arrays to output tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
from numpy.typing import NDArray

from app.api.oip_models import OPTIONAL, TEXT, check_inputs, signature_of, wanted_outputs
from app.api.oip_tensors import strings
from app.api.oip_wire import Inference
from app.encoding import Encoded, EncodingRequest, TextInput
from app.errors import ContextLengthExceeded, InvalidRequest
from app.messages import Array, Text
from app.reading_texts import MAX_TEXTS
from app.served import ServedEncoder

# A client can request much padding with a small body, and the response is in memory until it was read.
# 64 MiB are 85 rows of 512 × 384.
MAX_PADDED_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Asked:
    """An encoding request with what its response needs.

    `outputs` are the names that the client used. `masks` is set if token ids were sent: one byte per position of
    each row, 1 where there is a token; `width` is the row length.
    """

    request: EncodingRequest
    outputs: tuple[str, ...]
    masks: Sequence[bytes] | None = None
    width: int = 0


def read_texts(model: ServedEncoder, inference: Inference, identity: str) -> Asked:
    """Convert the input tensors to an encoding request. Raises an `InvalidRequest` that names the input."""
    inputs, parameters = inference.inputs, inference.parameters
    check_inputs((TEXT, *OPTIONAL), inputs)
    outputs = wanted_outputs(signature_of(model), inference)
    if ("text" in inputs) == ("input_ids" in inputs):
        raise InvalidRequest("Send either the input text or the input input_ids.", field="text")
    masks, width = None, 0
    if "text" in inputs:
        field, texts = "text", _texts(inputs)
    else:
        width = inputs["input_ids"].shape[1]
        masks = _masks(inputs)
        field, texts = "input_ids", _rows(inputs, masks, model.limits.max_model_len, bool(parameters.truncate))
        _check_padded(model, outputs, len(masks), width)
    request = EncodingRequest(
        inputs=texts,
        outputs=tuple(dict.fromkeys("logits" if name == "scores" else name for name in outputs)),
        api="oip",
        request_id=identity,
        truncate=bool(parameters.truncate),
        normalize=parameters.normalize,
        dimensions=parameters.dimensions,
        prompt=parameters.prompt_name,
        field=field,
    )
    return Asked(request, outputs, masks, width)


def _texts(inputs: Mapping[str, Array]) -> tuple[TextInput, ...]:
    _refuse_beside("text", inputs, "attention_mask", "token_type_ids")
    first = strings("text", inputs["text"])
    if "text_pair" not in inputs:
        return tuple(first)
    return tuple(zip(first, strings("text_pair", inputs["text_pair"]), strict=True))


def _masks(inputs: Mapping[str, Array]) -> list[bytes]:
    """Return one byte per position of each row, 1 where there is a token; all 1 without an attention mask."""
    _refuse_beside("input_ids", inputs, "text_pair")
    batch, width = inputs["input_ids"].shape
    if batch > MAX_TEXTS:
        raise InvalidRequest(f"input_ids takes 1 to {MAX_TEXTS} rows, not {batch}.", field="input_ids")
    for name in ("attention_mask", "token_type_ids"):
        if name in inputs and inputs[name].shape != (batch, width):
            given = list(inputs[name].shape)
            raise InvalidRequest(f"Input {name!r} must have the shape of input_ids, {[batch, width]}, not {given}.", field=name)
    if "attention_mask" not in inputs:
        return [b"\1" * width] * batch
    values = _whole(inputs["attention_mask"])
    if (values & ~1).any():
        raise InvalidRequest("Input 'attention_mask' must be 1 where there is a token and 0 elsewhere.", field="attention_mask")
    return [row.tobytes() for row in values.astype(numpy.bool_)]


def _rows(inputs: Mapping[str, Array], masks: Sequence[bytes], longest: int, truncate: bool) -> tuple[Text, ...]:
    """Return the rows' tokens without padding.

    Only as many ids as the model can read are converted to Python integers: a body may have millions, and
    conversion blocks the event loop.
    """
    ids = _whole(inputs["input_ids"])
    types = _whole(inputs["token_type_ids"]) if "token_type_ids" in inputs else None
    texts = []
    for number, mask in enumerate(masks):
        places = numpy.frombuffer(mask, numpy.bool_).nonzero()[0]
        if len(places) > longest and not truncate:
            raise ContextLengthExceeded(
                f"This model's maximum context length is {longest} tokens. However, input_ids[{number}] has {len(places)} tokens. "
                "Please shorten it, or set the parameter truncate.",
                field="input_ids",
            )
        read = places[:longest]
        texts.append(Text(tuple(ids[number, read].tolist()), () if types is None else tuple(types[number, read].tolist())))
    return tuple(texts)


def _whole(array: Array) -> NDArray[numpy.int64]:
    return numpy.frombuffer(array.data, "<i8").reshape(array.shape)


def _refuse_beside(name: str, inputs: Mapping[str, Array], *others: str) -> None:
    for other in others:
        if other in inputs:
            raise InvalidRequest(f"The input {other!r} does not go with {name!r}.", field=other)


# ---- responses -----------------------------------------------------------------------------------------------------


def outputs_of(model: ServedEncoder, asked: Asked, encoded: Encoded) -> dict[str, Array]:
    """Return the arrays under the names and in the order of the request."""
    arrays: dict[str, Array] = {}
    for name in asked.outputs:
        if name == "scores":
            arrays[name] = model.scores(encoded.arrays["logits"])
        elif name == "last_hidden_state":
            arrays[name] = _spread(model, asked, encoded)
        else:
            arrays[name] = encoded.arrays[name]
    return arrays


def _spread(model: ServedEncoder, asked: Asked, encoded: Encoded) -> Array:
    """Return hidden states [tokens, size] as [batch, width, size], with zeros at positions without a token."""
    packed = memoryview(encoded.arrays["last_hidden_state"].data)
    lengths, row_bytes = encoded.lengths, 4 * encoded.arrays["last_hidden_state"].shape[1]
    width = asked.width if asked.masks is not None else max(lengths)
    _check_padded(model, asked.outputs, len(lengths), width)
    masks = asked.masks if asked.masks is not None else [b"\1" * length for length in lengths]
    pieces: list[memoryview | bytes] = []
    read = 0
    for mask, length in zip(masks, lengths, strict=True):
        filled = 0
        for place, run in _runs(mask, length):
            pieces += [bytes((place - filled) * row_bytes), packed[read : read + run * row_bytes]]
            read, filled = read + run * row_bytes, place + run
        pieces.append(bytes((width - filled) * row_bytes))
    return Array("FP32", (len(lengths), width, row_bytes // 4), b"".join(pieces))


def _runs(mask: bytes, length: int) -> list[tuple[int, int]]:
    """Return the position and length of each run of tokens in a row, up to `length` tokens in total.

    Tokens beyond that were truncated.
    """
    runs: list[tuple[int, int]] = []
    place = mask.find(1)
    while length and place >= 0:
        end = mask.find(0, place)
        run = min((len(mask) if end < 0 else end) - place, length)
        runs.append((place, run))
        length -= run
        place = -1 if end < 0 else mask.find(1, end)
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
