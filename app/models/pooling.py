"""From the hidden states of texts packed end to end to one vector a text. A text's vector does not depend on its neighbours."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from app.models.encoder_config import PoolingMode

_SUM, _MEAN, _MAX = 0, 1, 2  # as torch.embedding_bag numbers them


@dataclass(frozen=True, slots=True)
class Spans:
    """Texts end to end: text i is tokens [starts[i], starts[i + 1]), of which the first `skipped` [texts] do not count (None: all do)."""

    starts: Tensor
    skipped: Tensor | None

    @property
    def lengths(self) -> Tensor:
        """Tokens that count, [texts, 1]."""
        whole = self.starts.diff()
        return (whole if self.skipped is None else whole - self.skipped)[:, None]

    def reduced(self, hidden: Tensor, how: int, weights: Tensor | None = None) -> Tensor:
        """hidden [tokens, size] to one row a text, each token's weighed by `weights` [tokens].

        As bags of rows, which torch sums in order and with nothing written between (2,048 x 384: 0.2 ms, segment_reduce takes 10).
        """
        tokens = torch.arange(len(hidden), device=hidden.device)
        bags: Tensor = torch.embedding_bag(hidden, tokens, self._borders(), False, how, False, weights, True)[0]
        return bags if self.skipped is None else bags[1::2]

    def _borders(self) -> Tensor:
        """Where bags begin, and the end: what is skipped of a text is a bag of its own."""
        if self.skipped is None:
            return self.starts
        begins = torch.stack((self.starts[:-1], self.starts[:-1] + self.skipped), 1)
        return torch.cat((begins.flatten(), self.starts[-1:]))


def pooled(hidden: Tensor, starts: Tensor, modes: Sequence[PoolingMode], skipped: Tensor | None = None) -> Tensor:
    """hidden fp32 [tokens, size] of texts that begin at `starts` [texts + 1] to [texts, size * modes], the modes side by side.

    The first `skipped` [texts] tokens of a text are left out (None: none), but a single token is the first or last of all.
    """
    spans = Spans(starts, skipped)
    vectors = []
    for mode in modes:
        token = one_token(starts, mode)
        vectors.append(_REDUCED[mode](hidden, spans) if token is None else hidden[token])
    return vectors[0] if len(vectors) == 1 else torch.cat(vectors, 1)


def one_token(starts: Tensor, mode: str) -> Tensor | None:
    """Which token of each text it is that becomes its vector, [texts] int64; None where it is not a single one."""
    return {"cls": starts[:-1], "last": starts[1:] - 1}.get(mode)


def _weighted_mean(hidden: Tensor, spans: Spans) -> Tensor:
    """The first token of a text weighs 1, the next 2, and so on, those left out included."""
    # Told how many come out, a device need not be waited for.
    starts = torch.repeat_interleave(spans.starts[:-1], spans.starts.diff(), output_size=len(hidden))
    weights = torch.arange(1.0, len(hidden) + 1.0, device=hidden.device) - starts
    return spans.reduced(hidden, _SUM, weights) / spans.reduced(weights[:, None], _SUM)


_REDUCED: Mapping[str, Callable[[Tensor, Spans], Tensor]] = {
    "mean": lambda hidden, spans: spans.reduced(hidden, _MEAN),
    "max": lambda hidden, spans: spans.reduced(hidden, _MAX),
    "mean_sqrt_len": lambda hidden, spans: spans.reduced(hidden, _SUM) / spans.lengths.sqrt(),
    "weighted_mean": _weighted_mean,
}
