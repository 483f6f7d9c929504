"""Export a BERT-like encoder for OpenVINO: `python -m tools.peers.export_openvino CHECKPOINT FOLDER --precision P`.

`fp32` keeps the weights, and OpenVINO computes in BF16 where the processor supports it. `int8` has 8-bit weights.
`w8a8` has 8-bit weights and activations, quantized by NNCF with texts of random ids, which is enough to measure speed
but not quality. It runs in the peer's own environment.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from typing import Any

import nncf
import numpy as np
import openvino
from optimum.exporters.openvino import main_export

CALIBRATION_TEXTS = 32
TEXT_TOKENS = 128
MODEL = "openvino_model.xml"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=("fp32", "int8", "w8a8"), default="fp32")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as exported:
        main_export(str(arguments.checkpoint), exported, task="feature-extraction", ov_config=None)
        model = openvino.Core().read_model(Path(exported) / MODEL)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        openvino.save_model(_rounded(model, arguments.precision), arguments.folder / MODEL, compress_to_fp16=False)


def _rounded(model: Any, precision: str) -> Any:
    if precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    if precision == "w8a8":
        names = [port.get_any_name() for port in model.inputs]
        texts = nncf.Dataset([_text(seed, names) for seed in range(CALIBRATION_TEXTS)])
        return nncf.quantize(model, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION_TEXTS)
    return model


def _text(seed: int, names: list[str]) -> dict[str, Any]:
    ids = random.Random(seed).choices(range(100, 2000), k=TEXT_TOKENS)
    rows = {"input_ids": [ids], "attention_mask": [[1] * TEXT_TOKENS], "token_type_ids": [[0] * TEXT_TOKENS]}
    return {name: np.array(rows[name], dtype=np.int64) for name in names}


if __name__ == "__main__":
    main()
