"""The CUDA backend on an NVIDIA GPU: serving sizes against the references, recorded steps, events, out of memory.
tests/parity/gpu compares small shapes.
"""

from __future__ import annotations

import pytest
import torch

from app.backends.cuda import CudaBackend
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PackedTexts, attend_texts_padded_torch, paged_attention_torch
from paged_steps import NOWHERE, Shape, alone, made_step
from planned_machines import bare_plan

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16
GPU = torch.device("cuda")
GEMMA = AttentionSpec(256**-0.5, window=512, softcap=50.0)
SHAPES = {
    "llama 1b": (Shape(32, 8, 64, BF16), AttentionSpec(0.125)),
    "llama 8b": (Shape(32, 8, 128, BF16), AttentionSpec(128**-0.5)),
    "gemma": (Shape(8, 4, 256, BF16), GEMMA),
    "half": (Shape(12, 2, 128, torch.float16), AttentionSpec(128**-0.5, window=100)),
    "fp32": (Shape(8, 2, 64), AttentionSpec(0.125)),
}


@pytest.fixture(scope="module")
def backend() -> CudaBackend:
    backend = CudaBackend(BF16)
    backend.configure(bare_plan(device="cuda", dtype="bfloat16", threads=4))
    return backend


@pytest.mark.parametrize(("shape", "spec"), SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(
    ("spans", "num_decodes"),
    [
        ([(1, 2048)], 1),
        ([(1, 3 + 37 * at) for at in range(64)], 64),
        ([(700, 700), (1, 1), (64, 64)], 0),
        ([(1, 999), (300, 1300), (2, 66)], 1),
    ],
    ids=["one", "many", "fresh", "mixed"],
)
def test_servings_sizes(
    shape: Shape, spec: AttentionSpec, spans: list[tuple[int, int]], num_decodes: int, backend: CudaBackend
) -> None:
    query, kv, step = made_step(shape, spans, num_decodes, GPU)
    rtol = 1e-4 if shape.dtype == torch.float32 else 2**-6
    found, expected = (
        backend.attention(alone(query), kv, NOWHERE, step, spec)[1],
        paged_attention_torch(query, kv, step, spec),
    )
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("window", [None, 128])
def test_texts_of_bert(window: int | None, backend: CudaBackend) -> None:
    lengths = [128, 0, 1, 512, 77]
    heads = QkvHeads(torch.randn((sum(lengths), 3 * 16 * 64), device=GPU).to(BF16), 16, 16, 64)
    texts = PackedTexts(torch.tensor([0, *lengths], device=GPU).cumsum(0).int(), max(lengths))
    spec = AttentionSpec(0.125, window=window, bidirectional=True)
    found = backend.encoder_attention(heads, texts, spec)
    torch.testing.assert_close(found, attend_texts_padded_torch(heads, texts, spec), rtol=2**-6, atol=2**-6)


def test_a_recorded_step_attends_to_what_is_there_when_it_is_replayed(backend: CudaBackend) -> None:
    spec = AttentionSpec(0.125)
    query, kv, step = made_step(Shape(32, 8, 64, BF16), [(1, 0), (1, 900), (1, 70)], 3, GPU)
    result = torch.empty(query.shape, dtype=BF16, device=GPU)

    def work() -> None:
        result.copy_(backend.attention(alone(query), kv, NOWHERE, step, spec)[1])

    work()
    captured = backend.capture(work)
    for lengths in ([0, 900, 70], [0, 12, 0], [0, 130, 64]):
        step.lengths.copy_(torch.tensor(lengths, dtype=torch.int32))
        result.fill_(torch.nan)
        captured.replay()
        backend.record_event().wait()
        torch.testing.assert_close(result, paged_attention_torch(query, kv, step, spec), rtol=2**-6, atol=2**-6)


def test_a_mark_is_passed_while_later_work_goes_on(backend: CudaBackend) -> None:
    words = backend.staging_buffer(8)
    assert words.is_pinned()
    there = torch.arange(8, device=GPU)
    words.copy_(there, non_blocking=True)
    mark = backend.record_event()
    torch.cuda._sleep(10**9)
    later = backend.record_event()
    mark.wait()
    assert words.tolist() == list(range(8))
    assert not later.event.query()
    backend.synchronize()
    assert later.event.query()


def test_want_of_memory_is_survived(backend: CudaBackend) -> None:
    def step() -> None:
        held = torch.empty(2**30, dtype=torch.uint8, device=GPU)
        torch.empty(2**44 + len(held), dtype=torch.uint8, device=GPU)

    before = backend.free_bytes()
    try:
        step()
    except torch.OutOfMemoryError as error:
        assert backend.recover_from_oom(error)
    else:
        pytest.fail("a GPU with 16 TiB")
    assert torch.cuda.memory_allocated() < 2**30
    assert backend.free_bytes() > before - 2**28
