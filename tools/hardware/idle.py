"""Measure the idle time of a device in a decode step.

`python -m tools.hardware.idle --model DIR --rows 64 --json FILE`. Idle time means that the host limits the device. The
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
from pathlib import Path
from typing import Any

from app.server.prepare import Prepared, prepare
from app.settings import Settings

REPLAYS = 50
STEPS = 100


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.hardware.idle", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    prepared = prepare(Settings(model=str(asked.model), calibrate="off", precision="bf16"))
    os.environ.update(prepared.plan.environment())  # before torch is imported
    if prepared.plan.placement.device == "cpu":
        print(f"idle: {prepared.plan.decisions['device'].reason}", file=sys.stderr)
        return 1
    asked.json.write_text(json.dumps(measured(prepared, asked.rows)), encoding="utf-8")
    return 0


def measured(prepared: Prepared, rows: int) -> dict[str, Any]:
    """Return the median seconds of the device's step, of the engine's step, and of the host's work without waiting."""
    import torch

    from app.engine.build import BuildRequest
    from app.engine.decoder.build import build_device_decoder_engine
    from app.engine.decoder.cuda_graphs import GraphShape
    from app.engine.decoder.device_inputs import SamplingMode
    from app.weights.checkpoint import Checkpoint
    from armature_bench.engine.driver import DecoderDriver
    from armature_bench.http.workload import TokenPrompts

    checkpoint, plan = prepared.checkpoint, prepared.plan
    assert isinstance(checkpoint, Checkpoint), "a decoder's"
    built = build_device_decoder_engine(BuildRequest(checkpoint, plan))
    driver = DecoderDriver(
        built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), plan.memory.max_model_len
    )
    with torch.inference_mode():
        steps = driver.decode(rows, STEPS)
        captured = built.runner.graphs.captured.get(GraphShape(rows, SamplingMode.GREEDY))
        if captured is None:
            return {
                "rows": rows,
                "step_seconds": statistics.median(steps),
                "reason": built.runner.graphs.reason or "not captured",
            }
        built.backend.synchronize()
        began = time.perf_counter()
        for _ in range(REPLAYS):
            captured.replay()
        built.backend.synchronize()
        device = (time.perf_counter() - began) / REPLAYS
    step = statistics.median(steps)
    return {"rows": rows, "step_seconds": step, "device_seconds": device, "idle": max(0.0, 1 - device / step)}


if __name__ == "__main__":
    sys.exit(main())
