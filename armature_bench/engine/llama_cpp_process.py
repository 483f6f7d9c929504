"""Quantizes a GGUF file with llama.cpp and scores windows of tokens: the process behind `llama_cpp.py`.

Runs as a program in any interpreter that has `llama-cpp-python`; nothing else of Armature is imported. A process of its
own keeps llama.cpp's thread pool, and a crash, away from ours. The only argument is a JSON file with the job. Each
event is one line of JSON on standard output. llama.cpp's own messages go to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Event = dict[str, Any]
CHUNK_TOKENS = 128  # positions whose logits are held in double precision at once


def main() -> int:
    sys.path.pop(0)  # this folder, whose modules are not meant for another interpreter
    events = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for event in run(json.loads(Path(sys.argv[1]).read_text())):
        print(json.dumps(event), file=events, flush=True)
    return 0


def run(job: Event) -> Iterator[Event]:
    """Yield the file size of each format when it is written, then the results of its windows in order."""
    api = import_module("llama_cpp")
    api.llama_backend_init()
    source = Path(job["source"])
    for name, file_type in job["formats"].items():
        file = source if file_type is None else quantize(api, source, file_type, job["threads"])
        yield {"name": name, "file_bytes": file.stat().st_size}
        for nats, likeliest in scores(api, file, job["windows"], job["threads"]):
            yield {"name": name, "nats": nats, "likeliest": likeliest}
        if file is not source:
            file.unlink()


def quantize(api: Any, source: Path, file_type: str, threads: int) -> Path:
    """Write the file in another format next to it, with the mixture of types that llama.cpp itself chooses."""
    file = source.with_name("quantized.gguf")
    params = api.llama_model_quantize_default_params()
    params.ftype, params.nthread = getattr(api, file_type), threads
    code = api.llama_model_quantize(str(source).encode(), str(file).encode(), params)
    if code != 0:
        raise SystemExit(f"llama.cpp could not quantize: code {code}")
    return file


def scores(api: Any, file: Path, windows: list[list[int]], threads: int) -> Iterator[tuple[float, list[int]]]:
    """Yield the negative log-likelihood in nats, and the likeliest tokens, of each window by itself."""
    model = api.llama_model_load_from_file(str(file).encode(), api.llama_model_default_params())
    params = api.llama_context_default_params()
    params.n_ctx = params.n_batch = params.n_ubatch = max(map(len, windows))
    params.n_threads = params.n_threads_batch = threads
    context = api.llama_init_from_model(model, params) if model else None
    if not context:
        raise SystemExit(f"llama.cpp cannot load {file.name}")
    batch = api.llama_batch_init(params.n_batch, 0, 1)
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    for window in windows:
        code = decode(api, context, batch, window)
        if code != 0:
            raise SystemExit(f"llama_decode returned {code}")
        logits = np.ctypeslib.as_array(api.llama_get_logits(context), (len(window) - 1, vocab_size))
        yield score(logits, np.array(window[1:]))
    api.llama_batch_free(batch)
    api.llama_free(context)
    api.llama_model_free(model)


def decode(api: Any, context: Any, batch: Any, window: list[int]) -> int:
    """Run all tokens but the last, from an empty cache; returns llama.cpp's status."""
    api.llama_memory_clear(api.llama_get_memory(context), False)
    for at, token in enumerate(window[:-1]):
        batch.token[at], batch.pos[at], batch.logits[at] = token, at, True
        batch.n_seq_id[at], batch.seq_id[at][0] = 1, 0
    batch.n_tokens = len(window) - 1
    return int(api.llama_decode(context, batch))


def score(logits: NDArray[np.float32], targets: NDArray[np.int64]) -> tuple[float, list[int]]:
    """Return the negative log-likelihood of `targets` [n] in nats, and the likeliest token of each row [n, vocab]."""
    nats = 0.0
    for start in range(0, len(targets), CHUNK_TOKENS):
        expected = targets[start : start + CHUNK_TOKENS]
        rows = logits[start : start + len(expected)].astype(np.float64)
        largest = rows.max(axis=1)
        totals = np.log(np.exp(rows - largest[:, None]).sum(axis=1)) + largest
        nats += float((totals - rows[np.arange(len(expected)), expected]).sum())
    return nats, [int(token) for token in logits.argmax(axis=1)]


if __name__ == "__main__":
    sys.exit(main())
