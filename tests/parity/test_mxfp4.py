"""gpt-oss with experts in MXFP4: values, logits and kept codes are those of transformers' dequantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from app.errors import CheckpointInvalid
from app.weights.checkpoint import open_checkpoint
from app.weights.gguf.reader import read_gguf
from app.weights.quantized.entries import PackedEntry
from app.weights.tensor_reader import MappedFiles, TensorReader
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from mxfp4_files import GPT_OSS, drawn_mxfp4, gguf_blocks, mxfp4_values, write_mxfp4, write_mxfp4_gguf
from reference_attention import PlainAttend, context_of
from served_families import expected_logits, prompt_of


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_mxfp4(tmp_path_factory.mktemp("mxfp4"))


@torch.inference_mode()
def logits(directory: Path, precision: str = "float32") -> torch.Tensor:
    found: torch.Tensor = load(directory, precision)(context_of(prompt_of(24), PlainAttend()))
    return found.float()


def test_the_definition_is_what_transformers_reads() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = drawn_mxfp4(3, 40, 96)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    assert torch.equal(theirs, mxfp4_values(blocks, scales).transpose(1, 2))


def test_values_and_kept_codes_are_exact(written: tuple[Path, Path]) -> None:
    packed, exact = written
    checkpoint, expected = open_checkpoint(packed), load_file(exact / "model.safetensors")
    files, reader = MappedFiles(), TensorReader(checkpoint.tensors)
    compared = 0
    for name, entry in checkpoint.tensors.items():
        if not isinstance(entry, PackedEntry):
            continue
        at, expert, product, _ = name.rsplit(".", 3)
        whole = expected[f"{at}.{'down_proj' if product == 'down_proj' else 'gate_up_proj'}"][int(expert)].T
        values = {"down_proj": whole, "gate_proj": whole[0::2], "up_proj": whole[1::2]}[product]
        assert torch.equal(files.tensor(entry), values)
        held = reader.stored_codes(entry, range(5, 38), 8)
        assert held is not None and held.scales.dtype == torch.bfloat16
        assert torch.equal(held.codes.float() * held.scales.float().repeat_interleave(32, 1), values[5:38])
        compared += 1
    assert compared == 4 * 6 * 3
    files.close()
    needs = checkpoint.needs()
    assert needs.codes_precision == "int8" and needs.stored_quantization == "MXFP4"


def test_logits_are_those_of_transformers(written: tuple[Path, Path]) -> None:
    packed, exact = written
    expected = expected_logits(exact, GPT_OSS, prompt_of(24))
    torch.testing.assert_close(logits(packed), expected, atol=2e-4, rtol=1e-4)
    torch.testing.assert_close(logits(exact), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_kept_codes_give_the_logits_of_their_values(written: tuple[Path, Path]) -> None:
    """Activations, and the layers that are not in MXFP4, are rounded to eight bits. BF16 is 0.018 away."""
    packed, exact = written
    expected = expected_logits(exact, GPT_OSS, prompt_of(24))
    assert (logits(packed, "int8") - expected).norm() < 0.1 * expected.norm()
    assert torch.equal(logits(packed, "bfloat16"), logits(exact, "bfloat16"))


@pytest.fixture(scope="module")
def file(written: tuple[Path, Path]) -> Path:
    return write_mxfp4_gguf(written[0], written[0].with_name("tiny.gguf"))


def test_the_blocks_of_gguf_have_the_same_values() -> None:
    blocks, scales = drawn_mxfp4(3, 40, 96)
    theirs = gguf.quants.dequantize(gguf_blocks(blocks, scales), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(theirs, mxfp4_values(blocks, scales).numpy())


def test_a_gguf_file_is_the_same_model(written: tuple[Path, Path], file: Path) -> None:
    ours, packed = open_checkpoint(file), open_checkpoint(written[0])
    assert ours.tensors.keys() == packed.tensors.keys()
    first, second = MappedFiles(), MappedFiles()
    for name, entry in ours.tensors.items():
        assert torch.equal(first.tensor(entry).float(), second.tensor(packed.tensors[name]).float()), name
    same = replace(ours.decoder, norm=packed.decoder.norm)  # the file has its epsilon in FP32
    assert same == packed.decoder
    assert ours.needs().codes_precision == "int8" and ours.needs().stored_quantization == "MXFP4"


def test_a_gguf_file_without_yarn_has_none(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.json without rotary embeddings has gpt-oss's own."""
    model = read_gguf(file)
    metadata = {key: value for key, value in model.metadata.items() if ".rope.scaling." not in key}
    monkeypatch.setattr("app.weights.checkpoint.read_gguf", lambda file: replace(model, metadata=metadata))
    found = open_checkpoint(file).decoder
    assert {rope and rope.kind for rope in found.ropes} == {"default"}
    wrong = {**metadata, "gpt-oss.expert_gating_func": 1}
    monkeypatch.setattr("app.weights.checkpoint.read_gguf", lambda file: replace(model, metadata=wrong))
    with pytest.raises(CheckpointInvalid, match="expert_gating_func is not the one of this architecture"):
        open_checkpoint(file)


def test_a_gguf_file_gives_the_same_logits(written: tuple[Path, Path], file: Path) -> None:
    torch.testing.assert_close(logits(file), logits(written[0]), atol=1e-5, rtol=0.0)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
def test_codes_of_a_gguf_file_are_kept(written: tuple[Path, Path], file: Path) -> None:
    """Codes and scales have the bits of the safetensors file, and are those that the model multiplies."""
    theirs, ours = TensorReader(open_checkpoint(written[0]).tensors), TensorReader(open_checkpoint(file).tensors)
    experts = load(file, "int8").layers[1].mlp.experts
    for product in ("gate_proj", "up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.2.{product}.weight"
        found, expected = (one.stored_codes(one.tensors[name], range(5, 38), 8) for one in (ours, theirs))
        assert found is not None and expected is not None
        assert torch.equal(found.codes, expected.codes) and torch.equal(found.scales, expected.scales)
        if product == "down_proj":
            assert torch.equal(experts[2].down.form.dequantized(), MappedFiles().tensor(ours.tensors[name]))
