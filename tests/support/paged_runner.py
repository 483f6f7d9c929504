"""The tracking runner over pages: the tokens behind each KV entry are stored in a real cache and read through its
tables.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from app.engine.decoder import paged_kv_cache
from app.engine.decoder.kv_cache import KvShape
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.scheduler.batch import Batch, ScheduledSpan
from app.engine.scheduler.kv_allocator import KvSlots
from tracking_runner import RememberingRunner


@contextmanager
def small_pages(tokens: int) -> Iterator[None]:
    """Pages of so few tokens: what happens at their borders happens often."""
    with mock.patch.object(paged_kv_cache, "PAGE_TOKENS", tokens):
        yield


class PagedRunner(RememberingRunner):
    """`told_twice`: of a step's copies and releases being told once more, as after a launch that failed."""

    def __init__(self, pool: KvSlots, max_len: int, chance: float = 0.0, told_twice: float = 0.0) -> None:
        super().__init__(pool, chance)
        shape = KvShape(num_layers=2, num_slots=len(pool.slots), max_len=max_len, num_kv_heads=1, head_dim=1)
        self.num_pages = pool.capacity_tokens // pool.tokens_per_page
        self.cache = PagedKvCache(shape, torch.float64, self.num_pages, torch.device("cpu"))
        assert self.cache.tokens_per_page == pool.tokens_per_page
        self._told_twice, self._coin = told_twice, random.Random(1)

    def _carry(self, batch: Batch) -> None:
        self.cache.apply_copies(batch.copies, batch.released)
        if self._coin.random() < self._told_twice:
            self.cache.apply_copies(batch.copies, batch.released)
        held = self.num_pages - self.cache.num_free_pages
        assert held * self.pool.tokens_per_page <= self.pool.used_tokens, "more pages are held than are accounted for"

    def _write(self, batch: Batch, marks: dict[int, list[int]]) -> None:
        rows = torch.tensor(self.cache.written_rows(batch.spans))
        cells, changed = self.cache.take_updates()
        self.cache.tables.view(-1)[torch.tensor(cells, dtype=torch.int64)] = torch.tensor(changed, dtype=torch.int32)
        values = [_value(marks[id(span)][at]) for span in batch.spans for at in range(span.start, span.end)]
        assert len(set(rows.tolist())) == len(rows) == len(values), "two tokens are written to one place"
        for layer in range(self.cache.shape.num_layers):
            key = torch.tensor(values, dtype=torch.float64).view(-1, 1, 1) + layer
            self.cache.write(layer, rows, key, -key)
        self.computed_tokens += batch.num_tokens

    def _read(self, span: ScheduledSpan, marks: list[int]) -> None:
        page = self.pool.tokens_per_page
        at = torch.arange(span.end)
        rows = self.cache.tables[span.slot][at // page].long() * page + at % page
        assert bool((rows >= page).all()), "what is read lies on somebody's pages"
        expected = torch.tensor([_value(mark) for mark in marks[: span.end]], dtype=torch.float64)
        for layer, kv in enumerate(self.cache.layers):
            assert torch.equal(kv.keys[rows].flatten(), expected + layer), f"slot {span.slot} holds something else"
            assert torch.equal(kv.values[rows].flatten(), -(expected + layer)), f"slot {span.slot} holds other values"

    def _count_pages(self) -> None:
        owners = Counter(page for own in self.cache._pages._own for page in own.values())
        assert max(owners.values(), default=0) <= 1, "a page has two owners"
        assert not set(owners) & set(self.cache._pages._free), "a page that somebody owns is free"
        assert len(owners) + self.cache.num_free_pages == self.num_pages, "a page is lost"
        assert len(owners) * self.pool.tokens_per_page <= self.pool.used_tokens


def _value(mark: int) -> float:
    return float(mark % 2**50)
