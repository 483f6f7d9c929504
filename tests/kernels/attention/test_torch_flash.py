"""torch's flash attention: supported heads, and the translation of our parameters."""

from __future__ import annotations

from types import SimpleNamespace
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


@pytest.mark.parametrize(
    ("microseconds", "result", "told"),
    [
        (150.0, 1.0, "torch's own takes 200 µs, FlashAttention 3 150 µs: used"),
        (200.0, 1.0, "200 µs: not used (it is not faster)"),
        (150.0, 1.1, "not used (its result differs)"),
        (None, 1.0, "not used (ImportError: planted)"),
    ],
)
def test_flash_attention_3_is_used_if_it_is_equal_and_faster(
    microseconds: float | None,
    result: float,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, active = [0.0], [False]

    def flash(query: torch.Tensor, *words: Any, **named: Any) -> tuple[torch.Tensor]:
        assert query.shape == (2148, 32, 128) and query.dtype == torch.bfloat16
        clock[0] += 1e-6 * (microseconds or 0.0) if active[0] else 200e-6
        return (torch.full((4,), result if active[0] else 1.0),)

    def activate(name: str) -> None:
        active[0] = name == "FA3"
        if microseconds is None:
            raise ImportError("planted")

    monkeypatch.setattr(texts, "_flash", flash)
    monkeypatch.setattr(texts, "find_spec", lambda name: name)
    monkeypatch.setattr(texts, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(texts.attention_backends, "activate_flash_attention_impl", activate)
    monkeypatch.setattr(
        texts.attention_backends, "restore_flash_attention_impl", lambda _raise_warn: active.__setitem__(0, False)
    )
    with caplog.at_level("INFO"):
        texts.use_flash_3_if_faster(torch.device("cpu"), lambda: None)
    assert told in caplog.text
    assert active == [told.endswith("µs: used")]


def test_without_its_package_nothing_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "_flash_trial", pytest.fail)
    texts.use_flash_3_if_faster(torch.device("cpu"), lambda: None)
    assert texts.attention_backends.list_flash_attention_impls().count("FA3") == 1, "torch's name of it"
