"""Loading: what is used as stored stays mapped, what is not is converted, fused and packed to the same values; progress; odd files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from app.weights import form_choice
from app.weights.forms import Recipe
from armature_kernels.linear.linear import Linear, PlainLinear
from loaded_models import load
from reference_attention import PlainAttend, context_of
from tiny_checkpoints import write_checkpoint, write_weights

PROMPT = list(range(10, 30))


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(form_choice, "find_recipe", lambda *key: Recipe(("plain",)))


@torch.inference_mode()
def logits(directory: Path, dtype: str = "float32") -> torch.Tensor:
    result: torch.Tensor = load(directory, dtype)(context_of(PROMPT, PlainAttend()))
    return result


def file_ranges(file: Path) -> list[range]:
    """Addresses at which this process has the file mapped."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(file))]
    bounds = [line.split()[0].split("-") for line in lines]
    return [range(int(start, 16), int(end, 16)) for start, end in bounds]


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the process's own mappings")
@pytest.mark.usefixtures("plain")
def test_what_is_used_as_stored_stays_in_the_file(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, tie_word_embeddings=True))
    ranges = file_ranges(tmp_path / "model.safetensors")

    def is_mapped(linear: Linear) -> bool:
        assert isinstance(linear.form, PlainLinear)
        return any(linear.form.weight.data_ptr() in addresses for addresses in ranges)

    layer = model.layers[0]
    assert any(model.embedding.weight.data_ptr() in addresses for addresses in ranges)
    assert is_mapped(layer.mlp.down) and is_mapped(layer.attention.out)
    assert is_mapped(layer.mlp.gate_up)  # the file has gate and up end to end
    assert not is_mapped(layer.attention.qkv)  # but o_proj between k and q
    assert model.output.form.weight.data_ptr() == model.embedding.weight.data_ptr()


@pytest.mark.usefixtures("plain")
def test_fused_weights_have_their_parts_in_order(tmp_path: Path) -> None:
    model = load(write_checkpoint(tmp_path, "Qwen2ForCausalLM"))
    tensors = load_file(tmp_path / "model.safetensors")
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(getattr(model.layers[1].attention.qkv.form, kind), torch.cat(parts))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("served", ["float32", "bfloat16"])
def test_stored_in_one_dtype_served_in_another(tmp_path: Path, stored: torch.dtype, served: str) -> None:
    """FP32 of 16-bit weights is exact; BF16 products differ from FP32's by rounding: 0.1 on logits of deviation 1 (4 layers' worth)."""
    result = logits(write_checkpoint(tmp_path / "stored", dtype=stored), served)
    rounded = {name: tensor.float() for name, tensor in load_file(tmp_path / "stored" / "model.safetensors").items()}
    reference = write_checkpoint(tmp_path / "reference")
    write_weights(reference, rounded)
    assert result.dtype == getattr(torch, served)
    tolerance = 1e-5 if served == "float32" else 0.1
    torch.testing.assert_close(result.float(), logits(reference), atol=tolerance, rtol=0)


@pytest.mark.parametrize("forms", [("plain",), ("onednn", "plain"), ("panels", "onednn", "plain")], ids="-".join)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Gemma2ForCausalLM"])
def test_packed_forms_give_the_plain_logits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str, dtype: str, forms: tuple[str, ...]
) -> None:
    monkeypatch.setattr("armature_kernels.linear.linear.OneDnnLinear.smallest", 0)
    expected = logits(write_checkpoint(tmp_path, architecture, dtype=torch.bfloat16))
    monkeypatch.setattr(form_choice, "find_recipe", lambda *key: Recipe(forms))
    tolerance = 1e-4 if dtype == "float32" else 0.15
    torch.testing.assert_close(logits(tmp_path, dtype).float(), expected, atol=tolerance, rtol=0)


def test_shards_give_the_same_model(tmp_path: Path) -> None:
    one, three = write_checkpoint(tmp_path / "one"), write_checkpoint(tmp_path / "three", shards=3)
    assert torch.equal(logits(one), logits(three))


@pytest.mark.usefixtures("plain")
def test_tensors_that_begin_at_odd_bytes(tmp_path: Path) -> None:
    expected = logits(write_checkpoint(tmp_path))
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    length = int.from_bytes(whole[:8], "little")
    header = json.dumps(json.loads(whole[8 : 8 + length])).encode()
    header += b" " * (1 - len(header) % 2)  # an odd length puts every tensor at an odd byte
    file.write_bytes(len(header).to_bytes(8, "little") + header + whole[8 + length :])
    assert len(header) % 2 == 1
    model = load(tmp_path)
    weights = [module.form.weight for module in model.modules() if isinstance(module, Linear)]
    assert all(weight.data_ptr() % weight.itemsize == 0 for weight in (*weights, model.embedding.weight))
    torch.testing.assert_close(logits(tmp_path), expected)


@pytest.mark.parametrize("tied", [False, True])
def test_progress_rises_to_the_whole(tmp_path: Path, tied: bool) -> None:
    heard: list[tuple[int, int]] = []
    load(write_checkpoint(tmp_path, tie_word_embeddings=tied), progress=lambda done, total: heard.append((done, total)))
    done = [value for value, _ in heard]
    tensors = load_file(tmp_path / "model.safetensors")
    assert done == sorted(done) and len(set(done)) > 5
    assert heard[-1] == (sum(tensor.nbytes for tensor in tensors.values()),) * 2


def test_the_checkpoint_cannot_be_written_through_the_model(tmp_path: Path) -> None:
    before = write_checkpoint(tmp_path).joinpath("model.safetensors").read_bytes()
    logits(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == before
