"""An encoder's layers run again natively: one recording serves any number of tokens up to the one that it was made for.

What is saved is more than the interpreter's time: between two operations its lock would have to be had, for which a busy event loop
lets others wait milliseconds. Recorded is all from token ids to hidden states; only values at addresses that stay, and the numbers of
rows, change from step to step. A model that does something else than our operations stays eager, and says why.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from app.kernels.recording import Pool, Recorded, Unrecordable, record
from app.kernels.resizing import Resizing

LEAST_TOKENS = 16  # not to be recorded even with so few: not at all


class Inputs(Protocol):
    """A batch at addresses that stay, of which also more may be read than it has: what is there has been valid."""

    @property
    def num_tokens(self) -> int: ...
    @property
    def num_wanted(self) -> int | None:
        """Tokens whose hidden states are wanted; None: all."""
        ...

    @property
    def room(self) -> int:
        """Tokens that may be read."""
        ...


@dataclass(frozen=True, slots=True)
class _Kept:
    recorded: Recorded
    resizing: Resizing


class EncodeReplay:
    """Belongs to one model and one place for its batches; the worker thread's.

    `hidden(inputs, tokens, wanted)` computes so many tokens of what lies there, and gives the hidden states of all or so many of them.
    """

    def __init__(self, hidden: Callable[[int, int | None], Tensor], inputs: Inputs, most: int, off: str = "") -> None:
        """Steps of at most so many tokens: in longer ones the interpreter is lost in the products, and results want much memory."""
        self.reason = off  # why every step is eager; empty: it is not
        self.num_runs = 0  # steps that were run again
        self._hidden, self._inputs = hidden, inputs
        self._most = min(inputs.room, most)
        self._pool = Pool()
        self._kept: dict[bool, _Kept] = {}  # by whether some tokens are wanted, or all

    @property
    def most_tokens(self) -> int:
        """Of the steps that are run again; 0: none is."""
        return 0 if self.reason else self._most

    def __call__(self) -> Tensor:
        """Hidden states of the batch that lies there, fp32: what the next step overwrites."""
        tokens, wanted = self._inputs.num_tokens, self._inputs.num_wanted
        kept = self._kept.get(wanted is not None) or self._record(wanted is not None)
        sizes = (tokens,) if wanted is None else (tokens, wanted)
        if kept is None or any(now > most for now, most in zip(sizes, kept.resizing.sizes, strict=True)):
            return self._hidden(tokens, wanted)
        kept.resizing.set(sizes)
        self.num_runs += 1
        result: Tensor = kept.recorded.run()
        return result[: sizes[-1]]

    def _record(self, some: bool) -> _Kept | None:
        """With as many tokens as can be: a form of weights may hand large products to somebody else."""
        while not self.reason:
            sizes = (self._most, self._most - 1) if some else (self._most,)
            try:
                recorded = record(self._pool, lambda: self._hidden(self._most, self._most - 1 if some else None))
                self._kept[some] = _Kept(recorded, Resizing(recorded.steps, sizes))
                return self._kept[some]
            except Unrecordable as reason:
                if self._most <= LEAST_TOKENS:
                    self.reason = f"{reason} is not an operation of ours"
                self._most = max(self._most // 2, LEAST_TOKENS)
        return None
