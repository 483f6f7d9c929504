"""Checkpoints that other libraries quantized: values are those of independent packing code, and codes are kept."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from app.errors import CheckpointInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.quantized.values import _columns, unpack
from app.weights.tensor_reader import MappedFiles
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
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
            error = (module.form.dequantized() - expected).abs().max() / expected.abs().max()
            assert error < FORMATS[name].apart


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_codes_of_any_bits_are_unpacked(bits: int) -> None:
    codes = drawn((3, 64), 2**bits)
    streams = ["".join(f"{code:0{bits}b}"[::-1] for code in row) for row in codes]
    words = [[int(stream[at : at + 32][::-1], 2) for at in range(0, len(stream), 32)] for stream in streams]
    stored = torch.from_numpy(np.array(words, dtype=np.uint32).view(np.int32))
    assert np.array_equal(unpack(stored, bits).numpy(), codes)


@pytest.mark.parametrize(
    "bits, zeros, stored",
    [
        # Less 1, as whole words: the zero of 0 borrows from the next one.
        (4, [0, 5, 0, 0, 15, 1, 0, 8], 0x80_1F_00_50 - 0x11_11_11_11),
        (2, [0, 3, *[1] * 14], 0x55_55_55_5C - 0x55_55_55_55),
        (8, [0, 255, 0, 1], 0x01_00_FF_00 - 0x01_01_01_01),
    ],
)
def test_zeros_of_the_first_version_are_read_as_gptqmodel_reads_them(bits: int, zeros: list[int], stored: int) -> None:
    words = torch.from_numpy(np.array([[stored % 2**32] + [0] * (bits - 1)], dtype=np.uint32).view(np.int32))
    found = _columns(words, range(len(zeros)), bits, added=1)
    assert found.tolist() == [zeros]
    assert (_columns(words * 0, range(32), bits, added=1) == 1).all()


def test_zeros_of_the_first_version_in_three_bits_wrap_alone() -> None:
    words = torch.full((1, 3), -1, dtype=torch.int32)
    assert (_columns(words, range(32), 3, added=1) == 0).all()


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


def changed(folder: Path, name: str, **tensors: torch.Tensor) -> Path:
    """A checkpoint with other tensors of one weight, by the end of their names."""
    directory, _ = quantized(folder, name)
    stored = load_file(directory / "model.safetensors")
    stored |= {NAME.replace("weight", part): tensor for part, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def test_a_group_that_does_not_exist_is_refused_by_name(tmp_path: Path) -> None:
    order = torch.arange(128, dtype=torch.int32) // 32
    for wrong in (order + 1, order - 1):
        entry = open_checkpoint(changed(tmp_path, "gptq", g_idx=wrong)).tensors[NAME]
        with pytest.raises(CheckpointInvalid, match=r"layers\.1\.mlp\.down_proj\.weight has 4 groups, and its g_idx"):
            MappedFiles().tensor(entry)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_an_order_and_zeros_that_config_json_denies_are_refused_by_name(tmp_path: Path) -> None:
    order = torch.arange(128, dtype=torch.int32) % 4
    directory = changed(tmp_path, "gptq", g_idx=order)
    with pytest.raises(CheckpointInvalid, match=r"layers\.1\.mlp\.down_proj\.weight: its g_idx .* must be true"):
        load(directory, "int4")
    load(directory)  # values need no order
    directory = changed(tmp_path, "gptq symmetric", qzeros=torch.full((4, 8), 0x11111111, dtype=torch.int32))
    with pytest.raises(CheckpointInvalid, match=r"layers\.1\.mlp\.down_proj\.weight: its qzeros .* must be false"):
        load(directory, "int4")


def test_biases_of_zero_that_the_model_does_not_have_are_left_out(tmp_path: Path) -> None:
    bias = torch.zeros(64, dtype=torch.float16)
    assert NAME.replace("weight", "bias") not in open_checkpoint(changed(tmp_path, "gptq", bias=bias)).tensors
    bias[63] = 1e-3
    with pytest.raises(CheckpointInvalid, match=r"does not use: model\.layers\.1\.mlp\.down_proj\.bias"):
        open_checkpoint(changed(tmp_path, "gptq", bias=bias))
    with pytest.raises(CheckpointInvalid, match=r"does not use: model\.layers\.1\.mlp\.down_proj\.bias"):
        open_checkpoint(changed(tmp_path, "gptq", bias=torch.zeros(63)))


@pytest.mark.cases(test=2)
@pytest.mark.parametrize(
    ("name", "part"),
    [("nf4", "weight.absmax"), ("nf4 nested", "weight.absmax"), ("nf4 nested", "weight.nested_absmax"),
    ("nf4 nested", "weight.nested_quant_map"), ("bitsandbytes int8", "SCB"), ("gptq", "g_idx")],
)  # fmt: skip
def test_vectors_of_another_length_are_refused_by_name(tmp_path: Path, name: str, part: str) -> None:
    directory, _ = quantized(tmp_path, name)
    vector = load_file(directory / "model.safetensors")[NAME.replace("weight", part)]
    for wrong in (vector[:-1], torch.cat((vector, vector[:1]))):
        with pytest.raises(CheckpointInvalid, match=rf"down_proj\.{part} has shape .* its quantization asks for"):
            open_checkpoint(changed(tmp_path, name, **{part: wrong.clone()}))


def test_codes_of_another_length_are_refused_by_name(tmp_path: Path) -> None:
    directory, _ = quantized(tmp_path, "nf4")
    codes = load_file(directory / "model.safetensors")[NAME]
    for wrong in (codes[:-1], torch.cat((codes, codes[:1]))):
        with pytest.raises(CheckpointInvalid, match=r"down_proj\.weight\.quant_state does not fit the \d+ bytes"):
            open_checkpoint(changed(tmp_path, "nf4", weight=wrong.clone()))
