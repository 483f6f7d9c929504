"""OpenVINO's runtime as a side of a comparison of encoders.

The model is a folder made by `export_openvino`. Options are properties of the CPU plugin by their own names, such as
`inference_precision_hint=f32`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openvino

from tools.peers.turns import Peer, Rows


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Load the model with one stream that uses all threads, which gives the lowest latency of a batch.

    Texts of a turn have equal lengths, so nothing is padded.
    """
    properties = {"INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1, "PERFORMANCE_HINT": "LATENCY"}
    compiled = openvino.compile_model(
        model / "openvino_model.xml", "CPU", properties | {name.upper(): text for name, text in options.items()}
    )
    names = [port.get_any_name() for port in compiled.inputs]
    request = compiled.create_infer_request()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        yield [[] for _ in prompts]
        ids = np.array(prompts, dtype=np.int64)
        rows = {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}
        request.infer({name: rows[name] for name in names}, share_inputs=True)
        vectors = request.get_output_tensor(0).data.mean(1)
        yield [[int(row.argmax())] for row in vectors]

    precision = compiled.get_property("INFERENCE_PRECISION_HINT")
    return Peer(
        f"OpenVINO {openvino.__version__}, {model.name}, computes in {precision}",
        (model / "openvino_model.bin").stat().st_size,
        generate,
    )
