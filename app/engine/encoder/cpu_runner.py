"""Runs a batch of texts on a CPU: fills buffers, runs the layers, pools, and returns the rows of each text as bytes.

The queue decides which texts are in the batch. The layers are recorded once and replayed natively, for any number of
tokens up to the recorded number. This saves more than interpreter time: between two operations the worker needs the
interpreter lock, which a busy event loop may hold for milliseconds. The recording covers everything from token ids to
hidden states. Only values at fixed addresses and row counts change from step to step.

All threads together have one recording, whose operations they divide. Each thread also has a smaller one, with which
it computes lanes. A model that uses operations outside the native library stays eager.
"""

from __future__ import annotations

import ctypes
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapreplace
from itertools import accumulate
from operator import itemgetter

import torch
from torch import Tensor

from app.engine.encoder.batching import TextSpan
from app.models.encoders.config import positions_of
from app.models.encoders.encoder import Encoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, EncodeContext
from armature_kernels.attention.texts import TextStarts, attend_texts
from armature_kernels.elementwise.pooling import unit_rows
from armature_kernels.native.arguments import LaneOperations, LanesArguments, TextBuffers
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import Int64Buffer
from armature_kernels.native.recording import (
    NotRecordable,
    RecordedOperations,
    RecordedRowCounts,
    ResultPool,
    record_dry_run,
)

# Fewest tokens of a lane. Each lane reads all weights, and a product of fewer rows would wait for them.
MIN_LANE_TOKENS = 64
MAX_LANES_PER_THREAD = 4  # lanes; more of them would make smaller products and balance little better
# tokens; the cost of a pair if it was not measured: then a text of 256 tokens spends half of its time on pairs
DEFAULT_PAIR_TOKENS = 1 / 256
# Load of the busiest thread relative to the mean. Beyond this, dividing every operation is faster, even though
# threads wait for each other.
MAX_IMBALANCE = 1.25
MIN_RECORDED_TOKENS = 16  # a model that cannot be recorded with this few tokens is never recorded
_MAX_LANES = 4096
HiddenFunction = Callable[[EncodeContext, Tensor | None], Tensor]


@dataclass(frozen=True, slots=True)
class LanePlan:
    """A lane plan: all threads compute the texts `order[:together]`, then lane i `order[ends[i - 1]:ends[i]]`."""

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
        return length + self.pair_tokens * length * length


DEFAULT_PLANNER = LanePlanner()


def max_lane_tokens(tokens: int, threads: int) -> int:
    return int(MAX_IMBALANCE * tokens / threads) + 1


@dataclass(frozen=True, slots=True)
class _Lane:
    cost: float
    tokens: int
    texts: list[int]  # indices in the order


def _balanced_lanes(costs: Sequence[float], lengths: Sequence[int], first: int, num_lanes: int) -> list[_Lane]:
    """Distribute the texts from `first` on, each to the cheapest lane so far; the costliest lane comes first."""
    heap = [(0.0, lane) for lane in range(num_lanes)]
    texts: list[list[int]] = [[] for _ in range(num_lanes)]
    for at in range(first, len(costs)):
        cost, lane = heap[0]
        texts[lane].append(at)
        heapreplace(heap, (cost + costs[at], lane))
    whole = sorted(heap, key=lambda each: (-each[0], each[1]))
    return [_Lane(cost, sum(lengths[at] for at in texts[lane]), texts[lane]) for cost, lane in whole if texts[lane]]


