"""Events for clients about a sequence (new tokens, the end and its reason, timings), and the scheduler's state.

The service, not the engine, finds stop strings. The state is plain counts that other threads can read, the larger part
of an `EngineSnapshot`.
"""

from __future__ import annotations

from collections import abc

from app.engine.scheduler.batch import SampledTokens
from app.engine.scheduler.beam_search import Hypothesis
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.sequence import Sequence
from app.messages import (
    Event,
    FinishReason,
    SequenceFinished,
    Timings,
    TokenLogprob,
    TokensReady,
)
from app.metrics.stats import EngineSnapshot


def token_events(sequence: Sequence, samples: abc.Sequence[SampledTokens], now: float) -> list[Event]:
    """Return the events for the tokens that were just appended, and for the end if the last token ends the sequence.

    A stop token counts as a completion token but is not part of the text.
    """
    count, last_id = len(sequence.token_ids), sequence.token_ids[-1]
    stops = last_id in sequence.stop_ids
    text = samples[:-1] if stops else samples
    events: list[Event] = []
    if text:
        first = count - sequence.num_prompt_tokens == len(samples)
        ready = TokensReady(
            sequence.request_id,
            sequence.choice,
            text[0].token_ids if len(text) == 1 else tuple([one.token_ids[0] for one in text]),
            () if sequence.params.logprobs is None else _token_logprobs(text, sequence.params.logprobs),
            sequence_timings(sequence, now) if first else None,
        )
        events.append(ready)
    if stops:
        events.append(sequence_finished(sequence, "stop", now, last_id))
    elif count >= sequence.max_length:
        events.append(sequence_finished(sequence, "length", now))
    return events


def sequence_finished(
    sequence: Sequence, reason: FinishReason, now: float, stop_token_id: int | None = None
) -> SequenceFinished:
    """Return the event for the end of a sequence."""
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=reason,
        timings=sequence_timings(sequence, now),
        num_completion_tokens=sequence.num_completion_tokens,
        stop_token_id=stop_token_id,
    )


def beam_search_finished(sequence: Sequence, best: Hypothesis, now: float) -> SequenceFinished:
    """Return the event for the end of a beam search, with its best completion."""
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=best.reason,
        timings=sequence_timings(sequence, now),
        num_completion_tokens=len(best.token_ids) + (best.stop_token_id is not None),
        token_ids=best.token_ids,
        logprobs=best.token_logprobs,
        stop_token_id=best.stop_token_id,
    )


def sequence_timings(sequence: Sequence, now: float) -> Timings:
    """Return the timings of a sequence; a phase that has not begun has zero seconds.

    Queue time ends when the sequence is first scheduled, prefill at its first token. The rest is decode time.
    """
    scheduled = now if sequence.scheduled_at is None else sequence.scheduled_at
    first_token = now if sequence.first_token_at is None else sequence.first_token_at
    return Timings(scheduled - sequence.arrived_at, first_token - scheduled, now - first_token, sequence.cached_tokens)


def _token_logprobs(samples: abc.Sequence[SampledTokens], num_top: int) -> tuple[TokenLogprob, ...]:
    assert all(one.logprobs for one in samples), "the sampler returns log-probabilities if they were requested"
    return tuple(TokenLogprob(one.token_ids[0], one.logprobs[0], one.top[:num_top]) for one in samples)


def snapshot_of_sequences(
    running: abc.Sequence[Sequence], waiting: abc.Sequence[Sequence], pool: KvSlots
) -> EngineSnapshot:
    """Return the counts of running and waiting sequences, which are given oldest first.

    Cached slots that can be evicted do not count as used.
    """
    rows: list[tuple[int, int]] = []
    prompts: list[tuple[int, int]] = []
    context = 0
    for sequence in running:  # a single pass, because this runs after every step
        length = len(sequence.token_ids)
        num_completion_tokens, uncomputed = length - sequence.num_prompt_tokens, length - sequence.num_computed
        if uncomputed == 1 and num_completion_tokens > 0:
            rows.append((num_completion_tokens, sequence.max_length - length))
            context += length
        else:
            prompts.append((sequence.num_computed, uncomputed))
    return EngineSnapshot(
        num_running=len({sequence.request_id for sequence in running}),
        kv_used_tokens=pool.in_use_tokens(),
        kv_capacity_tokens=pool.capacity_tokens,
        rows=tuple(rows),
        context_tokens=context,
        prompts=tuple(prompts),
        queue=tuple([len(sequence.token_ids) for sequence in waiting]),
    )
