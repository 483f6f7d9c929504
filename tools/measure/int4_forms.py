"""Measure the quality of each int4 form: `python -m tools.measure.int4_forms --model DIR --text FILE --learn FILE`.

Every int4 form that is built is measured three times: with channels as they are, with channels equalized by the
weights alone (SmoothQuant), and calibrated on the second text: channels equalized by their activations (AWQ) and codes
chosen by GPTQ. The output layer and upgraded layers have eight bits, as in serving.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from app.backends.base import HostBackend
from app.backends.selection import select_backend
from app.engine.calibration.perplexity import Window, WindowScorer, read_windows
from app.engine.calibration.streaming import calibration_for
from app.engine.decoder.kv_cache import kv_dtype
from app.hardware.probe.probe import probe
from app.settings import load_settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import RECIPES
from app.weights.load import Packing, load_model
from armature_bench.engine.quality import QualityJob, loaded_weight_bytes
from armature_kernels.linear.layout import LAYOUTS
from armature_kernels.linear.linear import host_architecture

WAYS = ("as they are", "equalized", "calibrated")


def main() -> int:
    """Print a table and, in the last line, JSON."""
    arguments = _arguments()
    trial = Trial(arguments)
    exact = trial.perplexity("fp32", calibrated=False)[0]
    print(f"{arguments.model.name}, {sum(len(window) - 1 for window in trial.windows):,} tokens, FP32: {exact:.4f}\n")
    found: dict[str, Any] = {"fp32": exact}
    for form in [name for name in LAYOUTS if name.startswith(("int8/", "int4/"))]:
        for way in WAYS:
            trial.choose(form, equalise=way != WAYS[0])
            perplexity, nbytes = trial.perplexity(form.partition("/")[0], calibrated=way == WAYS[2])
            found[f"{form}, {way}"] = perplexity / exact - 1
            print(
                f"{form:<30}{way:<22}{100 * (perplexity / exact - 1):>+8.2f}%{nbytes:>9.3f} B a parameter", flush=True
            )
    print(json.dumps(found))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True, help="text to measure on")
    parser.add_argument("--learn", type=Path, required=True, help="another text, as for `armature pack --text`")
    parser.add_argument("--tokens", type=int, help="maximum number of tokens of each text")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Trial:
    """One checkpoint and two texts, measured with changing recipes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.checkpoint = open_checkpoint(arguments.model)
        self.subject = QualityJob(self.checkpoint, load_settings(threads=str(arguments.threads))[0], probe())
        tokenizer, length = Tokenizer(arguments.model), self.checkpoint.decoder.max_model_len
        self.windows: list[Window] = read_windows(tokenizer, arguments.text, length, arguments.tokens)
        plan = self.subject.plan("bf16", "auto")
        self.backend: HostBackend = select_backend(plan)
        self.backend.configure(plan)
        self.learn: Path = arguments.learn

    def choose(self, form: str, equalise: bool) -> None:
        """Use this form for its precision from now on."""
        key = ("cpu", host_architecture(), form.partition("/")[0])
        table: Any = RECIPES
        upgrade = (
            None if RECIPES[key].upgrade is None else form.replace("int4", "int8").removesuffix(" with zero points")
        )
        output = (upgrade or form,)
        table[key] = replace(RECIPES[key], linear=(form,), output=output, upgrade=upgrade, equalise=equalise)

    @torch.inference_mode()
    def perplexity(self, precision: str, calibrated: bool) -> tuple[float, float]:
        """Return the perplexity and the bytes per parameter."""
        plan = self.subject.plan(precision, "auto")
        make = partial(calibration_for, self.checkpoint, plan, self.backend, self.learn)
        packing = Packing(make_calibrator=make) if calibrated else Packing()
        model = load_model(self.checkpoint, plan, self.backend, packing=packing)
        reader = WindowScorer(model, self.checkpoint.decoder, kv_dtype(plan), self.backend)
        nats = sum(reader.score(window)[0] for window in self.windows)
        nbytes = loaded_weight_bytes(model) / self.checkpoint.needs().num_parameters
        return math.exp(nats / sum(len(window) - 1 for window in self.windows)), nbytes


if __name__ == "__main__":
    sys.exit(main())
