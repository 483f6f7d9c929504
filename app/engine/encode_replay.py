"""Replays an encoder's layers natively: recorded once, for any number of tokens up to the recorded number.

This saves more than interpreter time. Between two operations the worker needs the interpreter lock, which a busy
event loop may hold for milliseconds. The recording covers everything from token ids to hidden states. Only values
at fixed addresses and row counts change from step to step.

All threads together have one recording, whose operations they divide. Each thread also has a smaller one, with
which it computes lanes. A model that uses operations outside the native library stays eager.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from app.engine.lanes import USUAL, Cut, Lanes, room_of_lane
from app.engine.text_batch import TextBatch
from app.kernels.lanes import LanesArguments, TextSteps
from app.kernels.memory import Words
from app.kernels.native import native
from app.kernels.recording import Pool, Recorded, Unrecordable, noted
from app.kernels.resizing import Resizing
from app.models.context import EncodeContext

LEAST_TOKENS = 16  # a model that cannot be recorded with this few tokens is never recorded
_MOST_LANES = 4096

Hidden = Callable[[EncodeContext, Tensor | None], Tensor]


class _Copy:
    """Recordings of the layers over one batch and one pool.

    One computes all tokens, the other computes selected tokens.
    """

    def __init__(self, hidden: Hidden, room: int, num_types: int) -> None:
        self._hidden, self.room = hidden, room
        self._batch = TextBatch(room + 1, num_types)  # the recording contains both numbers, which must differ
        self._pool = Pool()
        self._kept: dict[bool, tuple[Recorded, Resizing]] = {}

    def steps(self, some: bool) -> TextSteps:
        """Return the recorded steps, recording them if needed. Raises `Unrecordable`."""
        recorded, resizing = self._kept.get(some) or self._record(some)
        result: Tensor = recorded.result
        assert result.is_contiguous() and result.dtype == torch.float32, "rows of the hidden size"
        places = resizing.places
        return TextSteps(
            self._batch.words(some), result.data_ptr(), recorded.address, len(recorded), ctypes.addressof(places), len(places)
        )

    @property
    def size(self) -> int:
        """Size of a hidden state."""
        recorded, _ = next(iter(self._kept.values()))
        return int(recorded.result.shape[1])

    def _record(self, some: bool) -> tuple[Recorded, Resizing]:
        """Record with the largest number of tokens.

        A linear form may use another implementation for large products.
        """
        sizes: tuple[int, ...] = (self.room + 1, self.room) if some else (self.room,)
        recorded = noted(
            self._pool, lambda: self._hidden(self._batch.context(sizes[0]), self._batch.wanted(self.room if some else None))
        )
        self._kept[some] = recorded, Resizing(recorded.steps, sizes)
        return self._kept[some]


class EncodeReplay:
    """The recordings of one model and one batch, for the worker thread. `hidden` computes the model's layers."""

    def __init__(self, hidden: Hidden, batch: TextBatch, most: int, off: str = "", lanes: Lanes = USUAL) -> None:
        """Start without recordings.

        `most` is the largest number of tokens in a recorded step: in longer steps the interpreter time is
        negligible, and results need much memory. `off` is the reason to record nothing.
        """
        self.reason = off  # reason why every step is eager; empty if steps are replayed
        self.num_runs = 0  # number of steps that were replayed
        self.num_lanes = 0  # number of lanes in all of them
        self._hidden, self._batch = hidden, batch
        self.lanes = lanes
        self._most = min(batch.room, most)
        # key: number of threads; the shared recording comes first, then one for each thread
        self._copies: dict[int, list[_Copy]] = {}
        # key: number of threads, and True if only selected tokens are computed
        self._steps: dict[tuple[int, bool], ctypes.Array[TextSteps]] = {}
        self._result = torch.empty(0)
        self._texts, self._wanted = Words(_MOST_LANES + 1), Words(_MOST_LANES + 1)

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in a step that is replayed; 0 if none is."""
        return 0 if self.reason else self._most

    def cut(self, lengths: Sequence[int]) -> Cut:
        """Return the order of the texts in the batch and their assignment to lanes, for texts of `lengths` tokens."""
        if self.reason or sum(lengths) > self._most:
            return Cut.none(len(lengths))
        return self.lanes.cut(lengths, torch.get_num_threads())

    def __call__(self, cut: Cut) -> Tensor:
        """Return the hidden states of the batch, FP32, which the next step overwrites.

        The texts are in the order of the lane plan.
        """
        batch = self._batch
        some = batch.num_wanted is not None
        steps = self._recorded(some) if batch.num_tokens <= self._most else None
        if steps is None or batch.num_tokens > self._most:
            return self._hidden(batch.context(batch.num_tokens), batch.wanted(batch.num_wanted))
        self.num_runs += 1
        self._run(cut, steps, some)
        return self._result[: batch.num_wanted if batch.num_wanted is not None else batch.num_tokens]

    def _run(self, cut: Cut, steps: ctypes.Array[TextSteps], some: bool) -> None:
        library, starts, rows = native().library, self._batch.text_starts, self._batch.rows
        assert library is not None, "only operations of the native library are recorded"
        together = 1 if cut.together else 0
        texts = [0, *([cut.together] if together else []), *cut.ends]
        self.num_lanes += len(cut.ends)
        self._texts.fill(texts)
        self._wanted.fill([bisect_left(rows, starts[text]) for text in texts] if some else [0])
        library.armature_run_lanes(
            ctypes.byref(
                LanesArguments(
                    self._batch.words(some), self._result.data_ptr(), self._texts.address, self._wanted.address, ctypes.addressof(steps),
                    len(texts) - 1, together, torch.get_num_threads(), self._result.shape[1],
                )
            )
        )  # fmt: skip

    def _recorded(self, some: bool) -> ctypes.Array[TextSteps] | None:
        """Return the steps of the shared recording and of each thread, or None if the model cannot be recorded."""
        threads = torch.get_num_threads()
        while not self.reason and (threads, some) not in self._steps:
            try:
                self._steps[threads, some] = self._record(some, threads)
            except Unrecordable as reason:
                if self._most <= LEAST_TOKENS:
                    self.reason = f"{reason} cannot be recorded"
                self._most = max(self._most // 2, LEAST_TOKENS)
                self._copies, self._steps = {}, {}
        return None if self.reason else self._steps[threads, some]

    def _record(self, some: bool, threads: int) -> ctypes.Array[TextSteps]:
        if threads not in self._copies:
            lane = min(room_of_lane(self._most, threads), self._most)
            # one thread needs no shared recording
            rooms = [self._most, *[lane] * threads] if threads > 1 else [self._most]
            self._copies[threads] = [_Copy(self._hidden, room, self._batch.num_types) for room in rooms]
        copies = self._copies[threads]
        steps = (TextSteps * len(copies))(*(each.steps(some) for each in copies))
        if not len(self._result):
            self._result = torch.empty((self._most, copies[0].size), dtype=torch.float32)
        return steps
