"""Layers with a recurrent state on a device: short convolutions, the gated delta rule and Mamba-2, by torch.

A step reads a sequence's state from one row and writes it to another one, so it may be dropped or computed again. Sequences
with one token are computed together; where their states are is in tensors, so the step can be captured. The tokens of
others are computed in chunks (arXiv 2412.06464): within a chunk by products of matrices, from chunk to chunk by the state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from armature_kernels.attention.recurrence import Recurrence, RecurrentInputs
from armature_kernels.attention.recurrent_sizes import STATE_COLUMNS, RecurrentSizes
from armature_kernels.triton.support import agrees_with_reference, relative_difference, triton_usable

CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class RowRun:
    """Rows `[first, first + num_tokens)` of the batch: the state goes from row `read` to row `write`.

    `write` -1: these are draft tokens, whose inputs are kept, and no state is written.
    """

    first: int
    num_tokens: int
    read: int
    write: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.num_tokens)


@dataclass(frozen=True, slots=True)
class StateRows:
    """The states of a step: the first rows of the batch are sequences of one token each, then come `runs`.

    `reads`, `writes` [sequences] int64: where their states are, and where they will be.
    """

    reads: Tensor
    writes: Tensor
    runs: Sequence[RowRun] = ()

    def without_single(self) -> StateRows:
        return StateRows(self.reads[:0], self.writes[:0], self.runs)


def convolve_on_device(
    x: Tensor, filters: Tensor, states: Tensor, step: StateRows, kept: Tensor | None = None, gated: bool = True
) -> Tensor:
    """Compute `convolve`; `states` fp32 [rows, state_elements] has the rows that `step` names."""
    parts = x.float().chunk(3 if gated else 1, 1)
    inputs = parts[0] * parts[2] if gated else parts[0]
    out = torch.empty_like(inputs)
    tails = states[:, : (len(filters) - 1) * filters.shape[1]]
    _filter_rows(inputs, filters, tails, step, out)
    _keep(kept, inputs, step)
    return out * parts[1] if gated else out


def recur_on_device(
    inputs: RecurrentInputs, layer: Recurrence, states: Tensor, step: StateRows, kept: Tensor | None = None
) -> Tensor:
    """Compute `recur`; `states` fp32 [rows, state_elements] has the rows that `step` names."""
    sizes, single = layer.sizes, len(step.reads)
    channels = inputs.channels.float()
    steps = F.softplus(inputs.steps.float() * layer.step_scale + layer.step_bias).clamp(*layer.step_limits)
    logs = -layer.rates * steps
    factors = steps if inputs.betas is None else inputs.betas.float().sigmoid() * layer.beta_scale
    given = [channels, inputs.steps.float(), *([] if inputs.betas is None else [inputs.betas.float()])]
    _keep(kept, given, step)
    mixed = torch.empty_like(channels)
    _filter_rows(channels, layer.filters, states[:, : (sizes.width - 1) * sizes.channels], step, mixed)
    mixed = F.silu(mixed if layer.bias is None else mixed + layer.bias)
    query, key, value = _heads(mixed, sizes)
    out = torch.empty_like(value)
    matrices = states[:, sizes.tail_elements : sizes.state_elements]
    if single and triton_usable(mixed) and _agrees(mixed, sizes):
        from armature_kernels.triton.recurrence import advance_by_token

        scales = logs[:single], factors[:single]
        out[:single].copy_(advance_by_token(mixed[:single], scales, states, (step.reads, step.writes), sizes))
    elif single:
        own = [one[:single] for one in (query, key, value, logs, factors)]
        found = matrices.index_select(0, step.reads)
        result, after = _advance_by_token(own, found, sizes)
        out[:single].copy_(result)
        matrices.index_copy_(0, step.writes, after)
    for run in step.runs:
        own = [one[run.rows].transpose(0, 1) for one in (query, key, value, logs, factors)]
        result, after = _advance_by_chunks(own, matrices[run.read], sizes)
        out[run.rows].copy_(result.transpose(0, 1))
        if run.write >= 0:
            matrices[run.write].copy_(after)
    if layer.skips is not None:
        out += value * layer.skips[:, None]
    return out.flatten(1)


def _agrees(mixed: Tensor, sizes: RecurrentSizes) -> bool:
    case = (sizes, mixed.dtype)
    return agrees_with_reference("recurrent states", case, lambda: kernel_difference(mixed.device, sizes))


def kernel_difference(where: torch.device, sizes: RecurrentSizes) -> float:
    """Return the relative difference of random tokens of two sequences by the kernel and by torch, and of their states."""
    from armature_kernels.triton.recurrence import advance_by_token

    generator = torch.Generator(where).manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=where)

    mixed, states = random(2, sizes.channels), random(4, sizes.state_elements)
    logs, factors = -random(2, sizes.heads).abs(), random(2, sizes.heads).sigmoid()
    matrices = states[:, sizes.tail_elements : sizes.state_elements]
    # Elements of padding are not part of a state.
    matrices.copy_(_stored(_matrices(matrices, sizes), sizes))
    own = [*_heads(mixed, sizes), logs, factors]
    result, after = _advance_by_token(own, matrices[:2], sizes)
    reads, writes = (torch.tensor(places, device=where) for places in ((0, 1), (3, 2)))
    found = advance_by_token(mixed, (logs, factors), states, (reads, writes), sizes)
    return max(relative_difference(found, result), relative_difference(matrices[writes], after))


def _keep(kept: Tensor | None, inputs: Tensor | list[Tensor], step: StateRows) -> None:
    """Keep the inputs of draft tokens."""
    for run in step.runs if kept is not None else ():
        if run.write < 0 and kept is not None:
            parts = inputs if isinstance(inputs, list) else [inputs]
            whole = torch.cat([part[run.rows] for part in parts], 1)
            kept[run.rows, : whole.shape[1]].copy_(whole)


def _filter_rows(x: Tensor, filters: Tensor, tails: Tensor, step: StateRows, out: Tensor) -> None:
    """Write the filtered x [tokens, channels] to `out`, and move the inputs before a token in `tails` [rows, elements]."""
    width, channels = filters.shape
    single = len(step.reads)
    if single:
        before = tails.index_select(0, step.reads).view(single, width - 1, channels)
        whole = torch.cat((before, x[:single, None]), 1)
        out[:single].copy_((whole * filters).sum(1))
        tails.index_copy_(0, step.writes, whole[:, 1:].flatten(1))
    for run in step.runs:
        whole = torch.cat((tails[run.read].view(width - 1, channels), x[run.rows]))
        out[run.rows].copy_((whole.unfold(0, width, 1).transpose(1, 2) * filters).sum(1))
        if run.write >= 0:
            tails[run.write].copy_(whole[run.num_tokens :].flatten())


def _heads(mixed: Tensor, sizes: RecurrentSizes) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys [tokens, heads, key_size], and values [tokens, heads, value_size]."""
    places, counts = sizes.places, (sizes.keys, sizes.keys, sizes.values)
    heads = (sizes.key_heads, sizes.key_heads, sizes.heads)
    query, key, value = (
        mixed[:, place : place + count].view(len(mixed), each, count // each)
        for place, count, each in zip(places, counts, heads, strict=True)
    )
    if sizes.has_delta:
        query, key = (one * torch.rsqrt(one.square().sum(-1, keepdim=True) + 1e-6) for one in (query, key))
        query = query * sizes.key_size**-0.5
    query, key = (one.repeat_interleave(sizes.heads // sizes.key_heads, 1) for one in (query, key))
    return query, key, value


def _advance_by_token(own: Sequence[Tensor], matrices: Tensor, sizes: RecurrentSizes) -> tuple[Tensor, Tensor]:
    """Return the results [sequences, heads, value_size], and the states after one token of each sequence."""
    query, key, value, logs, factors = own
    matrix = _matrices(matrices, sizes) * logs.exp()[..., None, None]
    known = torch.einsum("nhk,nhkv->nhv", key, matrix) if sizes.has_delta else 0.0
    matrix = matrix + key[..., None] * ((value - known) * factors[..., None])[..., None, :]
    return torch.einsum("nhk,nhkv->nhv", query, matrix), _stored(matrix, sizes)


def _advance_by_chunks(own: Sequence[Tensor], state: Tensor, sizes: RecurrentSizes) -> tuple[Tensor, Tensor]:
    """Return the results [heads, tokens, value_size] of one sequence, and its state after them."""
    matrix = _matrices(state[None], sizes)[0]
    results = []
    for query, key, value, logs, factors in zip(*(torch.split(one, CHUNK_TOKENS, 1) for one in own), strict=True):
        sums = logs.cumsum(1)
        gaps = sums[:, :, None] - sums[:, None, :]
        later = torch.ones(gaps.shape[1:], dtype=torch.bool, device=gaps.device).triu(1)
        decays, since = gaps.masked_fill(later, float("-inf")).exp(), sums.exp()[..., None]
        added = value
        if sizes.has_delta:
            added = added - since * (key @ matrix)
        added = added * factors[..., None]
        if sizes.has_delta:  # what a token adds depends on what those before it in the chunk added
            system = (key @ key.mT) * decays * factors[..., None]
            added = torch.linalg.solve_triangular(system.tril(-1), added, upper=False, unitriangular=True)
        results.append(since * (query @ matrix) + ((query @ key.mT) * decays) @ added)
        left = (sums[:, -1:] - sums).exp()[..., None]
        matrix = matrix * sums[:, -1, None, None].exp() + (key * left).mT @ added
    return torch.cat(results, 1), _stored(matrix[None], sizes)[0]


def _matrices(stored: Tensor, sizes: RecurrentSizes) -> Tensor:
    """Return stored states [sequences, elements] as matrices [sequences, heads, key_size, value_size]."""
    blocks = stored.view(len(stored), sizes.heads, -1, sizes.key_size, STATE_COLUMNS)
    return blocks.transpose(2, 3).flatten(3)[..., : sizes.value_size]


def _stored(matrices: Tensor, sizes: RecurrentSizes) -> Tensor:
    padded = F.pad(matrices, (0, -sizes.value_size % STATE_COLUMNS))
    blocks = padded.view(len(padded), sizes.heads, sizes.key_size, -1, STATE_COLUMNS)
    return blocks.transpose(2, 3).flatten(1)
