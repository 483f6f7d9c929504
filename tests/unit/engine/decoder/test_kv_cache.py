"""KV memory: nothing is taken before it is written, whole pages are given back, and no neighbour ever loses a token."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from app.engine.decoder.kv_cache import KV_DTYPES, KvCache, KvShape
from app.engine.scheduler.batch import KvCopy, ScheduledSpan, Sequence
from app.errors import PlanImpossible
from app.hardware.facts import Needs
from app.hardware.plan.memory_budget import kv_bytes_per_token
from app.messages import SamplingParams
from armature_kernels.attention.flash import context_segments

PAGE = mmap.PAGESIZE
MIB = 2**20
ODD = KvShape(
    num_layers=2, num_slots=3, max_len=70, num_kv_heads=3, head_dim=10
)  # 240 bytes a token: pages and tokens never line up


def span_of(
    start: int, num_tokens: int, slot: int = 0, prefix_slot: int | None = None, prefix_tokens: int = 0
) -> ScheduledSpan:
    sequence = Sequence("r", 0, SamplingParams(), list(range(start + num_tokens)), start + num_tokens)
    return ScheduledSpan(sequence, start, num_tokens, slot, prefix_slot, prefix_tokens, samples=True)


def fill(cache: KvCache, slot: int, start: int, end: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Writes positions [start, end) of a slot in every layer; layer l holds the returned values plus l."""
    generator = torch.Generator().manual_seed(seed + slot)
    shape = (end - start, cache.shape.num_kv_heads, cache.shape.head_dim)
    key, value = torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)
    rows = torch.arange(start, end) + cache.row(slot, 0)
    for layer in range(cache.shape.num_layers):
        cache.write(layer, rows, key + layer, value + layer)
    return key, value


