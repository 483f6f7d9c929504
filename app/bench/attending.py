"""Decode attention over a KV cache larger than any processor cache, measured for `armature bench kernels`."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable

import torch

from app.engine.kv_cache import KVCache, KVShape
from app.kernels.attention import Row, Run, Step, attention
from app.kernels.native import native
from app.kernels.operations import Code, has, listed, listening

SEQUENCES, KV_TOKENS = 8, 4000
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 32, 8, 64, 4  # Llama 3.2 1B; together the layers exceed any processor cache
CALLS = 12


class Attending:
    """Decode attention of one query per sequence against its whole context, layer after layer.

    `dtype` is the dtype of the cached keys and values (bfloat16, or int8 with scales). Queries are bfloat16
    [SEQUENCES, HEADS, HEAD_DIM]. The cache is the engine's own `KVCache`.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        shape = KVShape(num_layers=LAYERS, num_slots=SEQUENCES, max_len=KV_TOKENS, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
        self._cache = KVCache(shape, dtype)
        written = torch.randn(2, self._cache.stride, KV_HEADS, HEAD_DIM)
        for layer in self._cache.layers:
            for slot in range(SEQUENCES):
                layer.write(torch.arange(self._cache.stride) + self._cache.row(slot, 0), *written.unbind(0))
        self._query = torch.randn(SEQUENCES, HEADS, HEAD_DIM).bfloat16()
        self._step = Step(SEQUENCES)
        runs = [Run(self._cache.row(slot, 0), KV_TOKENS, 0) for slot in range(SEQUENCES)]
        self._step.fill([Row(slot, 1, KV_TOKENS - 1, (run,)) for slot, run in enumerate(runs)])
        self.num_bytes = float(SEQUENCES * KV_TOKENS * self._cache.token_bytes)

    @staticmethod
    def here() -> bool:
        """Return True if the native attention kernel is available on this machine."""
        return has(Code.ATTENTION)

    def time(self) -> list[float]:
        """Return the seconds that one layer took, for each of `CALLS` passes over all layers."""
        call = self._recorded()
        call()
        seconds = []
        for _ in range(CALLS):
            started = time.perf_counter()
            call()
            seconds.append((time.perf_counter() - started) / LAYERS)
        return seconds

    def _recorded(self) -> Callable[[], object]:
        steps: list[tuple[Code, ctypes.Structure]] = []
        with listening(lambda code, arguments: steps.append((code, arguments))):  # `kept` owns the output buffers
            kept = [attention(self._query, layer, self._step, HEAD_DIM**-0.5, None, None) for layer in self._cache.layers]
        operations, library = listed(steps), native().library
        assert library is not None, "available: here() was checked first"
        return lambda: (library.armature_run(ctypes.byref(operations), len(steps), torch.get_num_threads()), kept)
