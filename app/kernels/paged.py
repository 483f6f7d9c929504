"""Descriptions of a step's sequences on a device, as tensors that the attention kernels read.

The engine fills them. Keys and values of a layer are flat rows with `PAGE_TOKENS` rows per page. Position p of a
slot is row `tables[slot, p // PAGE_TOKENS] * PAGE_TOKENS + p % PAGE_TOKENS`. Page 0 belongs to no sequence: rows
that only pad a bucket are written there.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

# Tokens that a kernel reads at a time; at most 63 tokens of a sequence's memory are unused. Torch's flash
# kernel does not support pages (pytorch/pytorch#175924: only with a separate package), so nothing else requires
# a page size.
PAGE_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PagedStep:
    """The sequences of one step, decodes first; the same for every layer. Tensors are int32 on the device.

    `tables` is [slots, most_pages]. `slots` [sequences] selects each sequence's table. `lengths` [sequences] is
    the number of context tokens including this step's (0: the row only pads a bucket). `starts` is [sequences +
    1]: the queries of sequence i are rows [starts[i], starts[i + 1]) of the batch.

    The first `num_decodes` sequences have one query each. `most_queries` and `most_context` are upper bounds over
    all sequences, known to the host. `fresh` is True if every sequence that is not a decode begins at position 0,
    so it sees only keys and values of this step.
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
    """Texts packed end to end: text i is tokens [starts[i], starts[i + 1]), at most `most_tokens`.

    `starts` is int32 [texts + 1] on the device. Empty texts are allowed, because they pad a bucket.
    """

    starts: Tensor
    most_tokens: int
