"""Step times of the whole model, from the tables that calibration measured.

The plan, the prefill budget and the wait estimate use it. Times are linear between measured points and
proportional beyond the last one. They never fall when rows, tokens or context grow: a measured point below an
earlier one, which is noise, is raised to it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from app.hardware.decision import Trial

# Share of the cost of a context token for a decoding sequence: the queries of a chunk read keys and values once for all of them. Used if
# the trial did not measure it. The correction factors of `StepTimes` correct it while serving.
_CHUNK_SHARE = 0.5

TABLE_TEXT_TOKENS = 128  # tokens of each text in an encoder's table, or fewer if the step has fewer

_Points = tuple[tuple[int, float], ...]  # (number of rows, seconds), both rising


@dataclass(frozen=True, slots=True)
class StepSeconds:
    """Measured times of the steps of one model, in seconds.

    `decode_points` and `prefill_points` are the measured tables, rising; an encoder has `encode_points` instead.
    `context_token_seconds` is for each token of context that a decoding sequence attends to. `pair_seconds` is for
    each pair of a prompt token and a token computed before its chunk, or of two tokens of a text beyond the pairs
    of the table's texts. `logits_points` is the time that decoding rows take beyond the same number of prompt
    rows: of a prompt, only the last row has logits and is sampled.
    """

    decode_points: _Points
    prefill_points: _Points
    context_token_seconds: float = 0.0
    pair_seconds: float = 0.0
    logits_points: _Points = ()
    encode_points: _Points = ()

    @classmethod
    def of(cls, trial: Trial) -> StepSeconds:
        """Build the table of a trial."""
        pair = trial.pair_seconds or _CHUNK_SHARE * trial.context_token_seconds
        decode = _rising(trial.decode_seconds)
        bare = cls(decode, _rising(trial.prefill_seconds) or decode, trial.context_token_seconds, pair)
        logits = _rising({rows: seconds - bare._products(rows) for rows, seconds in decode})
        return replace(bare, logits_points=logits, encode_points=_rising(trial.encode_seconds))

    def decode(self, rows: int, context_tokens: int = 0) -> float:
        """Return the time of a step of `rows` decoding sequences with `context_tokens` of context in all."""
        return _read(self.decode_points, rows) + context_tokens * self.context_token_seconds

    def prefill(self, tokens: int, context_tokens: int = 0) -> float:
        """Return the time of a chunk of one prompt, `context_tokens` of which were computed before."""
        return self._products(tokens) + tokens * context_tokens * self.pair_seconds

    def mixed(self, rows: int, tokens: int, context_tokens: int = 0, prompt_context_tokens: int = 0) -> float:
        """Return the time of a step with decoding rows and a prompt chunk.

        The products cover all rows at once, and each part attends to its own context.
        """
        if not tokens:
            return self.decode(rows, context_tokens)
        if not rows:
            return self.prefill(tokens, prompt_context_tokens)
        products = max(self._products(rows + tokens) + self._logits(rows), _read(self.decode_points, rows))
        attention = context_tokens * self.context_token_seconds + tokens * prompt_context_tokens * self.pair_seconds
        return products + attention

    def encode(self, tokens: int, pairs: int = 0) -> float:
        """Return the time of a step of texts with `tokens` tokens in all.

        `pairs` is the number of pairs of tokens of the same text; 0 if unknown.
        """
        more = pairs - tokens * min(tokens, TABLE_TEXT_TOKENS)
        return _read(self.encode_points, tokens) + max(more, 0) * self.pair_seconds

    @property
    def pair_tokens(self) -> float | None:
        """Cost of one pair of tokens of a text, in tokens without pairs; None if it was not measured."""
        if not self.pair_seconds or not self.encode_points:
            return None
        tokens, seconds = self.encode_points[-1]
        alone = seconds / tokens - min(tokens, TABLE_TEXT_TOKENS) * self.pair_seconds
        return self.pair_seconds / alone if alone > 0.0 else None

    def scaled(self, factor: float) -> StepSeconds:
        """Return the table of a machine that is `factor` times slower."""
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
        """Return the time of a prompt's tokens without context.

        Below the first measured point it is the time of the same number of decodes, or a linear estimate if that
        is less.
        """
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
    """Interpolate between points; constant below the first one, proportional beyond the last, and 0 for 0 rows."""
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
