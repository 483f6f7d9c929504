"""vLLM's CPU build as a side of a comparison, with its own scheduler.

Options: `dtype`, `max_num_batched_tokens`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from app.weights.safetensors import read_header
from tools.peers.turns import Peer, Rows

MAX_ROWS = 32
MAX_TOKENS = 1024  # maximum tokens of one row


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Load the engine in this process, since a separate engine process would take a core."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}", "HF_HUB_OFFLINE": "1"}
    import vllm

    extra = (
        {"max_num_batched_tokens": int(options["max_num_batched_tokens"])}
        if "max_num_batched_tokens" in options
        else {}
    )
    engine = vllm.LLM(
        model=str(model),
        dtype=options.get("dtype", "bfloat16"),
        max_model_len=MAX_TOKENS,
        max_num_seqs=MAX_ROWS,
        enable_prefix_caching=False,
        **extra,
    ).llm_engine
    names = count()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        params = vllm.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)
        rows: dict[str, list[int]] = {f"row-{next(names)}": [] for _ in prompts}
        yield list(rows.values())
        for name, prompt in zip(rows, prompts, strict=True):
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            for answer in engine.step():
                rows[_asked(answer.request_id, rows)] = list(answer.outputs[0].token_ids)
            yield list(rows.values())

    return Peer(f"vLLM {vllm.__version__}, {options.get('dtype', 'bfloat16')}", _weight_bytes(model), generate)


def _asked(name: str, rows: dict[str, list[int]]) -> str:
    """Return the name that we gave a request; newer versions append a suffix."""
    return name if name in rows else name.rpartition("-")[0]


def _weight_bytes(model: Path) -> int:
    """Return the bytes of weights per token in BF16, without an embedding table next to a separate output layer."""
    tensors = {name: entry for file in model.glob("*.safetensors") for name, entry in read_header(file).items()}
    looked_up = tensors["model.embed_tokens.weight"].nbytes if "lm_head.weight" in tensors else 0
    return sum(entry.nbytes for entry in tensors.values()) - looked_up
