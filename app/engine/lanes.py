"""How a batch of texts is cut into lanes: whole texts that one thread computes by itself, so that threads need not meet at every operation.

Pure arithmetic, without torch. A text that is longer than its share is computed first, by all threads together; the rest goes into lanes
of about the same cost, several for each thread: who loses its core for a while leaves those that it has not begun to the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace

# Tokens of a lane at least: each lane reads all weights, which products of fewer rows would wait for.
LEAST_TOKENS = 64
MOST_A_THREAD = 4  # lanes: with more there would be less to multiply at a time and little more to share out
USUAL_PAIR = 1 / 256  # tokens that a pair costs where nothing was measured: half of such a text's time goes to its pairs
# Of the busiest thread over the mean: beyond, dividing every operation is quicker although threads wait for each other.
UNEVEN = 1.25


@dataclass(frozen=True, slots=True)
class Cut:
    """Texts `order[:together]` are computed by all threads together; lane i has texts `order[ends[i - 1]:ends[i]]`, from `together` on."""

    order: tuple[int, ...]
    together: int
    ends: tuple[int, ...] = ()

    @classmethod
    def none(cls, texts: int) -> Cut:
        """All together, as they came."""
        return cls(tuple(range(texts)), texts)


@dataclass(frozen=True, slots=True)
class Lanes:
    """The rule. `pair_tokens`: what a pair of tokens of one text costs, in tokens."""

    pair_tokens: float = USUAL_PAIR
    least_tokens: int = LEAST_TOKENS
    most_a_thread: int = MOST_A_THREAD

    def cut(self, lengths: Sequence[int], threads: int) -> Cut:
        """Of texts of so many tokens each."""
        tokens = sum(lengths)
        if threads == 1 or tokens < threads * self.least_tokens or len(lengths) < threads:
            return Cut.none(len(lengths))
        order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
        costs = [self.cost(lengths[text]) for text in order]
        left, room = sum(costs), room_of_lane(sum(lengths), threads)
        for together in range(len(lengths) - threads + 1):
            share = UNEVEN * left / threads
            number = min(threads * self.most_a_thread, tokens // self.least_tokens, len(lengths) - together)
            number -= number % threads  # as many for each
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
        return length + self.pair_tokens * length * length


USUAL = Lanes()


def room_of_lane(tokens: int, threads: int) -> int:
    """Tokens of the longest lane that a batch of so many tokens may be cut into."""
    return int(UNEVEN * tokens / threads) + 1


@dataclass(frozen=True, slots=True)
class _Lane:
    cost: float
    tokens: int
    texts: list[int]  # places in the order


def _even(costs: Sequence[float], lengths: Sequence[int], first: int, number: int) -> list[_Lane]:
    """So many lanes of the texts from `first` on, each text where there is least so far; the most costly lane first."""
    heap = [(0.0, lane) for lane in range(number)]
    texts: list[list[int]] = [[] for _ in range(number)]
    for at in range(first, len(costs)):
        cost, lane = heap[0]
        texts[lane].append(at)
        heapreplace(heap, (cost + costs[at], lane))
    whole = sorted(heap, key=lambda each: (-each[0], each[1]))
    return [_Lane(cost, sum(lengths[at] for at in texts[lane]), texts[lane]) for cost, lane in whole if texts[lane]]


def _busiest(lanes: Sequence[_Lane], threads: int) -> float:
    """What the busiest of so many threads computes, each claiming the next lane when it is free."""
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
