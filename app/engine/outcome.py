"""Events for clients about a sequence: new tokens, the end and its reason, and timings.

The service, not the engine, finds stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.batch import Picked
from app.engine.beams import Hypothesis
from app.engine.sequence import Sequence
from app.messages import Event, FinishReason, SequenceFinished, Timings, TokenLogprob, TokensReady


def token_events(sequence: Sequence, picked: Items[Picked], now: float) -> list[Event]:
    """Return the events for the tokens that were just appended, and for the end if the last token ends the sequence.

    A stop token counts as a completion token but is not part of the text.
    """
    count, last_id = len(sequence.token_ids), sequence.token_ids[-1]
    stops = last_id in sequence.stop_ids
    text = picked[:-1] if stops else picked
    events: list[Event] = []
    if text:
        first = count - sequence.num_prompt_tokens == len(picked)
        ready = TokensReady(
            sequence.request_id,
            sequence.choice,
            text[0].token_ids if len(text) == 1 else tuple([one.token_ids[0] for one in text]),
            () if sequence.params.logprobs is None else _logprobs(text, sequence.params.logprobs),
            timings(sequence, now) if first else None,
        )
        events.append(ready)
    if stops:
        events.append(finished(sequence, "stop", now, last_id))
    elif count >= sequence.limit:
        events.append(finished(sequence, "length", now))
    return events


def finished(sequence: Sequence, reason: FinishReason, now: float, stop_token_id: int | None = None) -> SequenceFinished:
    """Return the event for the end of a sequence."""
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=reason,
        timings=timings(sequence, now),
        num_completion_tokens=sequence.num_completion_tokens,
        stop_token_id=stop_token_id,
    )


def search_finished(sequence: Sequence, best: Hypothesis, now: float) -> SequenceFinished:
    """Return the event for the end of a beam search, with its best completion."""
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=best.reason,
        timings=timings(sequence, now),
        num_completion_tokens=len(best.token_ids) + (best.stop_token_id is not None),
        token_ids=best.token_ids,
        logprobs=best.trail,
        stop_token_id=best.stop_token_id,
    )


def timings(sequence: Sequence, now: float) -> Timings:
    """Return the timings of a sequence; a phase that has not begun has zero seconds.

    Queue time ends when the sequence is first scheduled, prefill at its first token. The rest is decode time.
    """
    scheduled = now if sequence.scheduled_at is None else sequence.scheduled_at
    first_token = now if sequence.first_token_at is None else sequence.first_token_at
    return Timings(scheduled - sequence.arrived_at, first_token - scheduled, now - first_token, sequence.cached_tokens)


def _logprobs(picked: Items[Picked], asked: int) -> tuple[TokenLogprob, ...]:
    assert all(one.logprobs for one in picked), "the sampler returns log-probabilities if they were requested"
    return tuple(TokenLogprob(one.token_ids[0], one.logprobs[0], one.top[:asked]) for one in picked)
