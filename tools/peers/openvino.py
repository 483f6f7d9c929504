"""OpenVINO GenAI's continuous batching as a side of a comparison.

The model is a folder that optimum-intel exports. Options are `max_num_batched_tokens` and properties of the CPU plugin
by their own names, such as `kv_cache_precision=f16`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from pathlib import Path

import numpy as np
import openvino
import openvino_genai as genai

from tools.peers.turns import Peer, Rows

BATCH_TOKENS = 512  # the library's default is 256
CACHE_GIGABYTES = 2


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Load the model. Its steps are called one by one, as its own server does."""
    options = dict(options)
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_batched_tokens = int(options.pop("max_num_batched_tokens", BATCH_TOKENS))
    scheduling.cache_size = CACHE_GIGABYTES
    properties = {"INFERENCE_NUM_THREADS": threads, **{name.upper(): value for name, value in options.items()}}
    pipeline = genai.ContinuousBatchingPipeline(str(model), scheduling, "CPU", properties)
    names = count()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        greedy = genai.GenerationConfig(max_new_tokens=tokens, ignore_eos=True, do_sample=False)
        rows: Rows = [[] for _ in prompts]
        yield rows
        ids = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        handles = [pipeline.add_request(next(names), prompt, greedy) for prompt in ids]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            for row, handle in zip(rows, handles, strict=True):
                while handle.can_read():
                    for output in handle.read().values():
                        row.extend(output.generated_ids)
            yield rows

    return Peer(
        f"OpenVINO GenAI {genai.__version__}, {model.name}", (model / "openvino_model.bin").stat().st_size, generate
    )
