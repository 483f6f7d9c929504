"""The MPS backend without an Apple GPU: its attention, its refusals, and its calls of torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from app.backends import mps
from app.backends.mps import MpsBackend, attention_function, sdpa_attention
from app.errors import PlanImpossible
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts, attend_block, attend_texts_padded_torch, paged_attention_torch
from paged_steps import Shape, made_step
from planned_machines import bare_plan

CPU = torch.device("cpu")
PLAN = bare_plan(threads=1)


@pytest.mark.parametrize("window", [None, 70])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (5, 1)])
def test_torchs_product_attends_as_the_reference_does(heads: int, kv_heads: int, window: int | None) -> None:
    spans = [(1, 100), (1, 1), (40, 40), (33, 130)]
    query, kv, step = made_step(Shape(heads, kv_heads, 32), spans, 2, CPU)
    spec = AttentionSpec(0.3, window=window)
    found = paged_attention_torch(query, kv, step, spec, sdpa_attention)
    torch.testing.assert_close(found, paged_attention_torch(query, kv, step, spec))


def test_rows_that_only_fill_up_come_out_as_zeros() -> None:
    query, kv, step = made_step(Shape(4, 2, 32), [(1, 5), (1, 0)], 2, CPU)
    found = paged_attention_torch(query, kv, step, AttentionSpec(0.3), sdpa_attention)
    assert found[0].abs().sum() > 0
    assert found[1].abs().sum() == 0


@pytest.mark.parametrize("window", [None, 6])
def test_texts_attend_as_the_references_do(window: int | None) -> None:
    generator = torch.Generator().manual_seed(1)
    heads = QkvHeads(torch.randn(30, 3 * 4 * 16, generator=generator), 4, 4, 16)
    texts = PackedTexts(torch.tensor([0, 7, 7, 30], dtype=torch.int32), 23)
    spec = AttentionSpec(0.25, window=window, bidirectional=True)
    torch.testing.assert_close(
        attend_texts_padded_torch(heads, texts, spec, sdpa_attention), attend_texts_padded_torch(heads, texts, spec)
    )


def test_bent_scores_are_written_out() -> None:
    assert attention_function(AttentionSpec(1.0)) is sdpa_attention
    assert attention_function(AttentionSpec(1.0, softcap=30.0)) is attend_block
    assert attention_function(AttentionSpec(1.0, sinks=torch.zeros(4))) is attend_block
    assert attention_function(AttentionSpec(1.0, slopes=torch.zeros(4))) is attend_block
    assert attention_function(AttentionSpec(1.0, bidirectional=True, distance_bias=torch.zeros(4, 9))) is attend_block


def test_a_silent_fallback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ENABLE_MPS_FALLBACK", "1")
    with pytest.raises(PlanImpossible, match=r"PYTORCH_ENABLE_MPS_FALLBACK is set: operations that torch's MPS lacks"):
        MpsBackend(torch.bfloat16).configure(PLAN)


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="there is an Apple GPU")
def test_a_torch_without_mps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ENABLE_MPS_FALLBACK", raising=False)
    with pytest.raises(PlanImpossible, match=r"device is mps, but torch .* set device to cpu"):
        MpsBackend(torch.bfloat16).configure(PLAN)


def test_what_metal_may_hold_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    fake = SimpleNamespace(
        set_per_process_memory_fraction=asked.append,
        recommended_max_memory=lambda: 1000,
        driver_allocated_memory=lambda: 300,
        empty_cache=lambda: asked.append(-1.0),
    )
    monkeypatch.setattr(mps.torch, "mps", fake)
    monkeypatch.setattr(mps.torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(mps.torch, "set_num_threads", lambda count: None)
    backend = MpsBackend(torch.float16)
    backend.configure(PLAN)
    assert asked == [1.0]
    assert backend.free_bytes() == 700
    assert backend.recover_from_oom(
        RuntimeError("MPS backend out of memory (MPS allocated: 18.00 GB, max allowed: 18.13 GB)")
    )
    assert asked == [1.0, -1.0]
    assert not backend.recover_from_oom(RuntimeError("shapes do not fit"))


def test_nothing_is_recorded() -> None:
    assert MpsBackend(torch.float16).capture(lambda: None) is None
