"""An encoder's and a program's answers: one request's way from its texts or tensors to the arrays that come back, all at once."""

from __future__ import annotations

import asyncio

from app.admission import Permit
from app.desk import Course, Desk
from app.encoding import Encoded, EncodingRequest, InferenceRequest, Inferred
from app.errors import RequestTimeout
from app.messages import Abort, ArraysReady, Encode, Infer, RequestFailed
from app.post import Letter
from app.reading_texts import check_texts, is_short, read_texts
from app.served import ServedEncoder, ServedProgram


async def encode(desk: Desk, model: ServedEncoder, request: EncodingRequest, course: Course) -> Encoded:
    """Short texts are read here and now: the way to another thread and back takes longer."""
    check_texts(model, request)
    with desk.admission.permit() as permit:
        texts = read_texts(model, request) if is_short(request) else await desk.read(read_texts, model, request)
        lengths = tuple(len(text.token_ids) for text in texts)
        name = desk.post.name(request.request_id)
        order = Encode(name, texts, request.outputs, course.arrived_at, request.normalize, request.dimensions)
        permit.hold(sum(lengths))
        ready = await _answered(desk, order, sum(lengths), permit, course)
    desk.metrics.encoded(len(texts), sum(lengths), ready.timings)
    return Encoded(ready.arrays, ready.timings, lengths)


async def infer(desk: Desk, program: ServedProgram, request: InferenceRequest, course: Course) -> Inferred:
    """Rows of the batch are to a program what tokens are to an encoder."""
    num_rows = request.inputs[program.signature.inputs[0].name].shape[0]
    with desk.admission.permit() as permit:
        order = Infer(desk.post.name(request.request_id), request.inputs, request.outputs, course.arrived_at)
        ready = await _answered(desk, order, num_rows, permit, course)
    desk.metrics.encoded(num_rows, 0, ready.timings)
    return Inferred(ready.arrays, ready.timings)


async def _answered(desk: Desk, order: Encode | Infer, size: int, permit: Permit, course: Course) -> ArraysReady:
    """Sends the order and waits for its one answer."""
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
        raise RequestTimeout("The request timed out before it was answered.")
    event, now = letter
    if isinstance(event, RequestFailed):
        raise event.error.with_traceback(None)
    assert isinstance(event, ArraysReady), "no text is generated from this"
    if predicted is not None:
        desk.metrics.waited(predicted, now - sent_at)
    course.outcome = "stop"
    return event
