"""What clients are told of a sequence: its new token, its end and why, where its time went. Stop strings are found by the service."""

from __future__ import annotations

from app.engine.batch import Picked
from app.engine.beams import Hypothesis
from app.engine.sequence import Sequence
from app.messages import Event, FinishReason, SequenceFinished, Timings, TokenLogprob, TokensReady


def token_events(sequence: Sequence, picked: Picked, now: float) -> list[Event]:
    """Tells of the token just appended, and of the end where it is one. A stop token is counted but is not text."""
    token_id = sequence.token_ids[-1]
    if token_id in sequence.stop_ids:
        return [finished(sequence, "stop", now, token_id)]
    first = sequence.num_completion_tokens == 1
    ready = TokensReady(
        request_id=sequence.request_id,
        choice=sequence.choice,
        token_ids=(token_id,),
        logprobs=_logprobs(sequence, picked),
        timings=timings(sequence, now) if first else None,
    )
    return [ready, finished(sequence, "length", now)] if len(sequence.token_ids) >= sequence.limit else [ready]


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


def _logprobs(sequence: Sequence, picked: Picked) -> tuple[TokenLogprob, ...]:
    asked = sequence.params.logprobs
    if asked is None:
        return ()
    assert picked.logprobs, "the sampler gives log-probabilities where they are asked for"
    return (TokenLogprob(picked.token_ids[0], picked.logprobs[0], picked.top[:asked]),)
