"""How long texts wait for their answer: the steps that lie before it, with what steps take now, reckoned from counts of tokens alone.

The order is the engine's: a program's rows go as they came; of texts (`engine/texts.py`) half of each step belongs to the oldest request,
the rest to those of the smallest size class, as they came.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.engine.texts import size_class
from app.hardware.tempo import Tempo
from app.measured import Snapshot


def answer_seconds(now: Snapshot, newcomers: Sequence[tuple[float, int]], moment: float) -> float:
    """What the last of `newcomers` waits from `moment` on for all of its texts.

    Newcomers are those that the snapshot does not know yet, as the moments of their sending and their tokens. The step under way began
    with the snapshot, or with the first of them where there was nothing to do, and takes in nobody.
    """
    assert now.tempo is not None, "asked for only where it is known what steps take"
    began, queue = now.stepped_at, [tokens for tokens in now.queue if tokens > 0]
    if not queue:
        began, first = newcomers[0]
        queue, newcomers = [first], newcomers[1:]
        if not newcomers:
            return max(_until_done(now.tempo, queue) - (moment - began), 0.0)
    under_way = _step(queue, now.tempo)
    ends = max(began + now.tempo.encode(under_way), moment)  # one that is late may end any moment
    queue += [tokens for _, tokens in newcomers]
    return ends - moment + _until_done(now.tempo, queue)


def _step(queue: list[int], tempo: Tempo) -> int:
    """One step's tokens, taken from the queue."""
    budget = tempo.max_tokens
    room = budget - _take(queue, 0, budget if tempo.oldest_first else budget // 2)
    for index in sorted(range(len(queue)), key=lambda index: _class(queue[index], tempo)):
        if not room:
            break
        room -= _take(queue, index, room)
    return budget - room


def _class(tokens: int, tempo: Tempo) -> int:
    """Requests of one class go as they came, smaller classes before larger ones."""
    return 0 if tempo.oldest_first else size_class(tokens, tempo.max_tokens)


def _take(queue: list[int], index: int, room: int) -> int:
    tokens = min(queue[index], room)
    queue[index] -= tokens
    return tokens


def _until_done(tempo: Tempo, queue: Sequence[int]) -> float:
    """Until the last of the queue has all its texts.

    Before it come those that are no larger by class, `own` included; meanwhile the other half of each step goes to older ones that are,
    as long as there is anything of them.
    """
    budget, total = tempo.max_tokens, sum(queue)
    last = _class(queue[-1], tempo)
    own = sum(tokens for tokens in queue if _class(tokens, tempo) <= last)
    before = own + min(own, total - own)
    full = (before - 1) // budget
    return full * tempo.encode(budget) + tempo.encode(min(budget, total - full * budget))
