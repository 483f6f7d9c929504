"""Export a BERT-like encoder for OpenVINO in W8A8: `python -m tools.peers.export_openvino CHECKPOINT FOLDER`.

NNCF quantizes weights and activations to 8 bits with texts of random ids, which is enough to measure speed but not
quality. It runs in the peer's own environment, where `optimum-cli export openvino --task feature-extraction` exports
`--weight-format fp32` (computed in BF16 where the processor supports it) and `int8` (weights alone).
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
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as exported:
        main_export(str(arguments.checkpoint), exported, task="feature-extraction", ov_config=None)
        model = openvino.Core().read_model(Path(exported) / MODEL)
        arguments.folder.mkdir(parents=True, exist_ok=True)
        openvino.save_model(_quantized(model), arguments.folder / MODEL, compress_to_fp16=False)


def _quantized(model: Any) -> Any:
    names = [port.get_any_name() for port in model.inputs]
    texts = nncf.Dataset([_text(seed, names) for seed in range(CALIBRATION_TEXTS)])
    return nncf.quantize(model, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION_TEXTS)


def _text(seed: int, names: list[str]) -> dict[str, Any]:
    ids = random.Random(seed).choices(range(100, 2000), k=TEXT_TOKENS)
    rows = {"input_ids": [ids], "attention_mask": [[1] * TEXT_TOKENS], "token_type_ids": [[0] * TEXT_TOKENS]}
    return {name: np.array(rows[name], dtype=np.int64) for name in names}


if __name__ == "__main__":
    main()
