"""Several prompts as one stream: each prompt is a request to the service, and their events are merged."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterable, Sequence
from dataclasses import replace

from app.api.streaming import Pieces
from app.generation import Accepted, ChoiceFinished, Piece, Usage

Item = tuple[int, Piece | asyncio.Task[None]]


async def merged(streams: Sequence[Pieces], choices_each: int) -> AsyncGenerator[Piece, None]:
    """Yield the events of all streams as those of one request.

    Choice c of stream s becomes choice s · choices_each + c, and usage is summed. The streams are admitted one
    after the other, so a refusal of any of them is raised before the first token.
    """
    queue: asyncio.Queue[Item] = asyncio.Queue()
    tasks: list[asyncio.Task[None]] = []
    usages: dict[int, Usage] = {}
    try:
        for stream in streams:
            yield await anext(aiter(stream))
        tasks += [_start(number, stream, queue) for number, stream in enumerate(streams)]
        num_running = len(tasks)
        while num_running:
            number, item = await queue.get()
            if isinstance(item, asyncio.Task):
                item.result()  # raises the stream's exception, if any
                num_running -= 1
            else:
                yield _renumbered(item, number, choices_each, usages)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


def _start(number: int, stream: Pieces, queue: asyncio.Queue[Item]) -> asyncio.Task[None]:
    task = asyncio.create_task(_pump(number, stream, queue))
    task.add_done_callback(lambda ended: queue.put_nowait((number, ended)))
    return task


async def _pump(number: int, stream: Pieces, queue: asyncio.Queue[Item]) -> None:
    async for piece in stream:
        queue.put_nowait((number, piece))


def _renumbered(piece: Piece, number: int, choices_each: int, usages: dict[int, Usage]) -> Piece:
    if isinstance(piece, Accepted):
        return piece
    choice = number * choices_each + piece.choice
    if not isinstance(piece, ChoiceFinished):
        return replace(piece, choice=choice)
    usages[number] = piece.usage
    return replace(piece, choice=choice, usage=_sum(usages.values()))


def _sum(usages: Iterable[Usage]) -> Usage:
    each = list(usages)
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in each),
        cached_tokens=sum(usage.cached_tokens for usage in each),
        completion_tokens=sum(usage.completion_tokens for usage in each),
    )
