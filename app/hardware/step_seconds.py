"""What a step of the whole model takes, worked out from a trial's tables: pure arithmetic for the plan, the pace and the wait.

Between measured points it is linear, beyond the last one proportional. It never falls where rows, tokens or context grow, whatever
noise the tables carry: a point below an earlier one counts as that one.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.hardware.decision import Trial

# Of what a token of context costs a decoding sequence: the queries of a chunk read keys and values once for all of them. Used where the
# trial did not measure it; steps that carry prompts are held against the model while serving and correct it.
_CHUNK_SHARE = 0.5

TABLE_TEXT_TOKENS = 128  # of each text in an encoder's table, or as many as the step has

_Points = tuple[tuple[int, float], ...]  # number of rows and seconds, both rising


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Seconds of steps of one model as it is served. `decode_points` and `prefill_points` are the measured tables, rising; an encoder has
    `encode_points` instead.

    `context_token_seconds` is for each token of context that a decoding sequence attends to, `pair_seconds` for each pair of a prompt's
    token and one of the tokens computed before its chunk, or of two tokens of a text beyond what texts in the table have. `logits_points`:
    what so many decoding rows take beyond as many of a prompt, of which only the last has logits and is picked from.
    """

    decode_points: _Points
    prefill_points: _Points
    context_token_seconds: float = 0.0
    pair_seconds: float = 0.0
    logits_points: _Points = ()
    encode_points: _Points = ()

    @classmethod
    def of(cls, trial: Trial) -> StepSeconds:
        pair = trial.pair_seconds or _CHUNK_SHARE * trial.context_token_seconds
        decode = _rising(trial.decode_seconds)
        bare = cls(decode, _rising(trial.prefill_seconds) or decode, trial.context_token_seconds, pair)
        logits = _rising({rows: seconds - bare._products(rows) for rows, seconds in decode})
        return replace(bare, logits_points=logits, encode_points=_rising(trial.encode_seconds))

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """`rows` sequences that decode, all together attending to `context_tokens`."""
        return _read(self.decode_points, rows) + context_tokens * self.context_token_seconds

    def prefill(self, tokens: int, context_tokens: int = 0) -> float:
        """A chunk of one prompt behind `context_tokens` of it that are computed already."""
        return self._products(tokens) + tokens * context_tokens * self.pair_seconds

    def mixed(self, rows: int, tokens: int, context_tokens: int = 0, prompt_context_tokens: int = 0) -> float:
        """Both at once: the products of all rows are one, each part attends to its own context."""
        if not tokens:
            return self.decode(rows, context_tokens)
        if not rows:
            return self.prefill(tokens, prompt_context_tokens)
        products = max(self._products(rows + tokens) + self._logits(rows), _read(self.decode_points, rows))
        attention = context_tokens * self.context_token_seconds + tokens * prompt_context_tokens * self.pair_seconds
        return products + attention

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """Texts of so many tokens in all; `pairs`: of each token with one of its own text, 0 where nobody knows."""
        more = pairs - tokens * min(tokens, TABLE_TEXT_TOKENS)
        return _read(self.encode_points, tokens) + max(more, 0) * self.pair_seconds

    @property
    def pair_tokens(self) -> float | None:
        """What a pair of tokens of one text costs, in tokens without pairs; None where it was not measured."""
        if not self.pair_seconds or not self.encode_points:
            return None
        tokens, seconds = self.encode_points[-1]
        alone = seconds / tokens - min(tokens, TABLE_TEXT_TOKENS) * self.pair_seconds
        return self.pair_seconds / alone if alone > 0.0 else None

    def scaled(self, factor: float) -> StepSeconds:
        """The same machine, so many times slower."""
        return replace(
            self,
            decode_points=tuple((rows, seconds * factor) for rows, seconds in self.decode_points),
            prefill_points=tuple((tokens, seconds * factor) for tokens, seconds in self.prefill_points),
            context_token_seconds=self.context_token_seconds * factor,
            pair_seconds=self.pair_seconds * factor,
            logits_points=tuple((rows, seconds * factor) for rows, seconds in self.logits_points),
            encode_points=tuple((tokens, seconds * factor) for tokens, seconds in self.encode_points),
        )

    def _logits(self, rows: int) -> float:
        return max(_read(self.logits_points, rows), 0.0) if self.logits_points else 0.0

    def _products(self, tokens: int) -> float:
        """A prompt's tokens without context. Few of them cost what as many decodes do, or what the line to the first point says."""
        first, seconds = self.prefill_points[0]
        if not 0 < tokens < first:
            return _read(self.prefill_points, tokens)
        one = min(self.decode_points[0][1], seconds)
        line = one + (seconds - one) * (tokens - 1) / max(first - 1, 1)
        return min(line, _read(self.decode_points, tokens))


def _rising(table: Mapping[int, float]) -> _Points:
    points: list[tuple[int, float]] = []
    for number, seconds in sorted(table.items()):
        points.append((number, max(seconds, points[-1][1]) if points else seconds))
    return tuple(points)


def _read(points: _Points, number: int) -> float:
    """Linear between points, the first one's seconds below it, proportional beyond the last; nothing costs nothing."""
    if number <= 0:
        return 0.0
    at = bisect_right(points, (number, float("inf")))
    if at == 0:
        return points[0][1]
    low, low_seconds = points[at - 1]
    if at == len(points):
        return low_seconds * number / low
    high, high_seconds = points[at]
    return low_seconds + (high_seconds - low_seconds) * (number - low) / (high - low)
