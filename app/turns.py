"""Prediction of the time until texts are encoded: adds up the steps before them, from token counts alone.

Step times are the current ones and the order is the engine's. A program's rows are served first come, first
served. For texts, half of each step belongs to the oldest request, and the rest to requests of the smallest size
class, first come, first served.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.texts import size_class
from app.hardware.tempo import Tempo
from app.measured import Snapshot


def answer_seconds(now: Snapshot, newcomers: Sequence[tuple[float, int]], moment: float) -> float:
    """Return the seconds from `moment` until all texts of the last of `newcomers` are encoded.

    Newcomers are requests that the snapshot does not include yet, as (time sent, tokens). The current step began
    with the snapshot, or with the first newcomer if the worker was idle, and takes in no other request.
    """
    assert now.tempo is not None, "the caller checks that step times are known"
    began, queue = now.stepped_at, [tokens for tokens in now.queue if tokens > 0]
    if not queue:
        began, first = newcomers[0]
        queue, newcomers = [first], newcomers[1:]
        if not newcomers:
            return max(_until_done(now.tempo, queue) - (moment - began), 0.0)
    under_way = _step(queue, now.tempo)
    ends = max(began + now.tempo.encode(under_way), moment)  # an overdue step may end at any moment
    queue += [tokens for _, tokens in newcomers]
    return ends - moment + _until_done(now.tempo, queue)


def _step(queue: list[int], tempo: Tempo) -> int:
    """Take one step's tokens from the queue and return their number."""
    budget = tempo.max_tokens
    room = budget - _take(queue, 0, budget if tempo.oldest_first else budget // 2)
    for index in sorted(range(len(queue)), key=lambda index: _class(queue[index], tempo)):
        if not room:
            break
        room -= _take(queue, index, room)
    return budget - room


def _class(tokens: int, tempo: Tempo) -> int:
    """Return the size class of a request. Smaller classes go first; within a class, first come, first served."""
    return 0 if tempo.oldest_first else size_class(tokens, tempo.max_tokens)


def _take(queue: list[int], index: int, room: int) -> int:
    tokens = min(queue[index], room)
    queue[index] -= tokens
    return tokens


def _until_done(tempo: Tempo, queue: Sequence[int]) -> float:
    """Return the seconds until the last request of the queue has all its texts.

    Before it come the requests of no larger class (`own` counts their tokens and its own). Meanwhile the other
    half of each step goes to older requests of larger classes, as long as they have tokens left.
    """
    budget, total = tempo.max_tokens, sum(queue)
    last = _class(queue[-1], tempo)
    own = sum(tokens for tokens in queue if _class(tokens, tempo) <= last)
    before = own + min(own, total - own)
    full = (before - 1) // budget
    return full * tempo.encode(budget) + tempo.encode(min(budget, total - full * budget))
