"""Attention of packed texts on a GPU against its reference where torch's flash kernel does not apply: soft caps,
biases, FP32.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="Triton is not installed")

import torch

from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts, attend_texts_padded_torch
from armature_kernels.triton.prompts import attend_packed

CLOSE = {torch.float32: (1e-5, 1e-5), torch.bfloat16: (2**-6, 2**-6)}


def equal_to_the_twin(
    lengths: list[int], spec: AttentionSpec, gpu: torch.device, dtype: torch.dtype = torch.float32
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    product = torch.randn((sum(lengths), (4 + 2 * 2) * 24), generator=generator).to(gpu, dtype)
    heads = QkvHeads(product, 4, 2, 24)
    texts = PackedTexts(torch.tensor([0, *lengths]).cumsum(0).int().to(gpu), max(lengths))
    found = attend_packed(*heads.split(), texts, spec).flatten(1)
    rtol, atol = CLOSE[dtype]
    torch.testing.assert_close(found, attend_texts_padded_torch(heads, texts, spec), rtol=rtol, atol=atol)


def distances(most: int, gpu: torch.device) -> torch.Tensor:
    return torch.randn((4, 2 * most + 1), generator=torch.Generator().manual_seed(most)).to(gpu)


SPECS = {
    "whole": AttentionSpec(0.2, bidirectional=True),
    "window": AttentionSpec(0.2, window=15, bidirectional=True),
    "causal": AttentionSpec(0.2),
    "causal window": AttentionSpec(0.2, window=9),
    "capped": AttentionSpec(0.2, softcap=1.5, bidirectional=True),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_texts_of_any_length_some_of_none(spec: AttentionSpec, gpu: torch.device) -> None:
    equal_to_the_twin([40, 0, 1, 33, 0], spec, gpu)


@pytest.mark.parametrize("most", [3, 100])
def test_biases_by_distance(most: int, gpu: torch.device) -> None:
    equal_to_the_twin([40, 1], AttentionSpec(0.2, bidirectional=True, distance_bias=distances(most, gpu)), gpu)


def test_a_cap_comes_before_the_bias_and_a_window_after_it(gpu: torch.device) -> None:
    spec = AttentionSpec(0.2, window=20, softcap=1.0, bidirectional=True, distance_bias=distances(5, gpu))
    equal_to_the_twin([40], spec, gpu)


def test_halves(gpu: torch.device) -> None:
    equal_to_the_twin([20, 9], AttentionSpec(0.2, softcap=3.0, bidirectional=True), gpu, torch.bfloat16)


def test_keys_and_values_may_lie_in_different_tensors(gpu: torch.device) -> None:
    """As they do where heads were turned: queries and keys beside each other, values in the product."""
    generator = torch.Generator().manual_seed(1)
    query, key = torch.randn((9, 6, 24), generator=generator).to(gpu).tensor_split((4,), 1)
    product = torch.randn((9, 8, 24), generator=generator).to(gpu)
    texts, spec = PackedTexts(torch.tensor([0, 5, 9], dtype=torch.int32, device=gpu), 5), SPECS["whole"]
    joined = torch.cat((query, key, product[:, 6:]), 1).flatten(1)
    expected = attend_texts_padded_torch(QkvHeads(joined, 4, 2, 24), texts, spec)
    torch.testing.assert_close(
        attend_packed(query, key, product[:, 6:], texts, spec).flatten(1), expected, rtol=1e-5, atol=1e-5
    )
