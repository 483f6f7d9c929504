"""Eager and recorded steps of one engine: each mode is switched on for its samples, and all are compared with FP32."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

import app
from app.cli.parser import parse_arguments
from app.engine.decoder.cpu_runner import DecoderReplay
from app.weights.checkpoint import Checkpoint
from app.weights.open import open_model
from armature_bench.engine import compiled
from armature_bench.engine.compiled import torch_steps
from armature_bench.engine.driver import DecoderDriver
from armature_bench.engine.recording import EAGER, RECORDED, ReplayMode, _figures
from armature_bench.flags import TORCH_DTYPES
from armature_bench.published.models import GEMMA_1B, model_folder


class Paced:
    """A driver whose steps take as long as they do while the replay is as it is."""

    def __init__(self, replay: Any) -> None:
        self.replay = replay

    def decode(self, rows: int, steps: int) -> list[float]:
        return [0.004 * rows if self.replay.reason else 0.001 * rows] * steps


def test_ways_take_turns_on_one_engine() -> None:
    replay = SimpleNamespace(reason="")
    driver = cast(DecoderDriver, Paced(replay))
    ways = [
        ReplayMode(name, how, driver, cast(DecoderReplay, replay))
        for name, how in (("int4", EAGER), ("int4", RECORDED), ("fp32", EAGER))
    ]
    for _ in range(2):
        for way in ways:
            way.measure(8)
    found = list(_figures(ways, (8,)))
    assert [figure.name for figure in found] == [
        "decode ×8, int4, eager",
        "decode ×8, int4, recorded",
        "decode ×8, fp32, eager",
    ]
    assert [figure.ratio for figure in found] == [1.0, 4.0, 1.0]
    assert [round(figure.parts["tok/s"]) for figure in found] == [250, 1000, 250]


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    assert "needs a C++ compiler at run time, and none of g++, clang++" in (compiled.missing_compiler() or "")
    monkeypatch.setenv("CXX", "my-compiler")
    assert "CXX=my-compiler is not found" in (compiled.missing_compiler() or "")
    monkeypatch.setattr(compiled.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert compiled.missing_compiler() is None


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_torch_steps_have_the_shapes_of_the_checkpoint(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile is replaced by its backend that runs the graph as it is: no compiler is needed."""
    checkpoint = open_model(Path(app.__file__).parent / "demo" / kind)
    real = torch.compile
    monkeypatch.setattr(torch, "compile", lambda module, **options: real(module, backend="eager", **options))
    steps = list(torch_steps(checkpoint, (1, 2), ("fp32", "bf16")))
    assert [(step.name, step.rows) for step in steps] == [("fp32", 1), ("fp32", 2), ("bf16", 1), ("bf16", 2)]
    assert isinstance(checkpoint, Checkpoint)
    config = checkpoint.decoder if kind == "llama" else checkpoint.encoder
    with torch.inference_mode():
        result = steps[1].module(*steps[1].inputs)
        assert isinstance(result, torch.Tensor)
        assert result.shape[0] == 2 and result.shape[-1] == (
            config.vocab_size if kind == "llama" else config.hidden_size
        )
        figures = list(compiled.measure_torch_steps(iter(steps[:1]), rounds=1, can_compile=True))
        alone = list(compiled.measure_torch_steps(iter(steps[:1]), rounds=1, can_compile=False))
    assert [figure.name for figure in figures] == ["step ×1, fp32, torch eager", "step ×1, fp32, torch.compile"]
    assert figures[1].parts["seconds to compile"] > 0
    assert [figure.name for figure in alone] == ["step ×1, fp32, torch eager"], "eager steps need no compiler"
    assert [step.name for step in torch_steps(checkpoint, (1,), ("fp32",))] == ["fp32"]


def test_the_dtypes_of_the_command_line_are_those_of_the_bench() -> None:
    assert tuple(compiled.DTYPES) == TORCH_DTYPES
    assert parse_arguments(["bench", "eager", "--dtypes", "bf16"]).dtypes == ("bf16",)
    with pytest.raises(SystemExit):
        parse_arguments(["bench", "eager", "--dtypes", "fp16"])


def test_torch_steps_have_the_activation_of_the_checkpoint(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 300, "head_dim": 32}
    model = replace(GEMMA_1B, config={**GEMMA_1B.config, **sizes, "num_attention_heads": 2})
    step = next(torch_steps(open_model(model_folder(model, tmp_path)[0]), (1,), ("fp32",)))
    assert isinstance(step.module, compiled.DecodeStep)
    gated, activation = list[torch.Tensor](), step.module.activation
    step.module.activation = lambda x: (gated.append(x), activation(x))[1]
    with torch.inference_mode():
        step.module(*step.inputs)
        assert torch.equal(activation(gated[0]), torch.nn.functional.gelu(gated[0], approximate="tanh"))
