"""Codes of quantized GGUF files: held bit for bit where a form of ours is equal, and the plan says which precision keeps them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.weights.checkpoint import open_checkpoint
from app.weights.tensor_reader import MappedFiles, TensorReader
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.linear import Linear
from armature_kernels.linear.row_split import RowSplitLinear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from gguf_files import convert, write_tensor
from loaded_models import load
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
PRECISIONS = {"Q4_0": "int4", "Q4_1": "int4", "Q8_0": "int8", "Q5_0": "int8"}


def written(folder: Path, kind: str, **overrides: Any) -> Path:
    source = write_checkpoint(folder / "exact", **{**SIZES, **overrides})
    convert(source, folder / "tiny.gguf", kind)
    return folder / "tiny.gguf"


def linears(model: torch.nn.Module) -> dict[tuple[str, ...], Linear]:
    return {module.sources: module for module in model.modules() if isinstance(module, Linear)}


def held(file: Path, sources: tuple[str, ...]) -> torch.Tensor:
    """Values of the file, with scales and minimums rounded to BF16: what equal codes give."""
    reader, parts = TensorReader(open_checkpoint(file).tensors), []
    for source in sources:
        entry = reader.tensors[f"{source}.weight"]
        codes = reader.four_bit_codes(entry, range(entry.shape[0]))
        if codes is not None:
            parts.append(codes.dequantise())
            continue
        values = MappedFiles().tensor(entry).view(entry.shape[0], -1, 32)
        scales = values.abs().amax(-1, keepdim=True) / 127
        parts.append(((values / scales).round() * scales.bfloat16().float()).flatten(1))
    return torch.cat(parts)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_codes_are_held_bit_for_bit(tmp_path: Path, kind: str) -> None:
    file = written(tmp_path, kind)
    model = load(file, PRECISIONS[kind])
    for sources, linear in linears(model).items():
        assert isinstance(linear.form, IntPanelLinear)
        # The output layer has eight bits, so that an embedding tied to it can be read.
        if sources != ("lm_head",) or kind == "Q8_0":
            assert torch.equal(linear.form.dequantised(), held(file, sources))


def test_only_scales_are_rounded(tmp_path: Path) -> None:
    file = written(tmp_path, "Q4_1")
    sources = ("model.layers.0.mlp.down_proj",)
    exact = MappedFiles().tensor(open_checkpoint(file).tensors[f"{sources[0]}.weight"])
    form = linears(load(file, "int4"))[sources].form
    assert isinstance(form, IntPanelLinear)
    error = (form.dequantised() - exact).norm() / exact.norm()
    assert 0 < error < 0.006  # BF16 rounds to 1 in 512; rounding to four bits again costs ten times as much
    again = linears(load(tmp_path / "exact", "int4"))[sources].form
    assert isinstance(again, IntPanelLinear)
    assert (again.dequantised() - exact).norm() / exact.norm() > 0.05


def test_types_of_one_product_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files such as Q4_K_M have values in more bits than queries and keys."""
    source = write_checkpoint(tmp_path / "exact", **SIZES)

    def write(writer: Any, config: Any, name: str, tensor: torch.Tensor, kind: str) -> None:
        write_tensor(writer, config, name, tensor, "Q8_0" if "v_proj" in name else kind)

    monkeypatch.setattr("gguf_files.write_tensor", write)
    convert(source, tmp_path / "tiny.gguf", "Q4_1")
    form = next(
        linear.form for sources, linear in linears(load(tmp_path / "tiny.gguf", "int4")).items() if len(sources) == 3
    )
    assert isinstance(form, RowSplitLinear) and [one.packing.bits for one in form.forms] == [4, 8]
    names = tuple(f"model.layers.0.self_attn.{name}_proj" for name in "qkv")
    assert torch.equal(form.dequantised(), held(tmp_path / "tiny.gguf", names))


def test_a_copy_in_eight_bits_and_layers_that_the_operator_keeps(tmp_path: Path) -> None:
    file = written(tmp_path, "Q4_1")
    copied = load(file, "int4", int8_copy=True)
    sources = ("model.layers.0.mlp.down_proj",)
    assert torch.equal(linears(copied)[sources].form.few.dequantised(), held(file, sources))
    kept = linears(load(file, "int4", keep_layers=(("*.down_proj", "bf16"),)))
    assert not isinstance(kept[sources].form, IntPanelLinear)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", PRECISIONS)
def test_the_plan_counts_the_bytes_that_are_held(tmp_path: Path, kind: str, tied: bool) -> None:
    file = written(tmp_path, kind, tie_word_embeddings=tied)
    needs = open_checkpoint(file).needs()
    model = load(file, PRECISIONS[kind])
    table = 0 if tied else 4 * 320 * 256
    norms = 4 * sum(
        module.weight.numel() for module in model.modules() if type(module).__name__ in ("Norm", "HeadNorm")
    )
    assert needs.codes_precision == PRECISIONS[kind] and needs.stored_quantization == kind
    assert needs.bytes_by_precision[PRECISIONS[kind]] == table + norms + sum(
        linear.form.nbytes for linear in linears(model).values()
    )
