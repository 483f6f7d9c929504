"""Runs an encoder on texts packed end to end, as the engine's runner does."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from app.messages import Text
from app.models.encoders.config import positions_of
from app.models.encoders.encoder import Encoder
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, EncodeContext
from armature_kernels.attention.texts import TextStarts, attend_texts


@torch.inference_mode()
def encoded(
    model: Encoder, texts: Sequence[Text], names: Sequence[str], skipped: Sequence[int] | None = None
) -> dict[str, Tensor]:
    """What is asked of the model, of these texts in one batch."""
    starts = list(accumulate((len(text.token_ids) for text in texts), initial=0))
    place = TextStarts(starts[-1])
    place.fill(starts)

    def attend(layer: int, heads: QkvHeads, spec: AttentionSpec) -> Tensor:
        return attend_texts(heads, place, spec)

    ids = torch.tensor([token for text in texts for token in text.token_ids])
    types = torch.tensor([one for text in texts for one in text.type_ids or (0,) * len(text.token_ids)])
    positions = torch.tensor([one for text in texts for one in positions_of(text.token_ids, model.config.padding_id)])
    borders = torch.tensor(starts)
    rows = model.rows(borders, names)
    hidden = model.hidden(
        EncodeContext(ids, positions, types if model.config.num_types else None, borders, attend), rows
    )
    return model.outputs(hidden, borders, names, rows, None if skipped is None else torch.tensor(skipped))


def random_texts(lengths: Sequence[int], vocab_size: int = 320, num_types: int = 0, seed: int = 0) -> list[Text]:
    """Texts of random ids, none of them padding or the like; in two segments where the model has types."""
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for length in lengths:
        ids = torch.randint(5, vocab_size, (length,), generator=generator).tolist()
        types = tuple(int(place > length // 2) for place in range(length)) if num_types > 1 else ()
        texts.append(Text(tuple(ids), types))
    return texts
