"""Divides a batch of texts into lanes, whole texts that one thread computes alone, and holds it at fixed addresses.

Threads then need not synchronize at every operation. A text that is longer than its share is computed first, by all
threads together. The rest is divided into lanes of about equal cost, several for each thread: a thread that loses its
core for a while leaves the lanes that it has not started to the others. Replayed operations read the batch at its
fixed addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate

from torch import Tensor

from app.engine.encoder.batching import TextSpan
from app.models.encoders.config import positions_of
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, EncodeContext
from armature_kernels.attention.texts import TextStarts, attend_texts
from armature_kernels.native.arguments import TextBuffers
from armature_kernels.native.memory import Int64Buffer

# Fewest tokens of a lane. Each lane reads all weights, and a product of fewer rows would wait for them.
MIN_LANE_TOKENS = 64
MAX_LANES_PER_THREAD = 4  # lanes; more of them would make smaller products and balance little better
# tokens; the cost of a pair if it was not measured: then a text of 256 tokens spends half of its time on pairs
DEFAULT_PAIR_TOKENS = 1 / 256
# Load of the busiest thread relative to the mean. Beyond this, dividing every operation is faster, even though
# threads wait for each other.
MAX_IMBALANCE = 1.25


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane plan.

    All threads together compute the texts `order[:together]`. After these, lane i has the texts
    `order[ends[i - 1]:ends[i]]`, where the first lane begins at `together`.
    """

    order: tuple[int, ...]
    together: int
    ends: tuple[int, ...] = ()

    @classmethod
    def none(cls, texts: int) -> LanePlan:
        """Return the plan without lanes: all threads compute all texts together, in arrival order."""
        return cls(tuple(range(texts)), texts)


@dataclass(frozen=True, slots=True)
class LanePlanner:
    """Plans lanes. `pair_tokens` is the cost of a pair of tokens of one text, in tokens."""

    pair_tokens: float = DEFAULT_PAIR_TOKENS
    min_lane_tokens: int = MIN_LANE_TOKENS
    max_lanes_per_thread: int = MAX_LANES_PER_THREAD

    def plan(self, lengths: Sequence[int], threads: int) -> LanePlan:
        """Return the plan for texts of `lengths` tokens."""
        tokens = sum(lengths)
        if threads == 1 or tokens < threads * self.min_lane_tokens or len(lengths) < threads:
            return LanePlan.none(len(lengths))
        order = sorted(range(len(lengths)), key=lambda text: -lengths[text])
        costs = [self.cost(lengths[text]) for text in order]
        left, max_tokens = sum(costs), max_lane_tokens(sum(lengths), threads)
        for together in range(len(lengths) - threads + 1):
            share = MAX_IMBALANCE * left / threads
            num_lanes = min(
                threads * self.max_lanes_per_thread, tokens // self.min_lane_tokens, len(lengths) - together
            )
            num_lanes -= num_lanes % threads  # a multiple of the number of threads
            if num_lanes == 0:
                break
            if costs[together] <= share:
                lanes = _balanced_lanes(costs, [lengths[text] for text in order], together, num_lanes)
                if _max_thread_load(lanes, threads) <= share and max(lane.tokens for lane in lanes) <= max_tokens:
                    return _lane_plan(order, together, lanes)
            left -= costs[together]
            tokens -= lengths[order[together]]
        return LanePlan.none(len(lengths))

    def cost(self, length: int) -> float:
        """Return the cost of a text of `length` tokens, in tokens."""
        return length + self.pair_tokens * length * length


DEFAULT_PLANNER = LanePlanner()


def max_lane_tokens(tokens: int, threads: int) -> int:
    """Return the most tokens that a lane can have in a batch of `tokens` tokens."""
    return int(MAX_IMBALANCE * tokens / threads) + 1


@dataclass(frozen=True, slots=True)
class _Lane:
    cost: float
    tokens: int
    texts: list[int]  # indices in the order


