"""`armature pack --text`: codes that a text chose take the place of those that none did, and are what is served."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.cli.main import pack
from app.errors import PlanImpossible, SettingsInvalid
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.settings import Settings, load_settings
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from app.weights.packs import PackFolder
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Settings:
    monkeypatch.setattr("os.environ.update", lambda values: None)  # the thread pools of this process are there already
    model = write_checkpoint(tmp_path / "tiny", num_hidden_layers=1)
    return load_settings(
        model=str(model),
        precision="int4",
        int8_copy="off",
        threads="1",
        cache_dir=str(tmp_path / "cache"),
        kv_cache_bytes="16MiB",
    )[0]


@pytest.fixture
def text(tmp_path: Path) -> Path:
    file = tmp_path / "text.txt"
    file.write_text("the cat and the hen went there, and then another one\n" * 20, encoding="utf-8")
    return file


def served(settings: Settings) -> torch.Tensor:
    """The bytes of the first layer's gate and up, from the pack."""
    checkpoint = open_checkpoint(settings.checkpoint_directory)
    plan = make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())
    packs = PackFolder(Path(plan.weights.pack_folder or ""), lambda done, total: pytest.fail("it was kept before"))
    model = load_model(checkpoint, plan, CpuBackend(torch.bfloat16), packing=Packing(packs))
    panels: torch.Tensor = model.get_submodule("layers.0.mlp.gate_up").form.panels
    return panels


def test_a_text_makes_other_codes_and_they_are_served(settings, text):
    threads = torch.get_num_threads()
    assert "written" in pack(settings)
    plain = served(settings)
    assert "already complete" in pack(settings)
    assert "written" in pack(settings, text)
    shown = served(settings)
    torch.set_num_threads(threads)
    assert 0.001 < (plain != shown).float().mean() < 0.9


def test_what_a_text_cannot_do_is_refused(settings, text, tmp_path):
    with pytest.raises(PlanImpossible, match="nothing to pack"):
        pack(settings.model_copy(update={"precision": "fp32"}), text)
    with pytest.raises(SettingsInvalid, match="absent"):
        pack(settings, tmp_path / "absent.txt")
