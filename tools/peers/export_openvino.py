"""Makes an OpenVINO model of a BERT-like encoder: `python -m tools.peers.export_openvino CHECKPOINT FOLDER --precision fp32|int8|w8a8`.

`fp32`: as it is, and computed in BF16 where the processor multiplies that; `int8`: weights in eight bits; `w8a8`: weights and activations,
quantised by NNCF with texts of random ids (what speed is measured with; no measure of quality). Runs in the peer's own environment.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path
from typing import Any

import nncf
import openvino
import torch
from transformers import AutoModel

CALIBRATION_TEXTS = 32
TEXT_TOKENS = 128


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--precision", choices=("fp32", "int8", "w8a8"), default="fp32")
    arguments = parser.parse_args()
    model = AutoModel.from_pretrained(arguments.checkpoint, attn_implementation="sdpa").eval()
    names = ("input_ids", "attention_mask")
    example = {name: torch.ones(2, TEXT_TOKENS, dtype=torch.int64) for name in names}
    with torch.inference_mode():
        converted = openvino.convert_model(model, example_input=example)
    for parameter in converted.inputs:
        converted.reshape({port: openvino.PartialShape([-1, -1]) for port in converted.inputs})
        assert parameter.get_any_name() in names, "two inputs and no other"
    arguments.folder.mkdir(parents=True, exist_ok=True)
    openvino.save_model(_rounded(converted, arguments.precision), arguments.folder / "openvino_model.xml", compress_to_fp16=False)


def _rounded(model: Any, precision: str) -> Any:
    if precision == "int8":
        return nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_SYM)
    if precision == "w8a8":
        texts = nncf.Dataset([_text(seed) for seed in range(CALIBRATION_TEXTS)])
        return nncf.quantize(model, texts, model_type=nncf.ModelType.TRANSFORMER, subset_size=CALIBRATION_TEXTS)
    return model


def _text(seed: int) -> dict[str, Any]:
    ids = random.Random(seed).choices(range(100, 2000), k=TEXT_TOKENS)
    return {"input_ids": torch.tensor([ids]).numpy(), "attention_mask": torch.ones(1, TEXT_TOKENS, dtype=torch.int64).numpy()}


if __name__ == "__main__":
    main()
