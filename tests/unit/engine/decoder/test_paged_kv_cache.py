"""KV memory in pages: what is read is what was written, no page has two owners, and none is wanted that the pool does not count."""

from __future__ import annotations

import random
from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from app.engine.decoder import paged_kv_cache
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.scheduler.batch import KvCopy, ScheduledSpan, Sequence, resolve_seed
from app.engine.scheduler.scheduler import EngineLimits, max_sequence_tokens
from app.messages import Abort, Generate, SamplingParams
from armature_kernels.attention.paged import PAGE_TOKENS
from engine_simulation import EOS, Simulation, plain_beam_search, plain_completion
from fake_device import CUDA, fake_cuda
from hypothesis_examples import examples
from paged_runner import PagedRunner, small_pages

SHAPE = KvShape(num_layers=2, num_slots=4, max_len=200, num_kv_heads=2, head_dim=8)
FAMILIES = ([1, 2, 3, 4] * 20, [1, 2, 3, 4] * 6 + [5] * 60, [6] * 80)  # the first two part after 24 tokens


def cache_of(num_pages: int = 12, dtype: torch.dtype = torch.float32) -> PagedKvCache:
    return PagedKvCache(SHAPE, dtype, num_pages, torch.device("cpu"))


def span_of(
    start: int, num_tokens: int, slot: int = 0, prefix_slot: int | None = None, prefix_tokens: int = 0
) -> ScheduledSpan:
    sequence = Sequence("r", 0, SamplingParams(), list(range(start + num_tokens)), start + num_tokens)
    return ScheduledSpan(sequence, start, num_tokens, slot, prefix_slot, prefix_tokens, samples=True)


def fill(cache: PagedKvCache, span: ScheduledSpan, seed: int = 0) -> Tensor:
    """Writes what a span computes; layer l holds the returned keys [tokens, kv_heads, head_dim] plus l, and the negative as values."""
    key = torch.randn((span.num_tokens, 2, 8), generator=torch.Generator().manual_seed(seed))
    rows = torch.tensor(cache.written_rows([span]))
    for layer in range(SHAPE.num_layers):
        cache.write(layer, rows, key + layer, -(key + layer))
    return key


def held(cache: PagedKvCache, span: ScheduledSpan, layer: int = 1) -> Tensor:
    """A span's context as twins read it, run by run."""
    key = torch.cat([cache.layers[layer].read(run.first, run.num_tokens)[0] for run in cache.kv_segments(span)])
    assert torch.equal(
        -key, torch.cat([cache.layers[layer].read(run.first, run.num_tokens)[1] for run in cache.kv_segments(span)])
    )
    return key


# ---- alone ---------------------------------------------------------------------------------------------------------


def test_counts_of_pages_and_bytes() -> None:
    cache = cache_of(12, torch.bfloat16)
    assert cache.tokens_per_page == PAGE_TOKENS and cache.capacity_tokens == 12 * PAGE_TOKENS and cache.stride == 256
    assert cache.bytes_per_token == KvCache(SHAPE, torch.bfloat16).bytes_per_token
    assert cache.reserved_bytes == 13 * PAGE_TOKENS * cache.bytes_per_token
    assert sum(kv.keys.nbytes + kv.values.nbytes for kv in cache.layers) == cache.reserved_bytes
    assert cache.tables.shape == (SHAPE.num_slots + 1, 4) and cache.tables.dtype == torch.int32


def test_pages_are_taken_as_they_are_written_and_come_back() -> None:
    cache = cache_of()
    whole = span_of(0, 130)
    key = fill(cache, whole)
    assert cache.num_free_pages == 9
    assert torch.equal(held(cache, whole), key + 1)
    assert cache.row(0, 129) % PAGE_TOKENS == 1 and cache.row(0, 0) >= PAGE_TOKENS  # page 0 is nobody's
    cache.release(0, 70, 130)  # no whole page among them but the last token's, which may be followed by others
    assert cache.num_free_pages == 9
    cache.release(0, 64, 130)
    assert cache.num_free_pages == 10
    fill(cache, span_of(0, SHAPE.max_len, slot=1))
    cache.release(1, 0, SHAPE.max_len)  # its last page is not full, but nothing lies behind it
    assert cache.num_free_pages == 10
    cache.release(0, 0, SHAPE.max_len)
    cache.release(0, 0, SHAPE.max_len)
    assert cache.num_free_pages == 12


