"""Beam search over one request: select the continuations to keep and the best hypothesis.

A score is the log-probability of a completion, including the stop token, over its number of tokens to the power of
`length_penalty`. The search is that of transformers' `generate`: of one step's continuations only the best `width` may
end, and `early_stopping` says when no better end is looked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from app.engine.scheduler.batch import SampledTokens, Sequence, sequence_timings
from app.messages import FinishReason, SequenceFinished, TokenLogprob


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for a beam; `logprob` is cumulative and includes it."""

    parent: Sequence
    logprob: float
    token: TokenLogprob

    @property
    def num_tokens(self) -> int:
        return self.parent.num_completion_tokens + 1

    @property
    def score(self) -> float:
        length: float = self.num_tokens**self.parent.params.length_penalty
        return self.logprob / length

    @property
    def token_logprobs(self) -> tuple[TokenLogprob, ...]:
        return (*self.parent.beam_token_logprobs, self.token) if self.parent.params.logprobs is not None else ()

    def child(self) -> Sequence:
        """Return a new beam that continues the parent. It has no slot yet."""
        return replace(
            self.parent,
            token_ids=[*self.parent.token_ids, self.token.token_id],
            slot=None,
            beam_logprob=self.logprob,
            beam_token_logprobs=self.token_logprobs,
        )

    def extend_parent(self) -> None:
        """Append the token to the parent itself. Call this only after all children have been created."""
        beam = self.parent
        beam.beam_logprob, beam.beam_token_logprobs = self.logprob, self.token_logprobs
        beam.token_ids.append(self.token.token_id)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished completion. Its stop token counts in the score but is not part of `token_ids`."""

    score: float
    token_ids: tuple[int, ...]
    token_logprobs: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop_token_id: int | None = None


class BeamGroup:
    """The beams of one request, all decoded in the same steps. The first, the root, represents the request."""

    def __init__(self, root: Sequence) -> None:
        self.root = root
        self.width = root.params.beam_width
        self.beams = [root]
        self.finished: list[Hypothesis] = []  # best first, at most `width` entries

    def select(self, sampled: Iterable[tuple[Sequence, SampledTokens]]) -> list[Continuation]:
        """Return the best `width` continuations, none if the search is over; ending ones above become hypotheses."""
        chosen: list[Continuation] = []
        for place, one in enumerate(sorted(_candidate_continuations(sampled), key=lambda one: -one.logprob)):
            stops = one.token.token_id in one.parent.stop_ids
            if stops or len(one.parent.token_ids) + 1 >= one.parent.max_length:
                if place < self.width:
                    self._finish(one, "stop" if stops else "length")
            elif len(chosen) < self.width:
                chosen.append(one)
        return [] if self._is_over(chosen) else chosen

    def best(self) -> list[Hypothesis]:
        """Return the best hypotheses of a search that is over, the last repeated if there are too few."""
        assert self.finished, "a search that is over has at least one hypothesis"
        num_choices = self.root.params.n
        missing = num_choices - len(self.finished)
        return [*self.finished, *[self.finished[-1]] * missing][:num_choices]

    def restart(self) -> Sequence:
        """Reset the search to the prompt after its memory was taken away; it is deterministic and sent nothing."""
        root = self.root
        del root.token_ids[root.num_prompt_tokens :]
        root.beam_logprob, root.beam_token_logprobs = 0.0, ()
        self.beams, self.finished = [root], []
        return root

    def _finish(self, last: Continuation, reason: FinishReason) -> None:
        is_stop = reason == "stop"
        token_id = last.token.token_id
        token_ids = (*last.parent.token_ids[last.parent.num_prompt_tokens :], token_id)
        token_logprobs = last.token_logprobs[:-1] if is_stop else last.token_logprobs
        found = Hypothesis(
            last.score, token_ids[:-1] if is_stop else token_ids, token_logprobs, reason, token_id if is_stop else None
        )
        self.finished = sorted([*self.finished, found], key=lambda one: -one.score)[: self.width]

    def _is_over(self, chosen: list[Continuation]) -> bool:
        """Return True if no beam continues, or `width` hypotheses score at least as well as the best beam may."""
        params = self.root.params
        if len(self.finished) < self.width or not chosen:
            return not chosen
        if params.early_stopping is True:
            return True
        best = chosen[0]
        length = best.num_tokens
        if params.early_stopping == "never" and params.length_penalty > 0:
            length = self.root.max_length - self.root.num_prompt_tokens
        return best.logprob / float(length**params.length_penalty) <= self.finished[-1].score


def _candidate_continuations(sampled: Iterable[tuple[Sequence, SampledTokens]]) -> Iterator[Continuation]:
    for beam, candidates in sampled:
        asked = beam.params.logprobs or 0
        top = candidates.top or tuple(zip(candidates.token_ids, candidates.logprobs, strict=True))
        for token_id, logprob in zip(candidates.token_ids, candidates.logprobs, strict=True):
            if logprob > -inf:
                yield Continuation(beam, beam.beam_logprob + logprob, TokenLogprob(token_id, logprob, top[:asked]))


def beam_search_finished(sequence: Sequence, choice: int, best: Hypothesis, now: float) -> SequenceFinished:
    return SequenceFinished(
        request_id=sequence.request_id,
        choice=choice,
        reason=best.reason,
        timings=sequence_timings(sequence, now),
        num_completion_tokens=len(best.token_ids) + (best.stop_token_id is not None),
        token_ids=best.token_ids,
        logprobs=best.token_logprobs,
        stop_token_id=best.stop_token_id,
    )
