"""Divides a batch of texts into lanes: whole texts that one thread computes alone.

Threads then need not synchronize at every operation. Pure arithmetic, without torch. A text that is longer than
its share is computed first, by all threads together. The rest is divided into lanes of about equal cost, several
for each thread: a thread that loses its core for a while leaves the lanes that it has not started to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

# Fewest tokens of a lane. Each lane reads all weights, and a product of fewer rows would wait for them.
LEAST_TOKENS = 64
MOST_A_THREAD = 4  # lanes; more of them would make smaller products and balance little better
# tokens; the cost of a pair if it was not measured: then a text of 256 tokens spends half of its time on pairs
USUAL_PAIR = 1 / 256
# Load of the busiest thread relative to the mean. Beyond this, dividing every operation is faster, even though
# threads wait for each other.
UNEVEN = 1.25


@dataclass(frozen=True, slots=True)
class Cut:
    """A lane plan.

    All threads together compute the texts `order[:together]`. After these, lane i has the texts
    `order[ends[i - 1]:ends[i]]`, where the first lane begins at `together`.
    """

    order: tuple[int, ...]
    together: int
    ends: tuple[int, ...] = ()

    @classmethod
    def none(cls, texts: int) -> Cut:
        """Return the plan without lanes: all threads compute all texts together, in arrival order."""
        return cls(tuple(range(texts)), texts)


@dataclass(frozen=True, slots=True)
class Lanes:
    """Plans lanes. `pair_tokens` is the cost of a pair of tokens of one text, in tokens."""

    pair_tokens: float = USUAL_PAIR
    least_tokens: int = LEAST_TOKENS
    most_a_thread: int = MOST_A_THREAD

    def cut(self, lengths: Sequence[int], threads: int) -> Cut:
        """Return the plan for texts of `lengths` tokens."""
        tokens = sum(lengths)
        if threads == 1 or tokens < threads * self.least_tokens or len(lengths) < threads:
            return Cut.none(len(lengths))
        order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
        costs = [self.cost(lengths[text]) for text in order]
        left, room = sum(costs), room_of_lane(sum(lengths), threads)
        for together in range(len(lengths) - threads + 1):
            share = UNEVEN * left / threads
            number = min(threads * self.most_a_thread, tokens // self.least_tokens, len(lengths) - together)
            number -= number % threads  # a multiple of the number of threads
            if number == 0:
                break
            if costs[together] <= share:
                lanes = _even(costs, [lengths[text] for text in order], together, number)
                if _busiest(lanes, threads) <= share and max(lane.tokens for lane in lanes) <= room:
                    return _cut(order, together, lanes)
            left -= costs[together]
            tokens -= lengths[order[together]]
        return Cut.none(len(lengths))

    def cost(self, length: int) -> float:
        """Return the cost of a text of `length` tokens, in tokens."""
        return length + self.pair_tokens * length * length


USUAL = Lanes()


def room_of_lane(tokens: int, threads: int) -> int:
    """Return the most tokens that a lane can have in a batch of `tokens` tokens."""
    return int(UNEVEN * tokens / threads) + 1


@dataclass(frozen=True, slots=True)
class _Lane:
    cost: float
    tokens: int
    texts: list[int]  # indices in the order


def _even(costs: Sequence[float], lengths: Sequence[int], first: int, number: int) -> list[_Lane]:
    """Distribute the texts from `first` on over `number` lanes, each text to the cheapest lane so far.

    The costliest lane comes first.
    """
    heap = [(0.0, lane) for lane in range(number)]
    texts: list[list[int]] = [[] for _ in range(number)]
    for at in range(first, len(costs)):
        cost, lane = heap[0]
        texts[lane].append(at)
        heapreplace(heap, (cost + costs[at], lane))
    whole = sorted(heap, key=lambda each: (-each[0], each[1]))
    return [_Lane(cost, sum(lengths[at] for at in texts[lane]), texts[lane]) for cost, lane in whole if texts[lane]]


def _busiest(lanes: Sequence[_Lane], threads: int) -> float:
    """Return the load of the busiest thread if each thread takes the next lane when it is free."""
    loads = [0.0] * threads
    for lane in lanes:
        heapreplace(loads, loads[0] + lane.cost)
    return max(loads)


def _cut(order: Sequence[int], together: int, lanes: Sequence[_Lane]) -> Cut:
    texts, ends = list(order[:together]), []
    for lane in lanes:
        texts += (order[at] for at in lane.texts)
        ends.append(len(texts))
    return Cut(tuple(texts), together, tuple(ends))
