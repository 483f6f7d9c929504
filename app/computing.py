"""Requests to encoders and exported programs, from their texts or tensors to the arrays returned, all at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Collection, Sequence

from app.admission import Permit
from app.desk import Course, Desk
from app.encoding import Encoded, EncodingRequest, InferenceRequest, Inferred
from app.errors import RequestTimeout
from app.messages import Abort, ArraysReady, Encode, Infer, RequestFailed, Signature
from app.post import Letter
from app.reading_texts import check_texts, is_short, read_texts
from app.served import ServedEncoder, ServedProgram

TOKEN_BYTES = 36  # a token id in a tuple: a pointer and an int object
# Bytes of a value by datatype; all others have 4.
VALUE_BYTES = {"BOOL": 1, "UINT8": 1, "INT8": 1, "INT16": 2, "FP16": 2, "BF16": 2, "INT64": 8, "FP64": 8}


async def encode(desk: Desk, model: ServedEncoder, request: EncodingRequest, course: Course) -> Encoded:
    """Tokenize the texts, send them to the worker and return its arrays.

    Short texts are tokenized on the event loop, because a round trip to another thread takes longer.
    """
    check_texts(model, request)
    with desk.admission.permit() as permit:
        texts = read_texts(model, request) if is_short(request) else await desk.read(read_texts, model, request)
        lengths = tuple(len(text.token_ids) for text in texts)
        name = desk.post.name(request.request_id)
        order = Encode(name, texts, request.outputs, course.arrived_at, request.normalize, request.dimensions)
        permit.hold(_bytes_of_texts(model, request.outputs, lengths))
        ready = await _answered(desk, order, sum(lengths), permit, course)
    desk.metrics.encoded(len(texts), sum(lengths), ready.timings)
    return Encoded(ready.arrays, ready.timings, lengths)


async def infer(desk: Desk, program: ServedProgram, request: InferenceRequest, course: Course) -> Inferred:
    """Send a program's inputs to the worker and return its arrays.

    Rows of the batch are counted as an encoder's tokens are.
    """
    num_rows = request.inputs[program.signature.inputs[0].name].shape[0]
    with desk.admission.permit() as permit:
        permit.hold(_bytes_of_rows(program.signature, request, num_rows))
        order = Infer(desk.post.name(request.request_id), request.inputs, request.outputs, course.arrived_at)
        ready = await _answered(desk, order, num_rows, permit, course)
    desk.metrics.encoded(num_rows, 0, ready.timings)
    return Inferred(ready.arrays, ready.timings)


def _bytes_of_texts(model: ServedEncoder, outputs: Collection[str], lengths: Sequence[int]) -> int:
    """Return the bytes of token ids as Python integers and of the outputs.

    Each output has one FP32 row per text, or per token for `last_hidden_state`.
    """
    rows = {name: sum(lengths) if name == "last_hidden_state" else len(lengths) for name in outputs}
    return TOKEN_BYTES * sum(lengths) + sum(4 * model.sizes[name] * number for name, number in rows.items())


def _bytes_of_rows(signature: Signature, request: InferenceRequest, num_rows: int) -> int:
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


async def _answered(desk: Desk, order: Encode | Infer, size: int, permit: Permit, course: Course) -> ArraysReady:
    """Send the request and wait for its single result."""
    answer: asyncio.Future[Letter] = asyncio.get_running_loop().create_future()

    def tell(letter: Letter) -> None:
        if not answer.done():
            answer.set_result(letter)

    with desk.post.expecting(order.request_id, tell, permit, desk.deadline(course)):
        predicted, sent_at = desk.admission.send(size), desk.clock()
        desk.worker.put(order)
        course.accepted = True
        try:
            letter = await answer
        except asyncio.CancelledError:
            desk.worker.put(Abort(order.request_id))
            raise
    if letter is None:
        raise RequestTimeout("The request timed out before its result was ready.")
    event, now = letter
    if isinstance(event, RequestFailed):
        raise event.error.with_traceback(None)
    assert isinstance(event, ArraysReady), "an Encode or Infer is answered by ArraysReady"
    if predicted is not None:
        desk.metrics.waited(predicted, now - sent_at)
    course.outcome = "stop"
    return event
