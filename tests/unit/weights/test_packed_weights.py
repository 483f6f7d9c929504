"""Checkpoints that other libraries quantized: values are those of independent packing code, and codes are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointInvalid
from app.kernels.linear.int_panels import IntPanelLinear
from app.kernels.linear.linear import Linear
from app.kernels.native.arguments import OpCode
from app.kernels.native.operations import has_kernel
from app.weights.checkpoint import open_checkpoint
from app.weights.quantized.values import unpack
from app.weights.tensor_reader import MappedFiles
from loaded_models import load
from quantized_files import FORMATS, change_config, drawn, quantized

NAME = "model.layers.1.mlp.down_proj.weight"
KEPT = {name: kind.kept for name, kind in FORMATS.items() if kind.kept}


@pytest.mark.parametrize("name", FORMATS)
def test_values_are_those_that_were_packed(tmp_path: Path, name: str) -> None:
    directory, values = quantized(tmp_path, name)
    checkpoint, files = open_checkpoint(directory), MappedFiles()
    assert checkpoint.needs().codes_precision == FORMATS[name].kept and checkpoint.needs().stored_quantization
    for tensor, expected in values.items():
        torch.testing.assert_close(files.tensor(checkpoint.tensors[tensor]), expected, rtol=3e-7, atol=1e-7, msg=tensor)
    part = torch.empty(19, values[NAME].shape[1])
    files.read(checkpoint.tensors[NAME], 5, part)
    torch.testing.assert_close(part, values[NAME][5:24], rtol=3e-7, atol=1e-7)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("name", KEPT)
def test_codes_are_kept(tmp_path: Path, name: str) -> None:
    directory, values = quantized(tmp_path, name)
    for module in load(directory, KEPT[name]).modules():
        if isinstance(module, Linear) and module.sources != ("lm_head",):
            expected = torch.cat([values[f"{source}.weight"] for source in module.sources])
            assert isinstance(module.form, IntPanelLinear)
            error = (module.form.dequantised() - expected).abs().max() / expected.abs().max()
            assert error < FORMATS[name].apart


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_of_any_bits_are_unpacked(bits: int) -> None:
    codes = drawn((3, 64), 2**bits)
    streams = ["".join(f"{code:0{bits}b}"[::-1] for code in row) for row in codes]
    words = [[int(stream[at : at + 32][::-1], 2) for at in range(0, len(stream), 32)] for stream in streams]
    stored = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    assert np.array_equal(unpack(stored, bits).numpy(), codes)


def test_an_unknown_method_and_unnamed_quantization_are_refused(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "w8a8")
    change_config(directory, quantization_config={"quant_method": "aqlm"})
    with pytest.raises(CheckpointInvalid, match=r"already quantized by aqlm .* Supported are gptq, awq"):
        open_checkpoint(directory)
    change_config(directory, quantization_config=None)
    with pytest.raises(
        CheckpointInvalid, match=r"weights are quantized \(model.layers.0.*weight_scale.*does not say how"
    ):
        open_checkpoint(directory)


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "gptq")
    stored = load_file(directory / "model.safetensors")
    del stored[NAME.replace("weight", "scales")]
    save_file(stored, directory / "model.safetensors")
    with pytest.raises(CheckpointInvalid, match=r"down_proj\.scales is missing"):
        open_checkpoint(directory)
