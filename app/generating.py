"""Generation with a decoder: the course of one request from its prompt to its last text delta."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

from app.admission import Permit
from app.answer import Answer
from app.desk import Course, Desk
from app.errors import RequestTimeout
from app.generation import Accepted, ChoiceFinished, GenerationRequest, Piece, TextDelta
from app.messages import Abort, ArraysReady, Generate, RequestFailed, TokensReady
from app.post import Letter
from app.reading import read
from app.served import ServedDecoder

Inbox = asyncio.Queue[Letter]


async def generate(desk: Desk, model: ServedDecoder, request: GenerationRequest, course: Course) -> AsyncGenerator[Piece, None]:
    """Yield all stream events of one request; `Service.generate` documents them."""
    with desk.admission.permit() as permit:
        token_ids = await desk.read(read, model, request)
        order = Generate(desk.post.name(request.request_id), token_ids, request.params, course.arrived_at)
        answer = Answer(order, model.tokenizer, desk.metrics, continues_prompt=request.messages is None)
        with _sent(desk, answer, order, permit, desk.deadline(course)) as inbox:
            course.accepted = True
            yield Accepted(order.token_ids)
            for echo in _echoes(request, model, order):
                yield echo
            while not answer.finished:
                for piece in _pieces(desk, answer, order, await inbox.get()):
                    yield piece
        desk.admission.observe(answer.num_prompt_tokens, answer.num_cached_tokens, answer.num_completion_tokens)
        course.outcome = answer.outcome


@contextmanager
def _sent(desk: Desk, answer: Answer, order: Generate, permit: Permit, deadline: float) -> Iterator[Inbox]:
    """Send the request to the worker and yield the queue of its events. If the block ends early, abort the request."""
    inbox: Inbox = asyncio.Queue()
    with desk.post.expecting(order.request_id, inbox.put_nowait, permit, deadline):
        answer.foretell(desk.admission.send(len(order.token_ids)), desk.clock())
        desk.worker.put(order)
        try:
            yield inbox
        finally:
            if not answer.finished:
                desk.worker.put(Abort(order.request_id))


def _pieces(desk: Desk, answer: Answer, order: Generate, letter: Letter) -> Iterator[Piece]:
    if letter is None:
        last = list(answer.end("timeout", desk.clock()))
        if not answer.num_completion_tokens:
            raise RequestTimeout("The request timed out before its first token.")
        yield from last
        return
    event, now = letter
    if isinstance(event, RequestFailed):
        raise event.error.with_traceback(None)
    assert not isinstance(event, ArraysReady), "ArraysReady is the result of an encoder"
    for piece in answer.take(event, now):
        if isinstance(piece, ChoiceFinished) and isinstance(event, TokensReady):
            desk.worker.put(Abort(order.request_id, reason="stop", choice=piece.choice))
        yield piece


def _echoes(request: GenerationRequest, model: ServedDecoder, order: Generate) -> Iterator[TextDelta]:
    """Yield the prompt's text once for each choice if the request has `echo` set."""
    if request.echo:
        text = model.tokenizer.decode(order.token_ids) if request.prompt is None else request.prompt
        yield from (TextDelta(choice, text) for choice in range(request.params.n))
