"""What clients are told of a sequence: its new tokens, its end and why, where its time went. Stop strings are found by the service."""

from __future__ import annotations

from collections.abc import Sequence as Items

from app.engine.batch import Picked
from app.engine.beams import Hypothesis
from app.engine.sequence import Sequence
from app.messages import Event, FinishReason, SequenceFinished, Timings, TokenLogprob, TokensReady


def token_events(sequence: Sequence, picked: Items[Picked], now: float) -> list[Event]:
    """Tells of the tokens just appended, and of the end where the last is one. A stop token is counted but is not text."""
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


def _logprobs(picked: Items[Picked], asked: int) -> tuple[TokenLogprob, ...]:
    assert all(one.logprobs for one in picked), "the sampler gives log-probabilities where they are asked for"
    return tuple(TokenLogprob(one.token_ids[0], one.logprobs[0], one.top[:asked]) for one in picked)