def held(cache: KvCache, layer: int, slot: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    (segment,) = context_segments(cache.kv_segments(span_of(0, end, slot)), cache.layers[layer])
    return segment.key, segment.value


def test_reserving_takes_no_memory_and_writing_takes_what_is_written() -> None:
    shape = KvShape(num_layers=4, num_slots=16, max_len=16384, num_kv_heads=8, head_dim=64)
    cache = KvCache(shape, torch.bfloat16)
    assert cache.reserved_bytes == 16 * 16384 * cache.bytes_per_token == 2 * 2**30
    assert cache.resident_bytes() == 0
    fill(cache, slot=3, start=0, end=1000)
    fill(cache, slot=9, start=5000, end=5001)
    written = 1001 * cache.bytes_per_token
    assert written <= cache.resident_bytes() <= written + 2 * 4 * 2 * PAGE  # at most a page at each end, layer and slot
    cache.release(3, 0, 1000)
    assert cache.resident_bytes() <= 2 * 4 * 2 * PAGE


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_process_grows_and_shrinks_with_what_is_written() -> None:
    def rss() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE

    before = rss()
    cache = KvCache(KvShape(num_layers=8, num_slots=32, max_len=8192, num_kv_heads=8, head_dim=64), torch.bfloat16)
    assert rss() - before < 16 * MIB
    fill(cache, slot=31, start=0, end=4096)
    full = rss()
    assert (
        full - before > 4096 * cache.bytes_per_token - 16 * MIB
    )  # 64 MiB; Linux counts RSS per processor and is some MiB behind
    cache.release(31, 0, cache.shape.max_len)
    assert full - rss() > 4096 * cache.bytes_per_token - 16 * MIB


@pytest.mark.parametrize(("start", "end"), [(0, 70), (0, 50), (17, 18), (20, 60), (35, 70), (69, 70)])
def test_release_keeps_every_token_outside_its_range(start: int, end: int) -> None:
    cache = KvCache(ODD, torch.float32)
    kept = {slot: fill(cache, slot, 0, ODD.max_len) for slot in range(ODD.num_slots)}
    cache.release(1, start, end)
    for slot, (key, value) in kept.items():
        for layer in range(ODD.num_layers):
            now_key, now_value = held(cache, layer, slot, ODD.max_len)
            outside = [at for at in range(ODD.max_len) if slot != 1 or not start <= at < end]
            torch.testing.assert_close(now_key[outside], key[outside] + layer, rtol=0, atol=0)
            torch.testing.assert_close(now_value[outside], value[outside] + layer, rtol=0, atol=0)


def test_a_slot_released_whole_leaves_no_page_behind() -> None:
    cache = KvCache(ODD, torch.float32)
    fill(cache, 1, 0, ODD.max_len)
    assert cache.resident_bytes() > 0
    cache.release(1, 0, ODD.max_len)
    assert cache.resident_bytes() == 0


def test_a_released_slot_can_be_written_again() -> None:
    cache = KvCache(ODD, torch.float32)
    fill(cache, 1, 0, 70)
    cache.release(1, 0, 70)
    key, _ = fill(cache, 1, 0, 70, seed=7)
    torch.testing.assert_close(held(cache, 0, 1, 70)[0], key)


def test_a_shared_prefix_is_the_first_of_two_segments() -> None:
    cache = KvCache(ODD, torch.float32)
    shared, _ = fill(cache, 0, 0, 40)
    own, _ = fill(cache, 2, 30, 45)
    first, second = context_segments(
        cache.kv_segments(span_of(44, 1, slot=2, prefix_slot=0, prefix_tokens=30)), cache.layers[1]
    )
    assert (first.position, second.position) == (0, 30)
    torch.testing.assert_close(first.key, shared[:30] + 1)
    torch.testing.assert_close(second.key, own + 1)


def test_keys_and_values_of_a_fused_product_are_written_without_a_copy_before() -> None:
    cache = KvCache(ODD, torch.float32)
    fused = torch.randn(5, (4 + 3 + 3) * 10)  # 4 query heads, 3 kv heads
    key, value = fused[:, 40:70].view(5, 3, 10), fused[:, 70:].view(5, 3, 10)
    cache.write(0, torch.tensor(cache.written_rows([span_of(2, 3, slot=1), span_of(9, 2, slot=0)])), key, value)
    torch.testing.assert_close(held(cache, 0, 1, 5)[0][2:], key[:3])
    torch.testing.assert_close(held(cache, 0, 0, 11)[1][9:], value[3:])


def test_copy_takes_a_range_of_all_layers() -> None:
    cache = KvCache(ODD, torch.float32)
    key, value = fill(cache, 0, 0, 70)
    fill(cache, 2, 0, 70)
    cache.copy(KvCopy(source=0, target=2, start=10, end=33))
    for layer in range(ODD.num_layers):
        copied_key, copied_value = held(cache, layer, 2, 70)
        torch.testing.assert_close(copied_key[10:33], key[10:33] + layer)
        torch.testing.assert_close(copied_value[10:33], value[10:33] + layer)
        assert not torch.equal(copied_key[9], key[9] + layer) and not torch.equal(copied_key[33], key[33] + layer)


def test_a_step_may_not_write_into_a_shared_prefix() -> None:
    cache = KvCache(ODD, torch.float32)
    with pytest.raises(AssertionError, match="never writes into a prefix"):
        cache.written_rows([span_of(29, 2, slot=2, prefix_slot=0, prefix_tokens=30)])


def test_counts_of_pages_and_bytes() -> None:
    cache = KvCache(KvShape(num_layers=16, num_slots=1, max_len=64, num_kv_heads=8, head_dim=64), torch.bfloat16)
    assert cache.bytes_per_token == 16 * 2 * 8 * 64 * 2
    assert cache.tokens_per_page == max(1, PAGE // 2048)


def test_what_cannot_be_reserved_is_refused_with_a_way_out() -> None:
    with pytest.raises(PlanImpossible, match="max_running_seqs"):
        KvCache(KvShape(num_layers=64, num_slots=1024, max_len=2**27, num_kv_heads=64, head_dim=256), torch.float32)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize(("num_layers", "kv_heads", "head_dim"), [(16, 8, 64), (2, 1, 80), (3, 5, 72)])
def test_the_plan_counts_the_bytes_that_a_token_takes(
    precision: str, num_layers: int, kv_heads: int, head_dim: int
) -> None:
    counts = {
        "kv_elements_per_token": 2 * num_layers * kv_heads * head_dim,
        "num_kv_layers": num_layers,
        "num_kv_heads": kv_heads,
    }
    cache = KvCache(KvShape(num_layers, 2, 100, kv_heads, head_dim), KV_DTYPES[precision])
    assert kv_bytes_per_token(cast(Needs, SimpleNamespace(**counts)), precision) == cache.bytes_per_token


def test_codes_are_copied_and_given_back_as_all_else() -> None:
    """Rows of 320 bytes: neither a token's end nor a slot's is a page's."""
    cache = KvCache(KvShape(num_layers=2, num_slots=3, max_len=130, num_kv_heads=2, head_dim=64), torch.int8)
    assert cache.token_bytes == 320 and cache.tokens_per_page == 13
    key, _ = fill(cache, slot=0, start=0, end=100)
    other, _ = fill(cache, slot=1, start=0, end=130)
    cache.copy(KvCopy(0, 2, 20, 100))
    cache.release(0, 0, 130)
    copied, _ = held(cache, 1, 2, 100)
    torch.testing.assert_close(copied[20:].float(), key[20:] + 1, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(held(cache, 0, 1, 130)[0].float(), other, rtol=2e-2, atol=2e-2)
    cache.release(1, 0, 130)
    cache.release(2, 0, 130)
    assert cache.resident_bytes() == 0