def _max_thread_load(lanes: Sequence[_Lane], threads: int) -> float:
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
        """Allocate buffers for `max_tokens` tokens. With one token type, the tokenizer's types are ignored."""
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
        """Select the tokens, in rising order, whose last hidden states are needed, in the batch's own buffer."""
        self.rows = () if rows is None else tuple(rows.tolist())
        self.num_selected = None if rows is None else len(self.rows)
        return None if rows is None else self._selected.fill(list(self.rows))

    @property
    def text_starts(self) -> tuple[int, ...]:
        return self._texts.starts

    def context(self, tokens: int) -> EncodeContext:
        types = None if self._type_ids is None else self._type_ids.tensor[:tokens]
        return EncodeContext(self._token_ids.tensor[:tokens], self._positions.tensor[:tokens], types, self.starts, self)

    def selected_rows(self, rows: int | None) -> Tensor | None:
        return None if rows is None else self._selected.tensor[:rows]

    def addresses(self, selected_only: bool) -> TextBuffers:
        """Return the addresses of the buffers; `selected_only` is True if only the selected tokens are computed."""
        types = None if self._type_ids is None else self._type_ids.address
        selected = self._selected.address if selected_only else None
        return TextBuffers(self._token_ids.address, self._positions.address, types, selected, self._texts.address)

    def __call__(self, layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        """Attend within each text, as `Attend` defines it."""
        return attend_texts(heads, self._texts, spec)


class _LayerRecording:
    """Recordings of the layers over one batch and one pool: one of all tokens, one of selected tokens."""

    def __init__(self, hidden: HiddenFunction, max_tokens: int, num_types: int) -> None:
        self._hidden, self.max_tokens = hidden, max_tokens
        self._batch = TextBatch(max_tokens + 1, num_types)  # the recording contains both numbers, which must differ
        self._pool = ResultPool()
        self._recordings: dict[bool, tuple[RecordedOperations, RecordedRowCounts]] = {}

    def steps(self, selected_only: bool) -> LaneOperations:
        """Return the recorded steps, recording them if needed. Raises `NotRecordable`."""
        recorded, resizing = self._recordings.get(selected_only) or self._record(selected_only)
        result: Tensor = recorded.result
        assert result.is_contiguous() and result.dtype == torch.float32, "rows of the hidden size"
        places = resizing.addresses
        return LaneOperations(
            self._batch.addresses(selected_only),
            result.data_ptr(),
            recorded.address,
            len(recorded),
            ctypes.addressof(places),
            len(places),
        )

    @property
    def hidden_size(self) -> int:
        recorded, _ = next(iter(self._recordings.values()))
        return int(recorded.result.shape[1])

    def _record(self, selected_only: bool) -> tuple[RecordedOperations, RecordedRowCounts]:
        """Record with the largest number of tokens: a form may use another implementation for large products."""
        sizes: tuple[int, ...] = (self.max_tokens + 1, self.max_tokens) if selected_only else (self.max_tokens,)
        recorded = record_dry_run(
            self._pool,
            lambda: self._hidden(
                self._batch.context(sizes[0]), self._batch.selected_rows(self.max_tokens if selected_only else None)
            ),
        )
        self._recordings[selected_only] = recorded, RecordedRowCounts(recorded.operations, sizes)
        return self._recordings[selected_only]


class EncoderReplay:
    """The recordings of one model and one batch, for the worker thread. `hidden` computes the model's layers."""

    def __init__(
        self,
        hidden: HiddenFunction,
        batch: TextBatch,
        max_tokens: int,
        off_reason: str = "",
        planner: LanePlanner = DEFAULT_PLANNER,
    ) -> None:
        """Start without recordings. `off_reason` is the reason to record nothing.

        Steps of more than `max_tokens` tokens are not recorded: interpreter time is negligible there, and results need
        much memory.
        """
        self.reason = off_reason  # reason why every step is eager; empty if steps are replayed
        self.num_runs = 0  # number of steps that were replayed
        self.num_lanes = 0  # number of lanes in all of them
        self._hidden, self._batch = hidden, batch
        self.planner = planner
        self._max_tokens = min(batch.max_tokens, max_tokens)
        # key: number of threads; the shared recording comes first, then one for each thread
        self._layer_recordings: dict[int, list[_LayerRecording]] = {}
        # key: number of threads, and True if only selected tokens are computed
        self._steps: dict[tuple[int, bool], ctypes.Array[LaneOperations]] = {}
        self._result = torch.empty(0)
        self._texts, self._selected = Int64Buffer(_MAX_LANES + 1), Int64Buffer(_MAX_LANES + 1)

    @property
    def most_tokens(self) -> int:
        return 0 if self.reason else self._max_tokens

    def plan_lanes(self, lengths: Sequence[int]) -> LanePlan:
        if self.reason or sum(lengths) > self._max_tokens:
            return LanePlan.none(len(lengths))
        return self.planner.plan(lengths, torch.get_num_threads())

    def __call__(self, plan: LanePlan) -> Tensor:
        """Return the hidden states of the batch, FP32, in the plan's order; the next step overwrites them."""
        batch = self._batch
        selected_only = batch.num_selected is not None
        steps = self._recorded(selected_only) if batch.num_tokens <= self._max_tokens else None
        if steps is None or batch.num_tokens > self._max_tokens:
            return self._hidden(batch.context(batch.num_tokens), batch.selected_rows(batch.num_selected))
        self.num_runs += 1
        self._run(plan, steps, selected_only)
        return self._result[: batch.num_selected if batch.num_selected is not None else batch.num_tokens]

    def _run(self, plan: LanePlan, steps: ctypes.Array[LaneOperations], selected_only: bool) -> None:
        library, starts, rows = native_library().library, self._batch.text_starts, self._batch.rows
        assert library is not None, "only operations of the native library are recorded"
        together = 1 if plan.together else 0
        texts = [0, *([plan.together] if together else []), *plan.ends]
        self.num_lanes += len(plan.ends)
        self._texts.fill(texts)
        self._selected.fill([bisect_left(rows, starts[text]) for text in texts] if selected_only else [0])
        arguments = LanesArguments(
            self._batch.addresses(selected_only),
            self._result.data_ptr(),
            self._texts.address,
            self._selected.address,
            ctypes.addressof(steps),
            len(texts) - 1,
            together,
            torch.get_num_threads(),
            self._result.shape[1],
        )
        library.armature_run_lanes(ctypes.byref(arguments))

    def _recorded(self, selected_only: bool) -> ctypes.Array[LaneOperations] | None:
        threads = torch.get_num_threads()
        while not self.reason and (threads, selected_only) not in self._steps:
            try:
                self._steps[threads, selected_only] = self._record(selected_only, threads)
            except NotRecordable as reason:
                if self._max_tokens <= MIN_RECORDED_TOKENS:
                    self.reason = f"{reason} cannot be recorded"
                self._max_tokens = max(self._max_tokens // 2, MIN_RECORDED_TOKENS)
                self._layer_recordings, self._steps = {}, {}
        return None if self.reason else self._steps[threads, selected_only]

    def _record(self, selected_only: bool, threads: int) -> ctypes.Array[LaneOperations]:
        if threads not in self._layer_recordings:
            lane = min(max_lane_tokens(self._max_tokens, threads), self._max_tokens)
            # one thread needs no shared recording
            sizes = [self._max_tokens, *[lane] * threads] if threads > 1 else [self._max_tokens]
            self._layer_recordings[threads] = [
                _LayerRecording(self._hidden, room, self._batch.num_types) for room in sizes
            ]
        copies = self._layer_recordings[threads]
        steps = (LaneOperations * len(copies))(*(each.steps(selected_only) for each in copies))
        if not len(self._result):
            self._result = torch.empty((self._max_tokens, copies[0].hidden_size), dtype=torch.float32)
        return steps


class EncoderRunner:
    """Runs batches of texts. It belongs to the worker thread and keeps only buffers between calls."""

    overlaps = False

    def __init__(
        self,
        model: Encoder,
        max_tokens: int,
        off_reason: str = "",
        replayed_tokens: int | None = None,
        planner: LanePlanner = DEFAULT_PLANNER,
    ) -> None:
        """Create the buffers for batches of up to `max_tokens` tokens, and the recordings.

        `off_reason`: why no batch is replayed. Batches of up to `replayed_tokens` tokens are (None: all).
        """
        self.model = model
        self._batch = TextBatch(max_tokens, model.config.num_types, model.config.padding_id)
        self.replay = EncoderReplay(
            model.hidden, self._batch, max_tokens if replayed_tokens is None else replayed_tokens, off_reason, planner
        )
        self.model_seconds = 0.0  # seconds of the last batch in the model's forward pass
        self.is_native = False  # the last batch was replayed

    def run(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        with torch.inference_mode():
            names = {name for span in spans for name in span.request.message.outputs}
            plan = self.replay.plan_lanes([span.num_tokens for span in spans])
            spans = [spans[text] for text in plan.order]
            self._batch.fill(spans)
            starts = self._batch.starts
            rows = self._batch.select_rows(self.model.rows(starts, names))
            started, before = time.perf_counter(), self.replay.num_runs
            hidden = self.replay(plan)
            self.is_native = self.replay.num_runs > before
            self.model_seconds = time.perf_counter() - started
            outputs = self.model.outputs(hidden, starts, names, rows, self._skipped(spans))
            return in_arrival_order(output_bytes(outputs, spans, self.model.config.pooling.normalizes), plan.order)

    def launch(self, spans: Sequence[TextSpan]) -> list[dict[str, bytes]]:
        """Compute the batch at once: a CPU has no queue to submit it to."""
        return self.run(spans)

    def wait(self, in_flight: list[dict[str, bytes]]) -> list[dict[str, bytes]]:
        return in_flight

    def survives(self, error: Exception) -> bool:
        """Return False: the operating system ends a process that has no CPU memory left."""
        return False

    def _skipped(self, spans: Sequence[TextSpan]) -> Tensor | None:
        """Return the prompt tokens before each text, or None if they are pooled too."""
        if not self.model.config.pooling.skips_prompt:
            return None
        return torch.tensor([span.text.num_prompt_tokens for span in spans])


def output_bytes(outputs: Mapping[str, Tensor], spans: Sequence[TextSpan], normalizes: bool) -> list[dict[str, bytes]]:
    """Return the rows of each text by output name as FP32 bytes, by default of unit length if `normalizes`."""
    parts: list[dict[str, bytes]] = [{} for _ in spans]
    for name, tensor in outputs.items():
        if name == "embedding":
            cut = embedding_bytes(tensor, spans, normalizes)
        elif name == "last_hidden_state":
            cut = split_bytes(tensor, [span.num_tokens for span in spans])
        else:
            cut = split_bytes(tensor, [1] * len(spans))
        for own, part in zip(parts, cut, strict=True):
            own[name] = part
    return parts


def embedding_bytes(vectors: Tensor, spans: Sequence[TextSpan], normalizes: bool) -> list[bytes]:
    """Cut pooled vectors [texts, size] to the requested dimensions and normalise them."""
    asked = [(span.request.message.dimensions, span.request.message.normalize) for span in spans]
    found: dict[int, bytes] = {}
    for dimensions, normalize in dict.fromkeys(asked):
        own = [row for row, one in enumerate(asked) if one == (dimensions, normalize)]
        rows = (vectors if len(own) == len(asked) else vectors[own])[:, :dimensions]
        rows = unit_rows(rows) if (normalizes if normalize is None else normalize) else rows
        found.update(zip(own, split_bytes(rows, [1] * len(own)), strict=True))
    return [found[row] for row in range(len(asked))]


def in_arrival_order(rows: Sequence[dict[str, bytes]], order: Sequence[int]) -> list[dict[str, bytes]]:
    """Return the rows in arrival order; `rows[i]` belongs to the text that arrived as number `order[i]`."""
    return [row for _, row in sorted(zip(order, rows, strict=True), key=itemgetter(0))]


def split_bytes(rows: Tensor, counts: Sequence[int]) -> list[bytes]:
    whole = rows.contiguous().numpy().astype("<f4", copy=False).tobytes()
    width = rows.shape[1] * rows.itemsize
    ends = list(accumulate(counts))
    return [whole[(end - count) * width : end * width] for count, end in zip(counts, ends, strict=True)]