def _balanced_lanes(costs: Sequence[float], lengths: Sequence[int], first: int, num_lanes: int) -> list[_Lane]:
    """Distribute the texts from `first` on over `num_lanes` lanes, each text to the cheapest lane so far.

    The costliest lane comes first.
    """
    heap = [(0.0, lane) for lane in range(num_lanes)]
    texts: list[list[int]] = [[] for _ in range(num_lanes)]
    for at in range(first, len(costs)):
        cost, lane = heap[0]
        texts[lane].append(at)
        heapreplace(heap, (cost + costs[at], lane))
    whole = sorted(heap, key=lambda each: (-each[0], each[1]))
    return [_Lane(cost, sum(lengths[at] for at in texts[lane]), texts[lane]) for cost, lane in whole if texts[lane]]


def _max_thread_load(lanes: Sequence[_Lane], threads: int) -> float:
    """Return the load of the busiest thread if each thread takes the next lane when it is free."""
    loads = [0.0] * threads
    for lane in lanes:
        heapreplace(loads, loads[0] + lane.cost)
    return max(loads)


def _lane_plan(order: Sequence[int], together: int, lanes: Sequence[_Lane]) -> LanePlan:
    texts, ends = list(order[:together]), []
    for lane in lanes:
        texts += (order[at] for at in lane.texts)
        ends.append(len(texts))
    return LanePlan(tuple(texts), together, tuple(ends))


class TextBatch:
    """Texts packed end to end; also the `Attend` of the layers that read them."""

    def __init__(self, max_tokens: int, num_types: int, padding_id: int | None = None) -> None:
        """Allocate buffers for `max_tokens` tokens.

        If the model has one token type, the types of the tokenizer are ignored. `padding_id` is that of the config.
        """
        self.max_tokens, self.num_types, self._padding_id = max_tokens, num_types, padding_id
        self._token_ids, self._positions, self._selected, self._starts = (
            Int64Buffer(max_tokens),
            Int64Buffer(max_tokens),
            Int64Buffer(max_tokens),
            Int64Buffer(max_tokens + 1),
        )
        self._type_ids = Int64Buffer(max_tokens) if num_types else None
        self._texts = TextStarts(max_tokens, max_tokens)
        self.num_tokens = 0
        self.num_selected: int | None = None
        self.starts = self._starts.tensor[:1]
        self.rows: tuple[int, ...] = ()  # the selected tokens

    def fill(self, spans: Sequence[TextSpan]) -> None:
        """Write these texts to the buffers. All tokens are selected until `select_rows` is called."""
        token_ids: list[int] = []
        positions: list[int] = []
        for span in spans:
            token_ids += span.text.token_ids
            positions += positions_of(span.text.token_ids, self._padding_id)
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        assert starts[-1] <= self.max_tokens, "a step has a budget"
        self.num_tokens, self.num_selected, self.rows = starts[-1], None, ()
        self._token_ids.fill(token_ids)
        self._positions.fill(positions)
        if self._type_ids is not None and self.num_types > 1:
            self._type_ids.fill([one for span in spans for one in span.text.type_ids or (0,) * span.num_tokens])
        self.starts = self._starts.fill(starts)
        self._texts.fill(starts)

    def select_rows(self, rows: Tensor | None) -> Tensor | None:
        """Select the tokens, in rising order, whose last hidden states are needed.

        Returns them in the batch's own buffer.
        """
        self.rows = () if rows is None else tuple(rows.tolist())
        self.num_selected = None if rows is None else len(self.rows)
        return None if rows is None else self._selected.fill(list(self.rows))

    @property
    def text_starts(self) -> tuple[int, ...]:
        """Values of `starts` as integers."""
        return self._texts.starts

    def context(self, tokens: int) -> EncodeContext:
        """Return the context of a forward pass over the first `tokens` tokens."""
        types = None if self._type_ids is None else self._type_ids.tensor[:tokens]
        return EncodeContext(self._token_ids.tensor[:tokens], self._positions.tensor[:tokens], types, self.starts, self)

    def selected_rows(self, rows: int | None) -> Tensor | None:
        """Return the buffer of the first `rows` selected tokens, or None for all."""
        return None if rows is None else self._selected.tensor[:rows]

    def addresses(self, selected_only: bool) -> TextBuffers:
        """Return the addresses of the buffers; `selected_only` is True if only the selected tokens are computed."""
        types = None if self._type_ids is None else self._type_ids.address
        selected = self._selected.address if selected_only else None
        return TextBuffers(self._token_ids.address, self._positions.address, types, selected, self._texts.address)

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Attend within each text, as `Attend` defines it."""
        return attend_texts(heads, self._texts, spec)
