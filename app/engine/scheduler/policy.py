"""Rules of a step on counts, without sequences and tensors.

The engines apply them to their requests, and the predicted wait to the counts of a snapshot. `PrefillBudget` is the
prefill tokens that a step may carry without slowing the streams too much; `TokenBudget` is all tokens of a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from app.engine.scheduler.batch import Batch
from app.hardware.step_times import StepTimes
from app.metrics.steps import StepStats, StepTimeModel

T = TypeVar("T")
# Every n-th step in a run of mixed steps carries no prefill, so that the decode time stays measured. Without a
# table this happens often, because the price of a token is all that is known (it costs 6%). With a table it is so
# rare that a prompt of a few thousand tokens sees at most one such step.
PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_WITH_TABLE = 16, 48
# The budget grows by 1/64 at each step that was computed, so it doubles after about 45 steps. A size that failed
# once may fit later (for example once a prompt that needed much memory is done), but each failed try costs a step.
# Slow growth makes retries rare enough to be cheap.
_GROWTH_DIVISOR = 64


def share_in_order(requests: Iterable[T], tokens: int, needed: Callable[[T], int]) -> Iterator[tuple[T, int]]:
    """Share the tokens of a step among requests, which may be lazy: the oldest gets all it needs, then the next."""
    pending = iter(requests)
    while tokens > 0 and (request := next(pending, None)) is not None:
        given = min(needed(request), tokens)
        tokens -= given
        yield request, given


def size_class(tokens: int, step: int) -> int:
    """Return 0 if the tokens fit in a step, then 1, 2, … for up to 2, 4, … times as many."""
    return max((tokens - 1) // max(step, 1), 0).bit_length()


def share_prompts(
    prompts: Iterable[T], tokens: int, needed: Callable[[T], int], smaller: Callable[[T], Iterable[T]]
) -> Iterator[tuple[T, int]]:
    """Share the prefill tokens of a step among prompts: the oldest first, but a long one takes at most half of it all.

    The other half of a step that the oldest prompt could fill alone is for smaller ones. So a short prompt never waits
    for the end of a long one, and the oldest is computed at half speed at least. `prompts` may be lazy; `needed`
    returns a prompt's tokens, at least 1; `smaller` returns the later prompts that go before the rest of a long one, in
    order.
    """
    pending = iter(prompts)
    while tokens > 0 and (oldest := next(pending, None)) is not None:
        if needed(oldest) > tokens:
            for prompt, given in share_in_order(smaller(oldest), tokens // 2, needed):
                tokens -= given
                yield prompt, given
        given = min(needed(oldest), tokens)
        tokens -= given
        yield oldest, given


def before_long_ones(others: Iterable[T], long: int, step: int, needed: Callable[[T], int]) -> list[T]:
    """Return the prompts that go before the rest of a prompt of `long` tokens: smaller size classes first."""
    limit = size_class(long, step)
    sizes = [(size_class(needed(one), step), one) for one in others]
    return [one for size, one in sorted(sizes, key=lambda pair: pair[0]) if size < limit]


def admit_oldest(free_places: int, oldest_width: Callable[[], int], admit: Callable[[], T | None]) -> Iterator[T]:
    """Admit waiting requests in order of arrival while places are free, each when it is taken from the iterator.

    If the oldest does not fit, no younger one overtakes it. `oldest_width` returns the places that the oldest needs, 0
    if none waits; `admit` admits it, or returns None if it does not fit into memory.
    """
    while 0 < (width := oldest_width()) <= free_places and (request := admit()) is not None:
        free_places -= width
        yield request


class PrefillBudget:
    """The prefill tokens of each step; an inter-token latency target replaces the ratio to decode steps."""

    def __init__(
        self, max_batch_tokens: int, itl_target_seconds: float | None = None, model: StepTimeModel | None = None
    ) -> None:
        self.model = model or StepTimeModel()
        self._max_tokens, self._target_seconds = max_batch_tokens, itl_target_seconds
        self._probe_every_steps = PROBE_EVERY_STEPS if not self.model.is_measured else PROBE_EVERY_STEPS_WITH_TABLE
        self._mixed_in_a_row = 0

    @property
    def step_times(self) -> StepTimes | None:
        return self.model.step_times(self._max_tokens, self._target_seconds)

    def observe(self, step: StepStats) -> None:
        self.model.observe(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def max_prefill_tokens(
        self, num_decodes: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1
    ) -> int:
        """Return the number of prefill tokens for the next step; 0 if the decodes alone are to be measured.

        `context_tokens` is the context of all decodes together, `prompt_context_tokens` the first prompt's computed
        tokens; `num_prompts` wait or are being computed.
        """
        if num_decodes == 0:
            return self._max_tokens
        if self._mixed_in_a_row >= self._probe_every_steps or (step_times := self.step_times) is None:
            return 0
        return step_times.prefill_tokens(num_decodes, context_tokens, prompt_context_tokens, num_prompts)


class TokenBudget:
    """The tokens that the next step may compute; decodes take their share before prefill."""

    def __init__(self, max_tokens: int) -> None:
        self.tokens = self._max_tokens = max_tokens

    def shrink(self, batch: Batch) -> bool:
        """Halve the budget after this step ran out of memory; False if no smaller step can be made of the batch."""
        first = batch.spans[0].sequence
        beams_alone = first.is_beam and all(
            span.is_decode and span.sequence.request_id == first.request_id for span in batch.spans
        )
        if beams_alone or batch.num_tokens < 2 or self.tokens < 2:
            return False
        self.tokens = min(self.tokens, batch.num_tokens) // 2
        return True

    def grow(self) -> None:
        """Grow the budget a little after a step that was computed."""
        if self.tokens < self._max_tokens:
            self.tokens = min(self._max_tokens, self.tokens + max(1, self.tokens // _GROWTH_DIVISOR))
