"""Packing on several threads has the bits of the sequential order, for every form, and no panel is written by two."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.backends.selection import select_host_backend
from app.engine.calibration.streaming import calibration_for
from app.hardware.plan.plan import make_plan
from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.weights import load as loading
from app.weights import tensor_reader
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from armature_kernels.compute_threads import ComputeThreads
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.linear.linear import Linear
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from tiny_checkpoints import write_checkpoint

pytestmark = pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")

SHAPE = {"hidden_size": 128, "intermediate_size": 300, "num_hidden_layers": 2, "head_dim": 24}


def packed(
    checkpoint: Checkpoint, precision: str, count: int, copy: str, monkeypatch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """The packed parts of each layer, packed on `count` threads from a calibration text."""

    class Counted(ComputeThreads):
        def __init__(self) -> None:
            super().__init__()
            self.count = count

    monkeypatch.setattr(loading, "ComputeThreads", Counted)
    settings = load_settings(precision=precision, int8_copy=copy, threads="1", max_model_len="64")[0]
    plan = make_plan(probe(), None, settings, checkpoint.needs(), RECIPES.keys())
    backend = select_host_backend(plan)
    before = torch.get_num_threads()
    packing = Packing(make_calibrator=lambda: calibration_for(checkpoint, plan, backend))
    model = load_model(checkpoint, plan, backend, packing=packing)
    torch.set_num_threads(before)
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    return {
        f"{'+'.join(linear.sources)}.{index}": part
        for linear in linears
        for index, part in enumerate(getattr(linear.form, "parts", ()))
    }


@pytest.mark.cases(ci=2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("precision", "copy"), [("int4", "off"), ("int4", "on"), ("int4-small", "off"), ("int8", "off")]
)
def test_threads_do_not_change_a_bit(
    tmp_path: Path, precision: str, copy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_reader, "_BLOCK_BYTES", 1)  # a panel at a time
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, **SHAPE))
    torch.set_num_threads(1)
    alone = packed(checkpoint, precision, 1, copy, monkeypatch)
    together = packed(checkpoint, precision, 4, copy, monkeypatch)
    assert alone and alone.keys() == together.keys()
    assert [name for name, part in alone.items() if not torch.equal(part, together[name])] == []


def test_outputs_that_share_a_panel_are_filled_by_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_reader, "_BLOCK_BYTES", 1)
    checkpoint = open_checkpoint(write_checkpoint(tmp_path, **SHAPE))
    reader = tensor_reader.TensorReader(checkpoint.tensors)
    linear = Linear(("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"), 128, 600)
    jobs = loading._fill_blocks(linear, reader.entries(linear.sources))
    assert [row for job in jobs for _, _, rows, first in job for row in range(first, first + len(rows))] == [
        *range(600)
    ]
    assert len(jobs) > 5 and all(job[0][-1] % PANEL_OUTPUTS == 0 for job in jobs)
