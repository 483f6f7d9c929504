"""Rules of a step on counts, with neither sequences nor tensors.

The engines apply them to their requests, and the predicted wait applies them to the counts of a snapshot, so that
both always follow the same policy.

Budgets of a step.

`PrefillBudget` is the number of prefill tokens that a step may carry without slowing down the decoding streams too
much. `TokenBudget` is the number of all tokens of a step. A step that runs out of device memory halves it, and it
then grows back slowly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from app.engine.scheduler.batch import Batch
from app.hardware.step_times import StepTimes
from app.metrics.stats import StepStats
from app.metrics.step_time_model import StepTimeModel

T = TypeVar("T")


def share_in_order(requests: Iterable[T], tokens: int, needed: Callable[[T], int]) -> Iterator[tuple[T, int]]:
    """Share the tokens of a step among requests: the oldest gets all that it needs, then the next one.

    `requests` may be lazy: the next request is only taken from it while tokens are left.

    Args:
        requests: The requests, oldest first.
        tokens: The tokens to share.
        needed: Returns the number of tokens that a request can use, at least 1.

    Returns:
        The requests that get tokens, each with their number.
    """
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

    The other half of a step that the oldest prompt could fill alone is for smaller ones, as far as they need it. So a
    short prompt never waits for the end of a long one, and the oldest prompt is computed at half speed at least.

    Args:
        prompts: The prompts, oldest first; may be lazy.
        tokens: The tokens to share.
        needed: Returns the number of tokens that a prompt needs, at least 1.
        smaller: Returns those of the later prompts that go before the rest of a long one, the first to compute first;
            may be lazy.

    Returns:
        The prompts that get tokens, each with their number.
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
    """Return the prompts that go before the rest of a long one, which needs `long` tokens: smaller ones by doubling.

    The smallest are first, in the given order among those of one size class.
    """
    limit = size_class(long, step)
    sizes = [(size_class(needed(one), step), one) for one in others]
    return [one for size, one in sorted(sizes, key=lambda pair: pair[0]) if size < limit]


def admit_oldest(free_places: int, oldest_width: Callable[[], int], admit: Callable[[], T | None]) -> Iterator[T]:
    """Admit waiting requests in order of arrival while places are free, each when it is taken from the iterator.

    If the oldest does not fit, no younger one overtakes it.

    Args:
        free_places: The number of free places.
        oldest_width: Returns the number of places that the oldest waiting request needs; 0 if none waits.
        admit: Admits the oldest waiting request and returns it; None if it does not fit into memory.
    """
    while 0 < (width := oldest_width()) <= free_places and (request := admit()) is not None:
        free_places -= width
        yield request


# Every n-th step in a run of mixed steps carries no prefill, so that the decode time stays measured. Without a
# table this happens often, because the price of a token is all that is known (it costs 6%). With a table it is so
# rare that a prompt of a few thousand tokens sees at most one such step.
PROBE_EVERY_STEPS, PROBE_EVERY_STEPS_WITH_TABLE = 16, 48


class PrefillBudget:
    """The prefill budget of each step, computed from the step time model.

    An explicit inter-token latency target replaces the ratio to the time of decode steps.
    """

    def __init__(
        self, max_batch_tokens: int, itl_target_seconds: float | None = None, model: StepTimeModel | None = None
    ) -> None:
        self.model = model or StepTimeModel()
        self._max_tokens, self._target_seconds = max_batch_tokens, itl_target_seconds
        self._probe_every_steps = PROBE_EVERY_STEPS if not self.model.is_measured else PROBE_EVERY_STEPS_WITH_TABLE
        self._mixed_in_a_row = 0

    @property
    def step_times(self) -> StepTimes | None:
        """Current step times; None if there is no table and too few steps have been seen."""
        return self.model.step_times(self._max_tokens, self._target_seconds)

    def observe(self, step: StepStats) -> None:
        """Record the work and the time of a step."""
        self.model.observe(step)
        self._mixed_in_a_row = self._mixed_in_a_row + 1 if step.decode_tokens and step.prefill_tokens else 0

    def max_prefill_tokens(
        self, num_decodes: int, context_tokens: int = 0, prompt_context_tokens: int = 0, num_prompts: int = 1
    ) -> int:
        """Return the number of prefill tokens for the next step; 0 if the decodes alone are to be measured.

        Args:
            num_decodes: Decode rows of the step.
            context_tokens: Context of these rows, all together.
            prompt_context_tokens: Tokens of the first prompt that are already computed.
            num_prompts: Prompts that wait or are being computed.
        """
        if num_decodes == 0:
            return self._max_tokens
        if self._mixed_in_a_row >= self._probe_every_steps or (step_times := self.step_times) is None:
            return 0
        return step_times.prefill_tokens(num_decodes, context_tokens, prompt_context_tokens, num_prompts)


# The budget grows by 1/64 at each step that was computed, so it doubles after about 45 steps. A size that failed
# once may fit later (for example once a prompt that needed much memory is done), but each failed try costs a step.
# Slow growth makes retries rare enough to be cheap.
_GROWTH_DIVISOR = 64


class TokenBudget:
    """The number of tokens that the next step may compute, decodes and prefill together.

    `tokens` is the current budget. Decodes take their share first, so a smaller budget cuts prefill before
    decodes.
    """

    def __init__(self, max_tokens: int) -> None:
        self.tokens = self._max_tokens = max_tokens

    def shrink(self, batch: Batch) -> bool:
        """Halve the budget after this step ran out of memory.

        Returns False if no smaller step can be made of the batch: it has one token, or only the beams of one
        search. Each call that returns True makes `tokens` smaller, so a caller that retries until False
        terminates.
        """
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
