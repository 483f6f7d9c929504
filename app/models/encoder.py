"""All encoders: a body that computes the hidden states of texts, and heads that turn them into vectors or logits."""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, nn

from app.models.bert import BertBody
from app.models.context import EncodeContext
from app.models.embedder import DecoderBody
from app.models.encoder_config import EncoderConfig
from app.models.heads import LabelHead, VectorHead


class Encoder(nn.Module):
    """Token ids to the requested outputs: `embedding` or `logits`, and `last_hidden_state`.

    The parts are separate methods, so that the body can be recorded.
    """

    def __init__(self, config: EncoderConfig, body: BertBody | DecoderBody) -> None:
        super().__init__()
        self.config, self.body = config, body
        self.vectors = VectorHead(config) if config.head is None else None
        self.labels = None if config.head is None else LabelHead(config, config.head)

    def rows(self, starts: Tensor, names: Collection[str]) -> Tensor | None:
        """Return the tokens [texts] int64 whose hidden states these outputs need, or None for all.

        The texts begin at `starts` [texts + 1].
        """
        if "last_hidden_state" in names:
            return None
        head = self.vectors or self.labels
        assert head is not None, "vectors where there are no labels"
        return head.rows(starts)

    def hidden(self, context: EncodeContext, rows: Tensor | None = None) -> Tensor:
        """Return hidden states FP32 [tokens, size], or those of `rows` only.

        Only native operations are used, if the precision has them all.
        """
        result: Tensor = self.body(context, rows)
        return result

    def outputs(
        self, hidden: Tensor, starts: Tensor, names: Collection[str], rows: Tensor | None = None, skipped: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the requested outputs, FP32.

        - `embedding` [texts, size], not normalised.
        - `logits` [texts, labels].
        - `last_hidden_state` of all tokens.

        `rows` must be those that `hidden` was called with. The first `skipped` [texts] tokens of a text are not
        pooled.
        """
        hidden, results = self.body.finished(hidden), {}
        for name in names:
            if name == "last_hidden_state":
                results[name] = hidden
            elif name == "embedding":
                assert self.vectors is not None, "outputs are those of the config"
                results[name] = self.vectors.of_rows(hidden) if rows is not None else self.vectors(hidden, starts, skipped)
            else:
                assert self.labels is not None, "outputs are those of the config"
                results[name] = self.labels.of_rows(hidden) if rows is not None else self.labels(hidden, starts)
        return results
