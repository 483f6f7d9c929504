"""Triton kernels on an NVIDIA GPU: they are used, round to nearest, and can be captured and replayed. tests/parity/gpu
compares their results with the references.
"""

from __future__ import annotations

import pytest
import torch

from app.engine.sampling.rows import (
    SamplingTensors,
    sample_greedy,
    sample_greedy_torch,
    sample_random,
    sample_random_torch,
)
from armature_kernels.attention.attention import QkvHeads, token_bytes, view_kv_rows
from armature_kernels.attention.context import AttentionSpec
from armature_kernels.attention.paged import PAGE_TOKENS, paged_attention_torch
from armature_kernels.elementwise import norms, rope
from armature_kernels.linear import device
from armature_kernels.linear.activations import UnnormedRows
from armature_kernels.linear.device_fp8 import DeviceFp8Factory
from armature_kernels.linear.device_int4 import DeviceInt4Factory
from armature_kernels.linear.device_int8 import DeviceInt8Factory
from armature_kernels.triton import support
from paged_steps import Shape, made_step

pytestmark = pytest.mark.cuda
BF16 = torch.bfloat16


def test_triton_serves() -> None:
    assert support.unavailable_reason() is None


def test_results_are_rounded_to_nearest() -> None:
    """Where a row's norm is 1, its weight comes out alone: cut off instead of rounded, most of these would differ."""
    weight = torch.randn(4096, device="cuda")
    hidden = torch.ones(1, 4096, device="cuda")
    assert torch.equal(norms.rms_norm(hidden, weight, 0.0, BF16)[0], weight.to(BF16))


def test_many_rows_at_once() -> None:
    """As of a long prompt: more programs than a GPU runs at a time."""
    gate_up = torch.randn(8192, 2 * 8192, device="cuda").to(BF16)
    first, second = gate_up[-3:].float().chunk(2, -1)
    expected = torch.nn.functional.silu(first) * second
    torch.testing.assert_close(norms.gate(gate_up, "silu")[-3:].float(), expected, rtol=2**-8, atol=1e-6)


def test_products_add_to_the_stream_themselves() -> None:
    assert device.supports_fused_add(torch.device("cuda", 0), BF16)
    hidden, x, weight = (
        torch.randn(3, 512, device="cuda"),
        torch.randn(3, 256, device="cuda"),
        torch.randn(512, 256, device="cuda"),
    )
    expected = hidden + x.to(BF16).float() @ weight.to(BF16).float().t()
    device.fused_addmm(hidden, x.to(BF16), weight.to(BF16))
    torch.testing.assert_close(hidden, expected, rtol=1e-3, atol=1e-2)


def test_recorded_sampling_draws_what_the_reference_draws() -> None:
    """At each replay: programs of a row meet in memory that the graph clears."""
    rows, vocab = 64, 128_256
    logits = (torch.randn(rows, vocab, device="cuda") * 3).to(BF16)
    columns = {
        "temperature": torch.tensor([0.0, 0.7, 1.0, 1.5] * 16, device="cuda"),
        "top_k": torch.tensor([0, 50, 0, 3000] * 16, dtype=torch.int32, device="cuda"),
        "top_p": torch.tensor([1.0, 0.9, 0.95, 1.0] * 16, dtype=torch.float64, device="cuda"),
        "min_p": torch.zeros(rows, device="cuda"),
    }
    drawing = SamplingTensors(columns, torch.rand(rows, dtype=torch.float64, device="cuda"))
    sample_random(logits, drawing)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found, greedy = sample_random(logits, drawing), sample_greedy(logits)
    for _ in range(20):
        logits.copy_(torch.randn(rows, vocab, device="cuda") * 3)
        graph.replay()
        expected = sample_random_torch(logits, drawing)
        # A border may round differently: a float32 sum has an error of 1e-7 of the whole.
        assert (found != expected).sum() <= 1
        assert torch.equal(greedy, sample_greedy_torch(logits))


