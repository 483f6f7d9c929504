"""llama.cpp as a side of a comparison, with one `llama_decode` call for all rows of a step.

It uses the low-level calls of llama-cpp-python. The model is a GGUF file, see `tools/gguf_checkpoint.py`. Options:
`n_batch`, `n_ubatch`, `kv=f32` (keys and values in FP32, not F16, and no flash attention). Everything else has its
default.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import llama_cpp as api
import numpy as np
from gguf import GGUFReader

from tools.peers.turns import Peer, Rows

BATCH_TOKENS = 512
CONTEXT_STEP = 256  # a row's context is rounded up to a multiple of this number of tokens


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Load one model, and one context for each number of rows, because a context reserves memory for its rows."""
    api.llama_backend_init()
    loaded = api.llama_model_load_from_file(str(model).encode(), api.llama_model_default_params())
    if not loaded:
        raise SystemExit(f"llama.cpp cannot load {model}; see its output above")
    n_batch, n_ubatch = int(options.get("n_batch", BATCH_TOKENS)), int(options.get("n_ubatch", BATCH_TOKENS))

    @cache
    def context(rows: int, tokens: int) -> Context:
        params = api.llama_context_default_params()
        params.n_seq_max, params.n_ctx, params.n_batch, params.n_ubatch = rows, rows * tokens, n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = threads
        if options.get("kv") == "f32":
            params.type_k = params.type_v = api.GGML_TYPE_F32
            params.flash_attn_type = api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        return Context(loaded, params)

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        longest = max(map(len, prompts)) + tokens
        return context(len(prompts), -(-longest // CONTEXT_STEP) * CONTEXT_STEP).generate(prompts, tokens)

    return Peer(f"llama-cpp-python {api.__version__}, {model.name}, {_features()}", _weight_bytes(model), generate)


def _features() -> str:
    pairs = (
        pair.split("=") for pair in api.llama_print_system_info().decode().partition(":")[2].split("|") if "=" in pair
    )
    return " ".join(name.strip() for name, value in pairs if value.strip() == "1")


def _weight_bytes(model: Path) -> int:
    """Return the bytes of weights read per token, without an embedding table next to a separate output layer."""
    sizes = {tensor.name: int(tensor.n_bytes) for tensor in GGUFReader(model).tensors}
    return sum(sizes.values()) - (sizes["token_embd.weight"] if "output.weight" in sizes else 0)


class Context:
    """Memory for some rows. Prompts are prefilled in shared batches; then each step decodes one token of each row."""

    def __init__(self, model: api.llama_model_p, params: api.llama_context_params) -> None:
        self._context = api.llama_init_from_model(model, params)
        if not self._context:
            raise SystemExit("llama.cpp cannot create a context; see its output above")
        self._vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
        self._room = params.n_batch
        self._batch = api.llama_batch_init(self._room, 0, 1)

    def generate(self, prompts: Rows, tokens: int) -> Iterator[Rows]:
        rows: Rows = [[] for _ in prompts]
        yield rows
        api.llama_memory_clear(api.llama_get_memory(self._context), False)
        for number, prompt in enumerate(prompts):
            for at, token in enumerate(prompt):
                self._put(token, at, number, wants_logits=at == len(prompt) - 1)
                if self._batch.n_tokens == self._room:
                    self._decode(rows)
                    yield rows
        if self._batch.n_tokens:
            self._decode(rows)
            yield rows
        while len(rows[0]) < tokens:
            for number, prompt in enumerate(prompts):
                self._put(rows[number][-1], len(prompt) + len(rows[number]) - 1, number, wants_logits=True)
            self._decode(rows)
            yield rows

    def _put(self, token: int, position: int, row: int, *, wants_logits: bool) -> None:
        batch, at = self._batch, self._batch.n_tokens
        batch.token[at], batch.pos[at], batch.logits[at] = token, position, wants_logits
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, row
        batch.n_tokens = at + 1

    def _decode(self, rows: Rows) -> None:
        """Compute the batch and sample greedily wherever logits were requested."""
        batch = self._batch
        code = api.llama_decode(self._context, batch)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code}")
        for at in range(batch.n_tokens):
            if batch.logits[at]:
                logits = api.llama_get_logits_ith(self._context, at)
                rows[batch.seq_id[at][0]].append(int(np.ctypeslib.as_array(logits, (self._vocab_size,)).argmax()))
        batch.n_tokens = 0
