"""Peak memory of loading: the finished weights and the largest tensor, measured in a subprocess with 170 MB."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of
from tiny_checkpoints import config_values, write_checkpoint, write_tokenizer, write_weights

SLACK_BYTES = 24 * 2**20  # thread pools, the allocator's own, code that the first product brings in
SHAPE = {
    "vocab_size": 16384,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 64,
    "torch_dtype": "bfloat16",
}

PROBE = """
import json, sys, torch
from pathlib import Path
from loaded_models import load, load_on
from armature_kernels.linear.linear import FORMS, QUANTIZED_FORMS, Linear
from app.weights import form_choice
from app.weights.forms import Recipe
def high_water():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
directory, dtype, *forms = sys.argv[1:]
for name in forms:  # what the first packing brings in is not the weights'
    packing = (FORMS | QUANTIZED_FORMS)[name]
    if packing.supports(512, 512, getattr(torch, dtype)):
        packing.pack(torch.ones(512, 512, dtype=getattr(torch, dtype)), None).multiply(torch.ones(1, 512, dtype=getattr(torch, dtype)))
if not forms:  # nor what torch brings in for its "meta" device
    load_on(Path(directory).with_name("small"), dtype, place="meta")
else:
    form_choice.find_recipe = lambda *key: Recipe(tuple(forms), equalise=True)
before = high_water()
model = load(Path(directory), dtype) if forms else load_on(Path(directory), dtype, place="meta")
held = [module.form.nbytes for module in model.modules() if isinstance(module, Linear)]
print(json.dumps({"peak": high_water() - before, "held": sum(held), "largest": max(held)}))
"""


@pytest.fixture(scope="module")
def large_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("large") / "large"
    folder.mkdir()
    values = config_values(**SHAPE)
    (folder / "config.json").write_text(json.dumps(values))
    shapes = tensors_of(ModelConfig.from_hf(values))
    write_weights(folder, {name: torch.full(shape, 0.01, dtype=torch.bfloat16) for name, shape in shapes.items()})
    write_tokenizer(folder)
    write_checkpoint(folder.with_name("small"))
    return folder


@pytest.mark.cases(ci=2)
@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's high water mark from /proc")
@pytest.mark.parametrize("forms", ["plain", "onednn plain", "panels onednn plain", "int4/64 plain"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.nightly), "bfloat16"])
def test_loading_peaks_at_the_final_bytes_and_one_tensor(large_checkpoint: Path, dtype: str, forms: str) -> None:
    measured = loaded(large_checkpoint, dtype, *forms.split())
    assert measured["peak"] <= measured["held"] + measured["largest"] + SLACK_BYTES, measured


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads the process's high water mark from /proc")
def test_the_host_holds_a_few_megabytes_of_what_lies_on_a_device(large_checkpoint: Path) -> None:
    """Torch's "meta" device takes no memory of the host, as a GPU's."""
    measured = loaded(large_checkpoint, "bfloat16")
    assert measured["held"] > 120 * 2**20 and measured["peak"] <= SLACK_BYTES, measured


def loaded(directory: Path, dtype: str, *forms: str) -> dict[str, int]:
    """What a process of its own measured; without forms, it loads into the memory of a device."""
    environment = {
        "PYTHONPATH": os.pathsep.join(map(str, sys.path)),
        "OMP_NUM_THREADS": "1",
        "PATH": "/usr/bin:/bin",
        "HOME": str(Path.home()),
    }
    command = [sys.executable, "-c", PROBE, str(directory), dtype, *forms]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    measured: dict[str, int] = json.loads(done.stdout)
    return measured
