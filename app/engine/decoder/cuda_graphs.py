"""Captured steps of a device: common shapes are captured while loading, the others in pauses or before their first use.

The forward pass is captured, whatever the sampling: its logits are copied to a tensor that stays. A smaller step is
padded to the next shape. A step that is not captured runs eagerly with the same result; the reason is logged.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from app.backends.base import CapturedGraph, DeviceBackend
from app.engine.decoder.device_inputs import StepSizes
from app.hardware.plan.memory_budget import GRAPHS_BYTES
from armature_kernels.attention.paged import PART_TOKENS

_LOG = logging.getLogger(__name__)
LARGEST_STARTUP_BUCKET = 64  # sequences; decodes of up to this number are captured while loading
LARGEST_BUCKET = 256  # sequences; above this the step takes the device longer than the host needs to launch it
# (up to, in steps of). Small batches are the common case, and there a padding row costs the most.
_BUCKET_STEPS = ((2, 1), (4, 2), (8, 4), (64, 8), (LARGEST_BUCKET, 16))
# Tokens of a step's prompts. Up to some 300 tokens a step reads weights, and padding costs little; beyond the last one
# the device computes longer than the host needs to launch the step.
_PROMPT_TOKENS = (32, 64, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
_STARTUP_PROMPT_TOKENS = 512  # prompts of up to this size that are alone are captured while loading
_DECODES_BESIDE_PROMPTS = (0, 8, 32, 64, 128, LARGEST_BUCKET)
MAX_PROMPTS = 8  # of a captured step; one more sequence is its padding
_ACTIVATION_WIDTHS = 16  # FP32 values of a token at a layer's widest point, in multiples of the hidden size


@dataclass(frozen=True, slots=True)
class GraphShape:
    """The forward pass of `decodes` rows, then `prompts` tokens of prompts; no sequence is longer than `context`.

    `fresh`: all prompts begin in this step.
    """

    decodes: int
    context: int
    prompts: int = 0
    fresh: bool = False

    @property
    def sizes(self) -> StepSizes:
        if not self.prompts:
            return StepSizes.of_bucket(self.decodes)
        sequences = self.decodes + MAX_PROMPTS + 1
        return StepSizes(self.decodes + self.prompts, sequences, sequences)


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """The shapes of a runner's captured steps: its buckets of decodes and of prompt tokens, and contexts, ascending."""

    decodes: tuple[int, ...]
    prompts: tuple[int, ...]
    contexts: tuple[int, ...]

    @classmethod
    def of(cls, max_sequences: int, max_tokens: int, max_len: int, has_prompts: bool) -> GraphShapes:
        prompts = sizes_up_to(_PROMPT_TOKENS, max_tokens) if has_prompts else ()
        return cls(bucket_sizes(max_sequences), prompts, sizes_up_to((PART_TOKENS, max_len), max_len))

    def find(self, decodes: int, context: int, prompts: Sequence[int] = (), fresh: bool = False) -> GraphShape | None:
        """Return the smallest shape of so many decodes and prompts of so many tokens each; None: too many of them."""
        longest = smallest_bucket(context, self.contexts)
        rows = smallest_bucket(decodes, self._beside_prompts if prompts else self.decodes)
        if rows is None or longest is None:
            return None
        if not prompts:
            return GraphShape(rows, longest)
        tokens = smallest_bucket(sum(prompts), self.prompts) if len(prompts) <= MAX_PROMPTS else None
        if tokens is None:
            return None
        return GraphShape(rows, longest if rows else self.contexts[-1], tokens, fresh)

    @property
    def _beside_prompts(self) -> tuple[int, ...]:
        return sizes_up_to(_DECODES_BESIDE_PROMPTS, self.decodes[-1])

    @property
    def largest(self) -> StepSizes:
        """The most tokens, sequences and rows of logits of any shape."""
        last, beside = self.decodes[-1], self._beside_prompts[-1]
        if not self.prompts:
            return StepSizes.of_bucket(last)
        sequences = max(last, beside + MAX_PROMPTS + 1)
        return StepSizes(max(last, beside + self.prompts[-1]), sequences, sequences)

    def at_startup(self) -> Iterator[GraphShape]:
        """Yield the shapes that are captured while loading, the largest first: captured steps share memory."""
        for bucket in reversed([one for one in self.decodes if one <= LARGEST_STARTUP_BUCKET]):
            yield GraphShape(bucket, self.contexts[0])
        for tokens in reversed([one for one in self.prompts if one <= _STARTUP_PROMPT_TOKENS]):
            yield GraphShape(0, self.contexts[-1], tokens, fresh=True)

    def in_pauses(self) -> Iterator[GraphShape]:
        """Yield all shapes, those that serving meets first at the beginning."""
        yield from self.at_startup()
        for fresh in (True, False):
            for rows in self._beside_prompts:
                for tokens in self.prompts:
                    yield GraphShape(rows, self.contexts[0 if rows else -1], tokens, fresh)
        for context in self.contexts:
            for bucket in self.decodes:
                yield GraphShape(bucket, context)


