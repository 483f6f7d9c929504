"""GGUF files of models with a recurrent state and of Gemma 4 give the logits of the checkpoint that they were made from."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import torch

from app.weights.checkpoint import open_checkpoint
from app.weights.gguf.config import FAMILIES
from app.weights.gguf.hybrid import READERS
from app.weights.tensor_reader import TensorReader
from gguf_files import requantize
from gguf_hybrids import HYBRIDS, write_hybrid
from loaded_models import load
from reference_attention import PlainAttend, context_of

PROMPT = list(range(5, 29))


def test_every_hybrid_is_written() -> None:
    assert {architecture for architecture, _ in HYBRIDS.values()} == {
        family.architecture for family in FAMILIES.values() if family.model_type in READERS
    }


@pytest.mark.parametrize("name", HYBRIDS)
@torch.inference_mode()
def test_a_file_gives_the_logits_of_its_checkpoint(tmp_path: Path, name: str) -> None:
    file = write_hybrid(tmp_path, name)
    exact, ours = (
        load(place, "float32")(context_of(PROMPT, PlainAttend())).float() for place in (tmp_path / "exact", file)
    )
    torch.testing.assert_close(ours, exact, atol=1e-5 * float(exact.abs().max()), rtol=0.0)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_reordered_columns_keep_the_codes_of_a_quantized_file(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(requantize(write_hybrid(tmp_path, "qwen35"), kind))
    name = "model.layers.0.linear_attn.out_proj.weight"
    entry, stored = checkpoint.tensors[name], open_checkpoint(tmp_path / "exact").tensors
    with closing(TensorReader(checkpoint.tensors)) as reader, closing(TensorReader(stored)) as exact:
        values, expected = reader.block(entry, range(64)).clone(), exact.block(stored[name], range(64))
        codes = reader.stored_codes(entry, range(64), 4)
    assert float((values - expected).abs().max()) < 0.2 * float(expected.abs().max())
    assert (codes is None) == (kind == "Q8_0")
    if codes is not None:
        torch.testing.assert_close(codes.dequantize(), values, atol=0.01 * float(values.abs().max()), rtol=0.0)
    assert checkpoint.needs().stored_quantization == kind
