"""Holds a batch of texts at fixed addresses, so that replayed operations read the current batch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor

from app.engine.texts import TextSpan
from app.kernels.lanes import TextWords
from app.kernels.memory import Words
from app.kernels.texts import Texts, attend_texts
from app.kernels.turn import Heads
from app.models.context import AttentionSpec, EncodeContext


class TextBatch:
    """Texts packed end to end; also the `Attend` of the layers that read them."""

    def __init__(self, room: int, num_types: int) -> None:
        """Allocate buffers for `room` tokens.

        If the model has one token type, the types of the tokenizer are ignored.
        """
        self.room, self.num_types = room, num_types
        self._token_ids, self._positions, self._wanted, self._starts = Words(room), Words(room), Words(room), Words(room + 1)
        self._type_ids = Words(room) if num_types else None
        self._texts = Texts(room, room)
        self.num_tokens = 0
        self.num_wanted: int | None = None
        self.starts = self._starts.tensor[:1]
        self.rows: tuple[int, ...] = ()  # the selected tokens

    def fill(self, spans: Sequence[TextSpan]) -> None:
        """Write these texts to the buffers. All tokens are selected until `select_rows` is called."""
        token_ids: list[int] = []
        positions: list[int] = []
        for span in spans:
            token_ids += span.text.token_ids
            positions += range(span.num_tokens)
        starts = list(accumulate((span.num_tokens for span in spans), initial=0))
        assert starts[-1] <= self.room, "a step has a budget"
        self.num_tokens, self.num_wanted, self.rows = starts[-1], None, ()
        self._token_ids.fill(token_ids)
        self._positions.fill(positions)
        if self._type_ids is not None and self.num_types > 1:
            self._type_ids.fill([one for span in spans for one in span.text.type_ids or (0,) * span.num_tokens])
        self.starts = self._starts.fill(starts)
        self._texts.fill(starts)

    def want(self, rows: Tensor | None) -> Tensor | None:
        """Select the tokens, in rising order, whose last hidden states are needed.

        Returns them in the batch's own buffer.
        """
        self.rows = () if rows is None else tuple(rows.tolist())
        self.num_wanted = None if rows is None else len(self.rows)
        return None if rows is None else self._wanted.fill(list(self.rows))

    @property
    def text_starts(self) -> tuple[int, ...]:
        """Values of `starts` as integers."""
        return self._texts.starts

    def context(self, tokens: int) -> EncodeContext:
        """Return the context of a forward pass over the first `tokens` tokens."""
        types = None if self._type_ids is None else self._type_ids.tensor[:tokens]
        return EncodeContext(self._token_ids.tensor[:tokens], self._positions.tensor[:tokens], types, self.starts, self)

    def wanted(self, rows: int | None) -> Tensor | None:
        """Return the buffer of the first `rows` selected tokens, or None for all."""
        return None if rows is None else self._wanted.tensor[:rows]

    def words(self, some: bool) -> TextWords:
        """Return the addresses of the buffers; `some` is True if only the selected tokens are computed."""
        types = None if self._type_ids is None else self._type_ids.address
        wanted = self._wanted.address if some else None
        return TextWords(self._token_ids.address, self._positions.address, types, wanted, self._texts.address)

    def __call__(self, layer: int, heads: Heads, spec: AttentionSpec) -> Tensor:
        """Attend within each text, as `Attend` defines it."""
        return attend_texts(heads, self._texts, spec)
