"""What a step attends to on a device with memory of its own, as tensors that kernels read there. Who fills them is the engine's business.

Keys and values of a layer are flat rows (kv_rows.py), `PAGE_TOKENS` to a page; a slot's position p lies at row
`tables[slot, p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS`. Page 0 is nobody's: what only fills a bucket is written there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# What a kernel reads at a time, and so at most 63 tokens of a sequence's memory are idle. Torch's own flash kernel knows no pages
# (pytorch/pytorch#175924: only with a package of its own), so nothing else asks for a size.
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PagedStep:
    """One step's sequences, decodes first; the same for every layer. Tensors are int32, on the device.

    `tables` [slots, most_pages]; `slots`, `lengths` [sequences]: whose table, and how many tokens of context, this step's own included
    (0: the row only fills a bucket); `starts` [sequences + 1]: queries of sequence i are rows [starts[i], starts[i + 1]) of the batch.
    The first `num_decodes` sequences have one query each. `most_queries` and `most_context` are bounds of all, known to the host.
    `fresh`: whatever is no decode begins at position 0, so that it sees nothing but this step's own keys and values.
    """

    tables: Tensor
    slots: Tensor
    starts: Tensor
    lengths: Tensor
    num_decodes: int
    most_queries: int
    most_context: int
    fresh: bool = False


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """Texts end to end: text i is tokens [starts[i], starts[i + 1]), of which there are at most `most_tokens`.

    `starts` int32 [texts + 1] on the device. Texts without tokens are allowed: they fill a bucket.
    """

    starts: Tensor
    most_tokens: int
