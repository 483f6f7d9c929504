"""Beam search over one request: which continuations live on and which hypothesis is best. Slots and steps are the scheduler's business.

Scores are the mean log-probability of a completion's tokens, a stop token among them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from math import inf

from app.engine.batch import Picked
from app.engine.sequence import Sequence
from app.messages import FinishReason, TokenLogprob


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for a beam; `logprob` is cumulative, `token` says what the sampler knew of it."""

    parent: Sequence
    logprob: float
    token: TokenLogprob

    @property
    def num_tokens(self) -> int:
        """Completion tokens with this one."""
        return self.parent.num_completion_tokens + 1

    @property
    def score(self) -> float:
        return self.logprob / self.num_tokens

    @property
    def trail(self) -> tuple[TokenLogprob, ...]:
        """Log-probabilities of the whole completion where asked for."""
        return (*self.parent.beam_trail, self.token) if self.parent.params.logprobs is not None else ()

    def child(self) -> Sequence:
        """A new beam, without a slot yet."""
        return replace(
            self.parent,
            token_ids=[*self.parent.token_ids, self.token.token_id],
            slot=None,
            beam_logprob=self.logprob,
            beam_trail=self.trail,
        )

    def grow_parent(self) -> None:
        """The parent itself goes on; after all children have been made."""
        beam = self.parent
        beam.beam_logprob, beam.beam_trail = self.logprob, self.trail
        beam.token_ids.append(self.token.token_id)


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """A finished completion. Its stop token counts in the score and is not among `token_ids`."""

    score: float
    token_ids: tuple[int, ...]
    trail: tuple[TokenLogprob, ...]
    reason: FinishReason
    stop_token_id: int | None = None


class BeamGroup:
    """The beams of one request, all decoding in the same steps. It begins with one, the root, which stands for the request to the end."""

    def __init__(self, root: Sequence) -> None:
        self.root = root
        self.width = root.params.beam_width
        self.beams = [root]
        self.finished: list[Hypothesis] = []  # best first, at most `width`

    def select(self, picked: Iterable[tuple[Sequence, Picked]]) -> list[Continuation]:
        """The best `width` continuations; empty when the search is over. Those that end above them become hypotheses."""
        chosen: list[Continuation] = []
        num_kept = 0
        for one in sorted(_continuations(picked), key=lambda one: -one.logprob):
            if num_kept == self.width:
                break
            if one.token.token_id in one.parent.stop_ids:
                self._finish(one, "stop")
                continue
            num_kept += 1
            if len(one.parent.token_ids) + 1 >= one.parent.limit:
                self._finish(one, "length")
            else:
                chosen.append(one)
        return [] if self._is_settled(chosen) else chosen

    def best(self) -> Hypothesis:
        assert self.finished, "a search that is over has found something"
        return self.finished[0]

    def restart(self) -> Sequence:
        """Back to the prompt, its memory having been taken away: the search is deterministic and nothing of it was sent."""
        root = self.root
        del root.token_ids[root.num_prompt_tokens :]
        root.beam_logprob, root.beam_trail = 0.0, ()
        self.beams, self.finished = [root], []
        return root

    def _finish(self, last: Continuation, reason: FinishReason) -> None:
        is_stop = reason == "stop"
        token_id = last.token.token_id
        token_ids = (*last.parent.token_ids[last.parent.num_prompt_tokens :], token_id)
        trail = last.trail[:-1] if is_stop else last.trail
        found = Hypothesis(last.score, token_ids[:-1] if is_stop else token_ids, trail, reason, token_id if is_stop else None)
        self.finished = sorted([*self.finished, found], key=lambda one: -one.score)[: self.width]

    def _is_settled(self, chosen: list[Continuation]) -> bool:
        """True where nothing lives on, or `width` hypotheses are at least as good as what the best living beam is now."""
        if len(self.finished) < self.width:
            return not chosen
        return max((one.score for one in chosen), default=-inf) <= self.finished[-1].score


def _continuations(picked: Iterable[tuple[Sequence, Picked]]) -> Iterator[Continuation]:
    for beam, candidates in picked:
        asked = beam.params.logprobs or 0
        top = candidates.top or tuple(zip(candidates.token_ids, candidates.logprobs, strict=True))
        for token_id, logprob in zip(candidates.token_ids, candidates.logprobs, strict=True):
            if logprob > -inf:
                yield Continuation(beam, beam.beam_logprob + logprob, TokenLogprob(token_id, logprob, top[:asked]))
