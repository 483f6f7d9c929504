"""Pooling of hidden states to one vector per text by each definition, and the layers after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from app.models.encoders.config import DenseConfig, EncoderConfig, HeadConfig, PoolingConfig, PoolingMode
from app.models.encoders.heads import DenseLayer, LabelHead, LayerNorm, VectorHead, pool

LENGTHS, SIZE = (3, 1, 7), 4
STARTS = torch.tensor([0, 3, 4, 11])
# Of the tokens [n, size] that count and, counted from 1, their places in the text.
MEANT: Mapping[PoolingMode, Callable[[Tensor, Tensor], Tensor]] = {
    "mean": lambda tokens, places: tokens.mean(0),
    "max": lambda tokens, places: tokens.amax(0),
    "mean_sqrt_len": lambda tokens, places: tokens.sum(0) / len(tokens) ** 0.5,
    "weighted_mean": lambda tokens, places: (tokens * places[:, None]).sum(0) / places.sum(),
}
CONFIG = EncoderConfig(
    "BertModel",
    1,
    2,
    2,
    2,
    SIZE,
    8,
    10,
    16,
    1e-5,
    "gelu",
    (None,),
    (None,),
    pooling=PoolingConfig(("mean",), normalizes=True),
)


def hidden_states() -> Tensor:
    return torch.randn(sum(LENGTHS), SIZE, generator=torch.Generator().manual_seed(0))


def texts_of(hidden: Tensor) -> list[Tensor]:
    return list(hidden.split(LENGTHS))


@pytest.mark.parametrize("skipped", [None, (2, 0, 3)])
@pytest.mark.parametrize("mode", MEANT)
def test_as_the_definition_reads(mode: PoolingMode, skipped: tuple[int, ...] | None) -> None:
    hidden = hidden_states()
    left_out = (0, 0, 0) if skipped is None else skipped
    meant = [
        MEANT[mode](text[skip:], torch.arange(skip + 1, len(text) + 1))
        for text, skip in zip(texts_of(hidden), left_out, strict=True)
    ]
    vectors = pool(hidden, STARTS, (mode,), None if skipped is None else torch.tensor(skipped))
    torch.testing.assert_close(vectors, torch.stack(meant))


def test_first_and_last_and_several_side_by_side() -> None:
    hidden = hidden_states()
    first, last = hidden[[0, 3, 4]], hidden[[2, 3, 10]]
    assert torch.equal(pool(hidden, STARTS, ("cls",)), first)
    assert torch.equal(pool(hidden, STARTS, ("last",)), last)
    assert torch.equal(pool(hidden, STARTS, ("cls", "last", "max"))[:, : 2 * SIZE], torch.cat((first, last), 1))


@pytest.mark.parametrize("mode", MEANT)
def test_neighbours_change_not_a_bit(mode: PoolingMode) -> None:
    hidden = hidden_states()
    alone = [pool(text, torch.tensor([0, len(text)]), (mode,)) for text in texts_of(hidden)]
    assert torch.equal(pool(hidden, STARTS, (mode,)), torch.cat(alone))


def random_dense(dense: DenseLayer) -> None:
    generator = torch.Generator().manual_seed(dense.weight.numel())
    bias = torch.randn(len(dense.weight), generator=generator) if dense.has_bias else None
    dense.set_weight(torch.randn(dense.weight.shape, generator=generator).to(torch.bfloat16), bias)


def test_dense_layers_behind_pooling_in_order() -> None:
    dense = (
        DenseConfig("2_Dense", SIZE, 6, activation="tanh"),
        DenseConfig("3_Dense", 6, 2, bias=False, activation="identity"),
    )
    head = VectorHead(replace(CONFIG, pooling=PoolingConfig(("mean",), dense)))
    assert [module.source for module in head.dense] == ["dense.0", "dense.1"]
    for module in head.dense:
        random_dense(module)
    first, second = head.dense
    assert first.weight.dtype == torch.float32 and second.bias is None
    hidden = hidden_states()
    meant = torch.tanh(pool(hidden, STARTS, ("mean",)) @ first.weight.T + first.bias) @ second.weight.T
    torch.testing.assert_close(head(hidden, STARTS, None), meant)


def test_a_head_that_normalises() -> None:
    config = HeadConfig("mean", dense_bias=False, activation="gelu", norm=True)
    head = LabelHead(replace(CONFIG, labels=("no", "yes"), head=config, norm_bias=False), config)
    dense, norm, out = head.parts
    random_dense(dense)
    random_dense(out)
    assert isinstance(norm, LayerNorm) and not norm.has_bias
    norm.set_weight(torch.rand(SIZE))
    hidden = hidden_states()
    inner = torch.nn.functional.gelu(pool(hidden, STARTS, ("mean",)) @ dense.weight.T)
    meant = torch.nn.functional.layer_norm(inner, (SIZE,), norm.weight, None, 1e-5) @ out.weight.T + out.bias
    torch.testing.assert_close(head(hidden, STARTS), meant)
