"""torch's flash attention: supported heads, and the translation of our parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from armature_kernels.attention import texts
from armature_kernels.attention.context import AttentionSpec

PLAIN = AttentionSpec(0.1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [8, 64, 96, 256])
def test_halves_of_whole_eights_are_taken(dtype: torch.dtype, head_dim: int) -> None:
    assert texts.torch_flash_supports(dtype, head_dim, PLAIN)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "spec"),
    [
        (torch.float32, 64, PLAIN),
        (torch.bfloat16, 264, PLAIN),
        (torch.bfloat16, 60, PLAIN),
        (torch.bfloat16, 64, AttentionSpec(0.1, softcap=30.0)),
        (torch.bfloat16, 64, AttentionSpec(0.1, sinks=torch.zeros(2))),
        (torch.bfloat16, 64, AttentionSpec(0.1, slopes=torch.zeros(2))),
        (torch.bfloat16, 64, AttentionSpec(0.1, bidirectional=True, distance_bias=torch.zeros(2, 3))),
    ],
    ids=["fp32", "large", "odd", "capped", "sinks", "ALiBi", "biased"],
)
def test_others_are_not(dtype: torch.dtype, head_dim: int, spec: AttentionSpec) -> None:
    assert not texts.torch_flash_supports(dtype, head_dim, spec)


@pytest.mark.parametrize(
    ("spec", "causal", "left", "right"),
    [
        (AttentionSpec(0.1), True, -1, -1),
        (AttentionSpec(0.1, window=9), False, 8, 0),
        (AttentionSpec(0.1, bidirectional=True), False, -1, -1),
        (AttentionSpec(0.1, window=9, bidirectional=True), False, 4, 4),
        (AttentionSpec(0.1, window=128, bidirectional=True), False, 64, 64),
    ],
)
def test_windows_in_torchs_words(
    spec: AttentionSpec, causal: bool, left: int, right: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[Any, ...]] = []

    def noted(*words: Any, **named: Any) -> tuple[torch.Tensor]:
        asked.append((words[7], words[8], words[9], named))
        return (words[0],)

    monkeypatch.setattr(texts, "_flash", noted)
    query = torch.zeros(3, 2, 8)
    texts.torch_flash_attention(query, query, query, (torch.tensor([0, 3], dtype=torch.int32), 3), spec)
    assert asked == [(0.0, causal, False, {"scale": 0.1, "window_size_left": left, "window_size_right": right})]


def test_texts_of_one_token_are_not_made_a_batch_of(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch would then want as many rows as texts, and texts without tokens fill buckets."""
    most: list[int] = []
    monkeypatch.setattr(texts, "_flash", lambda *words, **named: (most.extend(words[5:7]), words[0])[1:])
    query = torch.zeros(2, 2, 8)
    texts.torch_flash_attention(query, query, query, (torch.tensor([0, 1, 1, 2], dtype=torch.int32), 1), PLAIN)
    assert most == [2, 2]


def test_the_operator_takes_these_words() -> None:
    """Positions and names, of the torch that is installed."""
    arguments = [(one.name, one.kwarg_only) for one in texts._flash._schema.arguments]
    positional = [
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    ]
    assert [name for name, named in arguments if not named] == positional
    assert {("scale", True), ("window_size_left", True), ("window_size_right", True)} <= set(arguments)