class StepGraphs:
    """The captured steps of one runner. `work` computes a step of a shape from the inputs in the runner's block."""

    def __init__(
        self,
        backend: DeviceBackend,
        work: Callable[[GraphShape], None],
        step_bytes: Callable[[GraphShape], int],
        off: str = "",
    ) -> None:
        """Begin without graphs. `step_bytes`: the memory that a captured step keeps; `off`: why no step is captured."""
        self._backend = backend
        self._work = work
        self._step_bytes = step_bytes
        self._too_large: dict[bool, int] = {}  # smallest number of tokens without memory, with prompts and without
        self.reason = off  # reason why no more steps are captured; empty if they are
        self.captured: dict[GraphShape, CapturedGraph] = {}
        self.agree: Callable[[bool], bool] = lambda fits: fits  # of several ranks: True if it is so on all
        self.num_replayed = 0

    @property
    def enabled(self) -> bool:
        """True if padding steps to a shape is worthwhile, because steps are or will be captured."""
        return not self.reason or bool(self.captured)

    def should_capture(self, shape: GraphShape) -> bool:
        return not self.reason and shape not in self.captured and self.is_possible(shape)

    def is_possible(self, shape: GraphShape) -> bool:
        """Return False if a step of this shape, or a smaller one, did not find memory."""
        tokens = shape.sizes.tokens
        return tokens < self._too_large.get(shape.prompts > 0, tokens + 1)

    def capture(self, shape: GraphShape) -> None:
        """Capture a step of this shape, which computes it several times: all of its rows must be padding."""
        # The largest of all counts.
        if not self.agree(self._step_bytes(shape) <= min(GRAPHS_BYTES, self._backend.free_bytes())):
            self._skip_size(shape, "it would take more memory than is kept for captured steps")
            return
        try:
            self._work(shape)
            captured = self._backend.capture(lambda: self._work(shape))
        except RuntimeError as error:  # torch's out-of-memory error is a RuntimeError too
            if not self._backend.recover_from_oom(error):
                self._disable(f"a step of {shape.sizes.tokens} tokens could not be captured: {error}")
                return
            self._skip_size(shape, str(error))
            return
        if captured is None:
            self._disable("this kind of device captures nothing")
            return
        self.captured[shape] = captured

    def replay(self, shape: GraphShape) -> None:
        self.captured[shape].replay()
        self.num_replayed += 1

    def _skip_size(self, shape: GraphShape, reason: str) -> None:
        tokens = shape.sizes.tokens
        self._too_large[shape.prompts > 0] = tokens
        kind = "with prompts" if shape.prompts else "of decodes"
        _LOG.warning("Steps %s of %d tokens and more run eagerly: %s.", kind, tokens, reason)

    def _disable(self, reason: str) -> None:
        self.reason = reason
        _LOG.warning("No more steps are captured: %s. They run eagerly.", reason)


def captured_step_bytes(vocab_size: int, hidden_size: int) -> Callable[[GraphShape], int]:
    """Return the function of the bytes of a captured step: its logits and their copy, and a layer's activations."""

    def step_bytes(shape: GraphShape) -> int:
        sizes = shape.sizes
        return 8 * vocab_size * sizes.samples + 4 * _ACTIVATION_WIDTHS * hidden_size * sizes.tokens

    return step_bytes


def bucket_sizes(max_sequences: int) -> tuple[int, ...]:
    """Return the bucket sizes in ascending order; the last holds `max_sequences`, or is `LARGEST_BUCKET`."""
    assert max_sequences > 0, "max_sequences must be positive"
    sizes, size = [1], 1
    for end, step in _BUCKET_STEPS:
        while size < min(end, max_sequences):
            size += step
            sizes.append(size)
    return tuple(sizes)


def sizes_up_to(sizes: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the sizes, ascending and without repetitions, as far as they are needed to hold `most`."""
    ordered = sorted(set(sizes))
    place = min(bisect_left(ordered, most), len(ordered) - 1)
    return tuple(ordered[: place + 1])


def smallest_bucket(sequences: int, buckets: Sequence[int]) -> int | None:
    place = bisect_left(buckets, sequences)
    return buckets[place] if place < len(buckets) else None
