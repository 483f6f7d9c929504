"""What clients are told of a sequence: its new tokens, its end and why, where its time went. Stop strings are found by the service."""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.batch import Picked
from app.engine.beams import Hypothesis
from app.engine.sequence import Sequence
from app.messages import Event, FinishReason, SequenceFinished, Timings, TokenLogprob, TokensReady


def token_events(sequence: Sequence, picked: Items[Picked], now: float) -> list[Event]:
    """Tells of the tokens just appended, and of the end where the last is one. A stop token is counted but is not text."""
    first = sequence.num_completion_tokens == len(picked)
    stop_id = sequence.token_ids[-1] if sequence.token_ids[-1] in sequence.stop_ids else None
    text = picked if stop_id is None else picked[:-1]
    events: list[Event] = []
    if text:
        ready = TokensReady(
            request_id=sequence.request_id,
            choice=sequence.choice,
            token_ids=tuple(one.token_ids[0] for one in text),
            logprobs=_logprobs(sequence, text),
            timings=timings(sequence, now) if first else None,
        )
        events.append(ready)
    if stop_id is not None:
        events.append(finished(sequence, "stop", now, stop_id))
    elif len(sequence.token_ids) >= sequence.limit:
        events.append(finished(sequence, "length", now))
    return events


def finished(sequence: Sequence, reason: FinishReason, now: float, stop_token_id: int | None = None) -> SequenceFinished:
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=sequence.choice,
        reason=reason,
        timings=timings(sequence, now),
        num_completion_tokens=sequence.num_completion_tokens,
        stop_token_id=stop_token_id,
    )


def search_finished(sequence: Sequence, best: Hypothesis, now: float) -> SequenceFinished:
    """The end of a beam search: its best completion, whole."""
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
    """Queue until first scheduled, prefill until the first token, decode after it; what has not begun took nothing."""
    scheduled = now if sequence.scheduled_at is None else sequence.scheduled_at
    first_token = now if sequence.first_token_at is None else sequence.first_token_at
    return Timings(scheduled - sequence.arrived_at, first_token - scheduled, now - first_token, sequence.cached_tokens)


def _logprobs(sequence: Sequence, picked: Items[Picked]) -> tuple[TokenLogprob, ...]:
    asked = sequence.params.logprobs
    if asked is None:
        return ()
    assert all(one.logprobs for one in picked), "the sampler gives log-probabilities where they are asked for"
    return tuple(TokenLogprob(one.token_ids[0], one.logprobs[0], one.top[:asked]) for one in picked)