def test_the_tables_on_the_device_get_only_what_changed() -> None:
    cache = cache_of()
    first, second = span_of(0, 65, slot=1), span_of(0, 3, slot=2)
    rows = cache.written_rows([first, second])
    cells, pages = cache.take_updates()
    assert cells == [4, 5, 8]
    assert pages == [rows[0] // PAGE_TOKENS, rows[64] // PAGE_TOKENS, rows[65] // PAGE_TOKENS]
    assert cache.take_updates() == ([], [])
    cache.written_rows([first, second])
    assert cache.take_updates() == ([], [])
    cache.release(1, 0, SHAPE.max_len)
    assert cache.take_updates() == ([4, 5], [0, 0])


def test_a_shared_prefix_is_in_the_table_and_its_broken_page_is_copied() -> None:
    cache = cache_of()
    shared = fill(cache, span_of(0, 140))
    own = span_of(100, 20, slot=2, prefix_slot=0, prefix_tokens=100)
    written = fill(cache, own, seed=1)
    assert torch.equal(held(cache, own), torch.cat((shared[:100], written)) + 1)
    assert cache.row(2, 63) == cache.row(0, 63) and cache.row(2, 64) != cache.row(0, 64)
    assert cache.num_free_pages == 12 - 3 - 1
    cache.release(2, 64, 128)
    assert cache.num_free_pages == 12 - 3
    assert torch.equal(held(cache, span_of(0, 140)), shared + 1)


def test_a_prefix_of_whole_pages_costs_none() -> None:
    cache = cache_of()
    shared = fill(cache, span_of(0, 128))
    own = span_of(128, 1, slot=3, prefix_slot=0, prefix_tokens=128)
    written = fill(cache, own, seed=1)
    assert cache.num_free_pages == 12 - 2 - 1
    assert torch.equal(held(cache, own), torch.cat((shared, written)) + 1)


def test_a_sequence_that_comes_back_to_its_slot_has_another_table() -> None:
    cache = cache_of()
    bases = [fill(cache, span_of(0, 70, slot=slot), seed=slot) for slot in (0, 1)]
    span = span_of(66, 2, slot=2, prefix_slot=0, prefix_tokens=66)
    fill(cache, span)
    span.sequence.num_admitted += 1
    again = replace(span, prefix_slot=1)
    written = fill(cache, again, seed=5)
    assert torch.equal(held(cache, again), torch.cat((bases[1][:66], written)) + 1)


def test_a_step_may_not_write_into_a_shared_prefix() -> None:
    cache = cache_of()
    fill(cache, span_of(0, 40))
    with pytest.raises(AssertionError, match="never writes into a prefix"):
        cache.written_rows([span_of(29, 2, slot=2, prefix_slot=0, prefix_tokens=30)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
def test_a_block_that_leaves_comes_back_to_another_slot(dtype: torch.dtype) -> None:
    """It begins in a prefix that the slot shares, and ends behind it."""
    cache = cache_of(dtype=dtype)
    fill(cache, span_of(0, 70))
    own = span_of(70, 60, slot=2, prefix_slot=0, prefix_tokens=70)
    fill(cache, own, seed=1)
    block = torch.empty(66 * cache.bytes_per_token, dtype=torch.uint8)
    cache.read_block(block, 2, 0, 70, 64)
    cache.write_block(block, 3, 64, 65, 130)
    for layer in cache.layers:
        there = [cache.row(0, at) for at in range(65, 70)] + [cache.row(2, at) for at in range(70, 130)]
        here = [cache.row(3, at) for at in range(65, 130)]
        for one, other in zip(layer.gather(torch.tensor(here)), layer.gather(torch.tensor(there)), strict=True):
            assert torch.equal(one, other) and one.abs().sum() > 0


# ---- copies --------------------------------------------------------------------------------------------------------


def test_copies_are_done_as_if_one_after_the_other() -> None:
    """The second overwrites a part of the first, the third reads what both have left, and the source's pages are free in the end."""
    cache = cache_of()
    first, second = fill(cache, span_of(0, 150, slot=0)), fill(cache, span_of(0, 150, slot=1), seed=1)
    cache.apply_copies((KvCopy(0, 2, 10, 150), KvCopy(1, 2, 30, 50), KvCopy(2, 3, 20, 140)), ((0, 0, SHAPE.max_len),))
    both = torch.cat((first[10:30], second[30:50], first[50:]))
    for slot, start, expected in ((2, 10, both), (3, 20, both[10:-10]), (1, 0, second)):
        rows = [cache.row(slot, start + at) for at in range(len(expected))]
        assert torch.equal(cache.layers[1].keys[rows], expected + 1)
    assert cache.num_free_pages == 12 - 3 - 3 - 3


def test_pages_that_are_still_to_be_read_are_the_last_to_be_written() -> None:
    """Only where no other is free must all be held in between at once."""
    cache = cache_of()
    fill(cache, span_of(0, 70, slot=0))
    before = {cache.row(0, at) // PAGE_TOKENS for at in (0, 64)}
    cache.apply_copies((KvCopy(0, 2, 0, 70),), ((0, 0, SHAPE.max_len),))
    assert not before & {cache.row(2, at) // PAGE_TOKENS for at in (0, 64)}


@pytest.mark.parametrize("order", [1, -1])
def test_a_copy_may_go_to_the_very_pages_that_it_is_read_from(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two slots change places while no page is free: all is read before one row is written."""
    monkeypatch.setattr(paged_kv_cache, "_MAX_MOVED_ROWS", 16)
    cache = cache_of(num_pages=6)
    first, second = fill(cache, span_of(0, 190, slot=0)), fill(cache, span_of(0, 190, slot=1), seed=1)
    assert cache.num_free_pages == 0
    released = ((0, 0, SHAPE.max_len), (1, 0, SHAPE.max_len))
    cache.apply_copies((KvCopy(0, 2, 0, 190), KvCopy(1, 3, 0, 190))[::order], released)
    assert cache.num_free_pages == 0
    for slot, expected in ((2, first), (3, second)):
        rows = [cache.row(slot, at) for at in range(190)]
        assert torch.equal(cache.layers[1].keys[rows], expected + 1)


def test_the_same_copies_are_not_carried_twice() -> None:
    cache = cache_of()
    first = fill(cache, span_of(0, 70, slot=0))
    copies, released = (KvCopy(0, 2, 0, 70),), ((0, 0, SHAPE.max_len),)
    cache.apply_copies(copies, released)
    fill(cache, span_of(0, 130, slot=1), seed=1)
    cache.apply_copies(copies, released)
    assert torch.equal(cache.layers[1].keys[[cache.row(2, at) for at in range(70)]], first + 1)


@pytest.mark.parametrize("fails_at", [1, 2])
def test_what_want_of_memory_interrupts_is_finished_before_anything_else(fails_at: int) -> None:
    cache = cache_of(num_pages=6)
    first, second = fill(cache, span_of(0, 190, slot=0)), fill(cache, span_of(0, 190, slot=1), seed=1)
    calls, select = [0], Tensor.index_select

    def scarce(memory: Tensor, dim: int, rows: Tensor) -> Tensor:
        calls[0] += 1
        if calls[0] == fails_at:
            raise torch.OutOfMemoryError
        return select(memory, dim, rows)

    copies = (KvCopy(0, 2, 0, 190), KvCopy(1, 3, 0, 190))
    with mock.patch.object(Tensor, "index_select", scarce):
        with pytest.raises(torch.OutOfMemoryError):
            cache.apply_copies(copies, ((0, 0, SHAPE.max_len), (1, 0, SHAPE.max_len)))
        cache.written_rows([])
    for layer in range(SHAPE.num_layers):
        for slot, expected in ((2, first), (3, second)):
            assert torch.equal(cache.layers[layer].keys[[cache.row(slot, at) for at in range(190)]], expected + layer)


def test_what_moves_stays_on_the_device() -> None:
    with fake_cuda():
        cache = PagedKvCache(SHAPE, torch.bfloat16, 12, CUDA)
        cache.written_rows([span_of(0, 100)])
        cache.written_rows([span_of(70, 5, slot=1, prefix_slot=0, prefix_tokens=70)])
        cache.apply_copies((KvCopy(0, 2, 0, 30),), ((0, 0, SHAPE.max_len),))
        assert cache.tables.device == cache.layers[0].keys.device == CUDA


# ---- behind the scheduler ------------------------------------------------------------------------------------------


@settings(max_examples=examples(40))
@given(
    seed=st.integers(0, 2**32), num_slots=st.sampled_from([4, 5, 9]), capacity=st.sampled_from([64, 97, 150, 400]),
    page=st.sampled_from([1, 2, 4, 7, 16]), batch_tokens=st.sampled_from([4, 9, 64]), flying=st.sampled_from([0.0, 0.5, 1.0]),
    told_twice=st.sampled_from([0.0, 0.3]),
)  # fmt: skip
def test_whatever_happens_pages_hold_what_they_should(
    seed: int, num_slots: int, capacity: int, page: int, batch_tokens: int, flying: float, told_twice: float
) -> None:
    with small_pages(page):
        limits = EngineLimits(max_model_len=90, max_running_seqs=4, max_batch_tokens=batch_tokens)
        sim = Simulation(num_slots, capacity, page, limits)
        sim.engine.runner = sim.runner = runner = PagedRunner(sim.pool, 90, flying, told_twice)
        dice, asked, aborted = random.Random(seed), [], set()
        for _ in range(40):
            if dice.random() < 0.4:
                asked.append(_request(dice, len(asked)))
                sim.hear(sim.engine.add(asked[-1]))
            elif dice.random() < 0.15 and asked:
                aborted.add(dice.choice(asked).request_id)
                sim.hear(sim.engine.abort(Abort(max(aborted))))
            elif dice.random() < 0.1:
                sim.engine.check()
            else:
                runner.most_tokens, runner.wants_late = dice.choice([None, None, None, 5, 17]), dice.random() < 0.5
                sim.step()
        runner.most_tokens = None
        sim.finish()
        _check_told(sim, asked, aborted)
        _give_all_back(sim, runner)


def _request(dice: random.Random, number: int) -> Generate:
    family, shape = dice.choice(FAMILIES), dice.choice([(1, 1), (1, 1), (3, 1), (1, 2), (1, 3)])
    token_ids = family[: dice.randint(1, 60)] + [dice.randint(1, 6) for _ in range(dice.randint(0, 8))]
    params = SamplingParams(
        max_tokens=dice.choice([1, 3, 12, None]), seed=dice.randint(0, 3), n=shape[0], beam_width=shape[1]
    )
    return Generate(f"r{number}", tuple(token_ids), params, 0.0)


def _check_told(sim: Simulation, asked: list[Generate], aborted: set[str]) -> None:
    """Whoever was let be said what the plain loop says."""
    for request in asked:
        if request.request_id in aborted or request.request_id in sim.failures:
            continue
        limit = max_sequence_tokens(request, sim.scheduler._limits, sim.pool)
        for choice in range(request.params.n):
            ending = sim.endings[request.request_id, choice]
            said = list(ending.token_ids) or sim.completions.get((request.request_id, choice), [])
            if request.params.beam_width > 1:
                assert said == plain_beam_search(request.token_ids, request.params.beam_width, limit, EOS)
            else:
                assert said == plain_completion(
                    request.token_ids, resolve_seed(request.params.seed, choice), limit, EOS
                )


def _give_all_back(sim: Simulation, runner: PagedRunner) -> None:
    """Who leans goes first; then every page is free."""
    for slot in sorted(sim.pool.slots, key=lambda slot: slot.prefix_slot is None):
        assert not slot.running
        sim.pool._shrink(slot, 0)
    assert sim.pool.used_tokens == 0
    runner.cache.apply_copies((), sim.pool.take_released())
    assert runner.cache.num_free_pages == runner.num_pages
