"""Requests to encoders and exported programs, from their texts or tensors to the arrays returned, all at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence

from app.errors import RequestTimeout
from app.messages import Abort, ArraysReady, Encode, Infer, RequestFailed, Signature
from app.service.admission import Permit
from app.service.engine_client import RequestPipeline, RequestRecord, TimedEvent
from app.service.inputs import check_texts, is_short, texts_size, tokenize_texts
from app.service.requests import Encoded, EncodingRequest, InferenceRequest, Inferred
from app.service.served_model import ServedEncoder, ServedProgram

COMPUTES = {Encode: "encode", Infer: "infer"}  # the phase of a trace after the queue
TOKEN_BYTES = 36  # a token id in a tuple: a pointer and an int object
# Bytes of a value by datatype; all others have 4.
VALUE_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "INT16": 2, "FP16": 2, "BF16": 2, "INT64": 8, "FP64": 8}


async def encode(
    pipeline: RequestPipeline, model: ServedEncoder, request: EncodingRequest, record: RequestRecord
) -> Encoded:
    """Tokenize the texts, send them to the worker and return its arrays.

    Short texts are tokenized on the event loop, because a round trip to another thread takes longer.
    """
    check_texts(model, request)
    with pipeline.admission.permit() as permit:
        texts = (
            tokenize_texts(model, request)
            if is_short(request)
            else await pipeline.read(texts_size(request), tokenize_texts, model, request)
        )
        lengths = tuple(len(text.token_ids) for text in texts)
        record.reserve(sum(lengths))
        record.count_tokens = lambda: (sum(lengths), 0)
        name = pipeline.client.name(request.request_id)
        command = Encode(name, texts, request.outputs, record.arrived_at, request.normalize, request.dimensions)
        text_bytes = 0 if is_short(request) else texts_size(request)
        permit.hold(text_bytes + _text_request_bytes(model, request.outputs, lengths))
        ready = await _send_and_wait(pipeline, command, sum(lengths), permit, record)
    pipeline.metrics.vectors_returned(len(texts), sum(lengths), ready.timings, record.exemplar)
    return Encoded(ready.arrays, ready.timings, lengths)


async def infer(
    pipeline: RequestPipeline, program: ServedProgram, request: InferenceRequest, record: RequestRecord
) -> Inferred:
    """Send a program's inputs to the worker and return its arrays.

    Rows of the batch are counted as an encoder's tokens are.

    Raises:
        InvalidRequest: The program was not exported for these sizes.
    """
    if program.sizes is not None:
        program.sizes.check({name: array.shape for name, array in request.inputs.items()})
    num_rows = request.inputs[program.signature.inputs[0].name].shape[0]
    with pipeline.admission.permit() as permit:
        permit.hold(_program_request_bytes(program.signature, request, num_rows))
        command = Infer(pipeline.client.name(request.request_id), request.inputs, request.outputs, record.arrived_at)
        ready = await _send_and_wait(pipeline, command, num_rows, permit, record)
    pipeline.metrics.vectors_returned(num_rows, 0, ready.timings, record.exemplar)
    return Inferred(ready.arrays, ready.timings)


def _text_request_bytes(model: ServedEncoder, outputs: Collection[str], lengths: Sequence[int]) -> int:
    """Return the bytes of token ids as Python integers and of the outputs.

    Each output has one FP32 row per text, or per token for `last_hidden_state`.
    """
    rows = {name: sum(lengths) if name == "last_hidden_state" else len(lengths) for name in outputs}
    return TOKEN_BYTES * sum(lengths) + sum(4 * model.sizes[name] * number for name, number in rows.items())


def _program_request_bytes(signature: Signature, request: InferenceRequest, num_rows: int) -> int:
    """Return the bytes of the inputs and of the outputs.

    A free dimension of an output is assumed to be as large as the largest input dimension.
    """
    free = max((size for array in request.inputs.values() for size in array.shape[1:]), default=1)
    rows = (
        math.prod(free if size < 0 else size for size in spec.shape[1:]) * VALUE_BYTES.get(spec.datatype, 4)
        for spec in signature.outputs
        if spec.name in request.outputs
    )
    return sum(len(array.data) for array in request.inputs.values()) + num_rows * sum(rows)


async def _send_and_wait(
    pipeline: RequestPipeline, command: Encode | Infer, size: int, permit: Permit, record: RequestRecord
) -> ArraysReady:
    """Send the request and wait for its single result."""
    result: asyncio.Future[TimedEvent] = asyncio.get_running_loop().create_future()

    def on_event(event: TimedEvent) -> None:
        if not result.done():
            result.set_result(event)

    with pipeline.client.register(command.request_id, on_event, permit, pipeline.deadline(record)):
        predicted, sent_at = pipeline.admission.send(size), pipeline.clock()
        pipeline.worker.put(command)
        record.accepted = True
        try:
            timed_event = await result
        except asyncio.CancelledError:
            pipeline.worker.put(Abort(command.request_id))
            raise
    if timed_event is None:
        raise RequestTimeout("The request timed out before its result was ready.")
    event, now = timed_event
    if isinstance(event, RequestFailed):
        raise event.error.with_traceback(None)
    assert isinstance(event, ArraysReady), "an Encode or Infer is answered by ArraysReady"
    if predicted is not None:
        pipeline.metrics.wait_measured(predicted, now - sent_at)
    record.outcome, record.queue_seconds = "stop", event.timings.queue_seconds
    if record.trace is not None:
        started = record.arrived_at + event.timings.queue_seconds
        ends = {"queue": started, COMPUTES[type(command)]: started + event.timings.encode_seconds}
        record.phase_ends = lambda: ends
    return event
