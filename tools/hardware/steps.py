"""Measure decode steps of one engine on a device: its idle time, sampling with rules, a long context, a first token.

`python -m tools.hardware.steps --model DIR --rows 64 --json FILE`. Idle time means that the host limits the device. The
device's own time is that of a captured step replayed many times in a row. The step time is the engine's, from one step
to the next, including the host's work. The difference is idle time that was not hidden.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.hardware.facts import CudaDevice
from app.hardware.probe.probe import probe
from app.messages import Abort, Generate, SamplingParams
from app.server.model_source import open_or_fetch_model
from app.server.prepare import Prepared, prepare, with_kept_calibration
from app.settings import Settings
from armature_bench.http.workload import TokenPrompts
from tools.hardware.table import RULES, STEPS
from tools.install import ROOT

if TYPE_CHECKING:
    from app.engine.decoder.engine import DecoderEngine

REPLAYS, PROMPT_TOKENS, FIRST_TOKEN_PROMPT, FIRST_TOKENS = 50, 128, 512, 5


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hardware.steps", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--simulated", action="store_true", help="few steps on the simulated device of the tests")
    asked = parser.parse_args()
    few = {"max_batch_tokens": 256, "max_running_seqs": 8} if asked.simulated else {}  # and so few shapes of steps
    settings = Settings(model=str(asked.model), calibrate="off", precision="bf16", speculation="off", **few)
    prepared = simulated(settings) if asked.simulated else prepare(settings)
    os.environ.update(prepared.plan.environment())  # before torch is imported
    asked.json.write_text(json.dumps(measured(prepared, asked.rows, 8 if asked.simulated else STEPS)), encoding="utf-8")
    return 0


def simulated(settings: Settings) -> Prepared:
    """Prepare a start on the device that a processor simulates, which is on the path of the tests."""
    sys.path.append(str(ROOT / "tests" / "support"))
    facts, (module, backends) = probe(), map(import_module, ("simulated_device", "app.backends.selection"))
    backends.DEVICE_BACKENDS["cuda"] = module.SimulatedDeviceBackend
    assert facts.torch is not None, "torch is installed"
    gpu = CudaDevice(0, "a simulated GPU", (9, 0), facts.usable_bytes // 4)
    facts = replace(facts, cuda=(gpu,), torch=replace(facts.torch, cuda="13.0"))
    return with_kept_calibration(facts, settings, open_or_fetch_model(settings))


class Steps:
    """Runs requests of random prompts on an engine and times its steps."""

    def __init__(self, engine: DecoderEngine, prompts: TokenPrompts, num_steps: int) -> None:
        self._engine, self._prompts, self._names, self._num_steps = engine, prompts, count(), num_steps

    def decode(self, rows: int, context: int = PROMPT_TOKENS, **params: Any) -> float:
        """Return the median seconds of steps of so many rows, of which the first has these parameters and context."""
        names = [self._add(context, params), *(self._add(PROMPT_TOKENS, {}) for _ in range(rows - 1))]
        seconds: list[float] = []
        while len(seconds) < self._num_steps:
            elapsed, stats = self._step()
            if stats.decode_tokens == rows and not stats.prefill_tokens:
                seconds.append(elapsed)
        for name in names:
            self._engine.abort(Abort(name))
        return statistics.median(seconds)

    def first_token(self) -> float:
        """Return the least seconds from a request to its first token."""
        found = []
        for _ in range(FIRST_TOKENS):
            name, began = self._add(FIRST_TOKEN_PROMPT, {}), time.perf_counter()
            self._step()
            found.append(time.perf_counter() - began)
            self._engine.abort(Abort(name))
        return min(found)

    def _add(self, tokens: int, params: Mapping[str, Any]) -> str:
        name = str(next(self._names))
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": 4 * STEPS, **params})
        self._engine.add(Generate(name, tuple(self._prompts.prompt(tokens)), sampling, arrived_at=0.0))
        return name

    def _step(self) -> tuple[float, Any]:
        began = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - began, self._engine.stats


def measured(prepared: Prepared, rows: int, num_steps: int) -> dict[str, Any]:
    """Return the seconds of the engine's step and of the device's, and how much longer steps with a rule take."""
    import torch

    from app.engine.build import BuildRequest
    from app.engine.decoder.build import build_device_decoder_engine
    from app.engine.sampling.rows import SamplingTensors, sample_random, tensor_columns
    from app.weights.checkpoint import Checkpoint

    def sampling(num_rows: int) -> float:
        device = built.backend.device
        logits = 3 * torch.randn(num_rows, checkpoint.decoder.vocab_size, dtype=torch.bfloat16, device=device)
        columns = tensor_columns([SamplingParams(**RULES["top_k and top_p"])] * num_rows, device)
        drawing = SamplingTensors(columns, torch.rand(num_rows, dtype=torch.float64, device=device))
        return replay_seconds(built.backend, built.backend.capture(lambda: sample_random(logits, drawing)))

    checkpoint, plan = prepared.checkpoint, prepared.plan
    assert isinstance(checkpoint, Checkpoint), "a decoder's"
    built = build_device_decoder_engine(BuildRequest(checkpoint, plan))
    built.engine.use_idle_time(lambda: False)  # all steps are captured
    steps = Steps(built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), num_steps)
    with torch.inference_mode():
        step = steps.decode(rows)
        # Now: a replay reads the inputs of the last step, and these are of its shape.
        found = device_time(built, rows, step)
        rules = {name: steps.decode(rows, **params) / step for name, params in RULES.items()}
        longest = plan.memory.max_model_len - 4 * STEPS
        return found | {
            "rows": rows,
            "step_seconds": step,
            "rules": rules,
            "long_context": steps.decode(rows, longest) / step,
            "first_token_seconds": steps.first_token(),
            "sampling_seconds": {str(num_rows): sampling(num_rows) for num_rows in (1, 64)},
        }


def device_time(built: Any, rows: int, step: float) -> dict[str, Any]:
    """Return the device's seconds of the captured step that ran last, and its idle time, or the reason why not."""
    shape = built.runner.shapes.find(rows, PROMPT_TOKENS)
    captured = None if shape is None else built.runner.graphs.captured.get(shape)
    if captured is None:
        return {"reason": built.runner.graphs.reason or "not captured"}
    device = replay_seconds(built.backend, captured)
    return {"device_seconds": device, "idle": max(0.0, 1 - device / step)}


def replay_seconds(backend: Any, captured: Any) -> float:
    backend.synchronize()
    began = time.perf_counter()
    for _ in range(REPLAYS):
        captured.replay()
    backend.synchronize()
    return (time.perf_counter() - began) / REPLAYS


if __name__ == "__main__":
    sys.exit(main())
