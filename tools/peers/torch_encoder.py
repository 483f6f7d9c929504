"""The model of transformers in eager mode, as a side of a comparison of encoders.

Option `dtype`: float32 or bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

from tools.peers.turns import Peer, Rows


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    torch.set_num_threads(threads)
    dtype = getattr(torch, options.get("dtype", "float32"))
    loaded = transformers.AutoModel.from_pretrained(model, dtype=dtype, attn_implementation="sdpa").eval()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        yield [[] for _ in prompts]
        with torch.inference_mode():
            vectors = loaded(input_ids=torch.tensor(prompts)).last_hidden_state.mean(1)
        yield [[int(index)] for index in vectors.argmax(-1)]

    size = sum(parameter.nbytes for parameter in loaded.parameters())
    return Peer(f"transformers {transformers.__version__}, torch {torch.__version__}, {dtype}", size, generate)
