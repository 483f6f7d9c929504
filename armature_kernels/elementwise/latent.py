"""The heads of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434) as rows that the usual attention reads.

A head of queries and keys has a part with rotary embeddings and a plain part. Keys and values come from a latent row
that all heads share, and so does the rotated part of keys, which is the same for all heads.

`csrc/latent.h` arranges them on a CPU; `latent_heads_torch` is the reference implementation and serves elsewhere.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.elementwise.latent_sizes import LatentHeads
from armature_kernels.linear.activations import ROW_DTYPES
from armature_kernels.native.arguments import LatentArguments, OpCode
from armature_kernels.native.memory import empty
from armature_kernels.native.operations import has_kernel, run_operation


def latent_heads(queries: Tensor, others: Tensor, rotated_keys: Tensor, sizes: LatentHeads) -> Tensor:
    """Return [tokens, 3 * heads * size]: queries, keys and values, the rotated part of a head first.

    The halves of a rotated part are those that rotary embeddings rotate. Values are padded with zeros.

    Args:
        queries: [tokens, heads * size], the plain part of a head first.
        others: [tokens, heads * (plain + value)]: of each head the plain part of the key, then the value.
        rotated_keys: [tokens, rotated].
        sizes: The sizes.
    """
    given = (queries, others, rotated_keys)
    plain = all(x.dtype == queries.dtype and x.stride(1) == 1 and x.device.type == "cpu" for x in given)
    if not (plain and queries.dtype in ROW_DTYPES and has_kernel(OpCode.LATENT)):
        return latent_heads_torch(queries, others, rotated_keys, sizes)
    rows = len(queries)
    out = empty((rows, 3 * sizes.heads * sizes.size), queries.dtype)
    numbers = (rows, sizes.heads, sizes.plain, sizes.rotated, sizes.value, sizes.interleaved)
    run_operation(
        LatentArguments(
            *(x.data_ptr() for x in (*given, out)), *(x.stride(0) for x in given), *numbers, out.dtype == torch.float32
        ),
        OpCode.LATENT,
        out.numel(),
    )
    return out


def latent_heads_torch(queries: Tensor, others: Tensor, rotated_keys: Tensor, sizes: LatentHeads) -> Tensor:
    """Arrange the heads by torch."""
    tokens, plain = len(queries), sizes.plain
    query = queries.reshape(tokens, sizes.heads, sizes.size)
    other = others.reshape(tokens, sizes.heads, plain + sizes.value)
    rotated = _halves(rotated_keys, sizes)[:, None].expand(-1, sizes.heads, -1)
    query = torch.cat((_halves(query[..., plain:], sizes), query[..., :plain]), -1)
    key = torch.cat((rotated, other[..., :plain]), -1)
    value = F.pad(other[..., plain:], (0, sizes.size - sizes.value))
    return torch.cat((query, key, value), 1).flatten(1)


def _halves(x: Tensor, sizes: LatentHeads) -> Tensor:
    return torch.cat((x[..., ::2], x[..., 1::2]), -1) if sizes.interleaved else x