def test_a_recorded_layer_reads_what_is_there_when_it_is_replayed() -> None:
    hidden = torch.randn(4, 2048, device="cuda")
    weight, angle = torch.randn(2048, device="cuda"), torch.randn(4, 1, 64, device="cuda")
    written = torch.tensor([3, 1, 5, 7], device="cuda")
    kv = view_kv_rows(torch.zeros(16, token_bytes(8, 64, BF16), dtype=torch.uint8, device="cuda"), 8, 64, BF16)
    queries = torch.empty(4, 16, 64, dtype=BF16, device="cuda")

    def work() -> None:
        product = norms.rms_norm(hidden, weight, 1e-5, BF16)
        queries.copy_(
            rope.apply_rope_and_write_kv(QkvHeads(product, 16, 8, 64, angles=(angle.cos(), angle.sin())), kv, written)
        )

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    hidden.copy_(torch.randn(4, 2048, device="cuda"))
    written.copy_(torch.tensor([9, 8, 11, 10], device="cuda"))
    graph.replay()
    product = norms.rms_norm_torch(hidden, weight, 1e-5, BF16)
    expected = rope.apply_rope_to_qkv_torch(QkvHeads(product, 16, 8, 64, angles=(angle.cos(), angle.sin())))
    found = (queries, kv.keys[written], kv.values[written])
    for one, twin in zip(found, expected, strict=True):
        torch.testing.assert_close(one.float(), twin.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("lengths", [(900, 1, 64, 0), (4000,)], ids=["several", "one, in many parts"])
def test_recorded_decodes_write_and_attend_to_what_is_there(lengths: tuple[int, ...]) -> None:
    """Replayed at once, one behind the other: parts are counted from zero each time."""
    from armature_kernels.triton.attention import attend_decodes

    spec, count = AttentionSpec(0.125), len(lengths)
    _, kv, step = made_step(Shape(32, 8, 64, BF16), [(1, length) for length in lengths], count, torch.device("cuda"))
    at = (step.lengths.long() - 1).clamp(min=0)
    written = step.tables[step.slots.long(), at // PAGE_TOKENS].long() * PAGE_TOKENS + at % PAGE_TOKENS
    product, angle = torch.zeros(count, 48 * 64, dtype=BF16, device="cuda"), torch.randn(count, 1, 64, device="cuda")
    norm = 1 + 0.2 * torch.randn(64, device="cuda")
    heads = QkvHeads(product, 32, 8, 64, norm, norm, 1e-5, (angle.cos(), angle.sin()))
    result = torch.empty(count, 32, 64, dtype=BF16, device="cuda")

    def work() -> None:
        attend_decodes(heads, kv, written, step, spec, result)

    work()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        product.copy_(torch.randn(count, 48 * 64, device="cuda"))
        for _ in range(10):
            graph.replay()
        query, key, value = rope.apply_rope_to_qkv_torch(heads)
        there = step.lengths > 0
        torch.testing.assert_close(kv.keys[written][there].float(), key[there].float(), rtol=2**-6, atol=2**-6)
        assert torch.equal(kv.values[written][there], value[there])
        expected = paged_attention_torch(query, kv, step, spec)
        torch.testing.assert_close(result.float(), expected.float(), rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize("precision", ["bf16", "int8", "fp8", "int4"])
@torch.inference_mode()
def test_captured_products_of_few_rows_begin_when_their_rows_are_there(precision: str) -> None:
    """Each kernel of the graph is launched before the one that writes its input has ended; new numbers at each replay."""
    gpu = torch.device("cuda", 0)
    make: dict[str, type[device.DeviceFactory | DeviceInt4Factory | DeviceInt8Factory]] = {
        "bf16": device.DeviceFactory, "int8": DeviceInt8Factory, "fp8": DeviceFp8Factory, "int4": DeviceInt4Factory
    }  # fmt: skip
    factory = make[precision](gpu, BF16)
    gate_up, down = (factory.pack(torch.randn(*shape, device=gpu) / 64, None) for shape in ((8192, 2048), (2048, 4096)))
    norm, hidden = torch.rand(2048, device=gpu) + 0.5, torch.zeros(2, 2048, device=gpu)

    def work() -> None:
        for _ in range(4):
            gated = gate_up.multiply_gated(UnnormedRows(hidden, norm, 1e-5), "silu")
            if gated is None:
                gated = norms.gate(gate_up.multiply(norms.rms_norm(hidden, norm, 1e-5, BF16)), "silu")
            down.add_to(hidden, gated)

    found = []
    for few_rows in (0, 2):  # whatever the trials found
        gate_up.few_rows = down.few_rows = few_rows
        work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        results = []
        for seed in range(20):
            hidden.copy_(torch.randn(2, 2048, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            results.append(hidden.clone())
        found.append(torch.stack(results))
    plain, few = found
    assert (few - plain).norm() < 0.02 * plain.norm()
