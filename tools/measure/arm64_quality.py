"""Measure int8 and int4 on emulated 64-bit Arm: `python -m tools.measure.arm64_quality --model DIR`.

The text, the exact perplexity and the packed weights come from this x86 machine, since packing under emulation takes an
hour. The emulated processors read the packed weights in their own layout, and compute the rest: products, attention,
norms and logits. The table compares them with this machine's results on the same tokens. It takes some minutes for each
processor and precision. `tools/arm64.sh` installs the emulator.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from app.backends.base import HostBackend
from app.backends.selection import select_host_backend
from app.engine.calibration.perplexity import Window, WindowScorer, read_windows
from app.engine.calibration.streaming import calibration_for
from app.engine.decoder.kv_cache import kv_dtype
from app.hardware.plan.plan import ServingPlan
from app.hardware.probe.probe import probe
from app.settings import Settings
from app.text.tokenizer import Tokenizer
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.form_choice import FormChoice, LayerPacking
from app.weights.load import Model, Packing, load_model
from app.weights.packs import PackFile, PackFolder, read_key
from armature_bench.engine.quality import REFERENCE, PrecisionScore, QualityJob
from armature_kernels.linear.int_panels import IntPanelLinear
from armature_kernels.linear.layout import PANEL_OUTPUTS
from armature_kernels.linear.linear import Linear
from armature_kernels.linear.row_split import RowSplitLinear
from armature_kernels.native.library import native_library

ROOT = Path(__file__).resolve().parents[2]
PRECISIONS = ("int8", "int4")
CPUS = ("neoverse-v1", "neoverse-n1")
_X86_BLOCK, _EIGHT = 4, 8  # adjacent inputs of an output in a panel: of every x86 level, and of the level i8mm

Result = dict[str, Any]  # the fields of `_result`, by precision


def main() -> int:
    """Print the table; with `--emulated`, write the results of this processor to a file instead."""
    arguments = _arguments()
    if arguments.emulated is not None:
        _measure_here(json.loads(arguments.emulated.read_text()), arguments.emulated)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        job = _x86_job(arguments, Path(folder))
        results = {f"x86, {native_library().level}": job["results"]}
        for cpu in arguments.cpu or CPUS:
            file = Path(folder, f"{cpu}.json")
            file.write_text(json.dumps(job))
            command = ["tools/arm64.sh", "python", "-m", "tools.measure.arm64_quality", "--emulated", str(file)]
            subprocess.run(["env", f"CPU={cpu}", *command], cwd=ROOT, check=True)
            found = json.loads(file.read_text())
            results[f"{cpu}, {found['level']}"] = found["results"]
    print(table(results))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="checkpoint directory of a decoder")
    parser.add_argument("--text", type=Path, help="the text; default: Python's documentation")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of the text; default 512")
    parser.add_argument("--precision", action="append", help=f"only this precision; default: {', '.join(PRECISIONS)}")
    parser.add_argument("--cpu", action="append", help=f"only this processor of QEMU; default: {', '.join(CPUS)}")
    parser.add_argument("--cache-dir", type=Path, help="folder of packed weights; default: the server's")
    parser.add_argument("--emulated", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.model is None and arguments.emulated is None:
        parser.error("--model is required")
    return arguments


# ---- on x86 ----------------------------------------------------------------------------------------------------------


class _RememberedPacks(PackFolder):
    """A pack folder that keeps the path of the last pack that was opened."""

    path: Path

    def open(self, checkpoint: Checkpoint, choice: FormChoice, layers: Sequence[LayerPacking]) -> PackFile | None:
        """Open it as usual."""
        pack = PackFolder.open(self, checkpoint, choice, layers)
        if pack is not None:
            object.__setattr__(self, "path", pack.file)
        return pack


def _x86_job(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Return what the emulated processors need: the windows, the packs, and the results of this machine."""
    checkpoint = open_checkpoint(arguments.model)
    assert isinstance(checkpoint, Checkpoint), "the model must be a decoder"
    windows = read_windows(
        Tokenizer(checkpoint.directory), arguments.text, checkpoint.decoder.max_model_len, arguments.tokens
    )
    settings = Settings() if arguments.cache_dir is None else Settings(cache_dir=arguments.cache_dir)
    reader = _Reader(checkpoint, settings, windows)
    results, packs = {REFERENCE: _result(reader.score(REFERENCE, None))}, {}
    for precision in arguments.precision or PRECISIONS:
        kept = _RememberedPacks(settings.cache_dir or Path.home() / ".cache" / "armature", lambda done, total: None)
        results[precision] = _result(reader.score(precision, kept))
        packs[precision] = str(kept.path)
    return {"model": str(checkpoint.directory), "windows": windows, "packs": packs, "results": results}


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads the windows with one precision after the other."""

    checkpoint: Checkpoint
    settings: Settings
    windows: Sequence[Window]

    def score(self, precision: str, packs: PackFolder | None) -> PrecisionScore:
        """Return the results of a precision, whose packed weights are in a folder."""
        say(f"{precision}: loading")
        plan = QualityJob(self.checkpoint, self.settings, probe()).plan(precision, "auto")
        backend = select_host_backend(plan)
        backend.configure(plan)
        model = self._load(plan, backend, packs)
        if isinstance(packs, _ForeignPack):
            convert_panels(model)
        score, scorer = PrecisionScore(), WindowScorer(model, self.checkpoint.decoder, kv_dtype(plan), backend)
        with torch.inference_mode():
            for number, window in enumerate(self.windows, 1):
                say(f"{precision}: window {number} of {len(self.windows)}")
                score.add_window(*scorer.score(window))
        return score

    def _load(self, plan: ServingPlan, backend: HostBackend, packs: PackFolder | None) -> Model:
        def calibrator() -> Any:
            assert not isinstance(packs, _ForeignPack), "the pack of the other machine cannot be used"
            return calibration_for(self.checkpoint, plan, backend)

        return load_model(self.checkpoint, plan, backend, packing=Packing(packs, calibrator))


def _result(score: PrecisionScore) -> Result:
    return {"nats": sum(score.nats), "likeliest": torch.cat(score.likeliest).tolist()}


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# ---- on the emulated processor ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _ForeignPack(PackFolder):
    """Gives one pack of an x86 machine, whatever is asked for."""

    file: Path = Path()

    def open(self, checkpoint: Checkpoint, choice: FormChoice, layers: Sequence[LayerPacking]) -> PackFile:
        """Return the pack; its blobs have the names and sizes that this machine's would have."""
        pack = PackFile(self, read_key(self.file))
        pack.file = self.file
        return pack


def _measure_here(job: dict[str, Any], file: Path) -> None:
    checkpoint = open_checkpoint(Path(job["model"]))
    assert isinstance(checkpoint, Checkpoint), "the other process has opened it"
    reader = _Reader(checkpoint, Settings(), job["windows"])
    results = {}
    for precision, pack in job["packs"].items():
        foreign = _ForeignPack(Path(pack).parent, lambda done, total: None, mapped=False, file=Path(pack))
        results[precision] = _result(reader.score(precision, foreign))
    file.write_text(json.dumps({"level": native_library().level, "results": results}))


def convert_panels(model: nn.Module) -> None:
    """Bring the integer panels of an x86 machine into the layout of this processor's level, in place."""
    if native_library().block == _X86_BLOCK:
        return
    forms = {id(module.form): module.form for module in model.modules() if isinstance(module, Linear)}
    for form in forms.values():
        parts = form.forms if isinstance(form, RowSplitLinear) else (form,)
        for part in parts:
            assert isinstance(part, IntPanelLinear), "every layer is quantized"
            convert(part)


def convert(form: IntPanelLinear) -> None:
    """Reorder the codes of a form from blocks of 4 inputs to blocks of 8 (csrc/ops.h), in place."""
    layout, groups = form.packing.layout, form.padded // form.group
    panels = form.panels.view(-1, layout.panel_bytes(form.inputs))
    group_codes = form.group * PANEL_OUTPUTS * form.packing.bits // 8
    if layout.double_quantized:  # all scales come first
        codes = panels[:, panels.shape[1] - groups * group_codes :]
    else:  # each group has its scales before its codes
        codes = panels.view(len(panels), groups, -1)[:, :, -group_codes:]
    eights = codes.unflatten(-1, (-1, _EIGHT * PANEL_OUTPUTS * form.packing.bits // 8))
    eights.copy_(_eight_bits(eights) if form.packing.bits == 8 else _four_bits(eights))


def _eight_bits(codes: Tensor) -> Tensor:
    """Reorder codes [..., 256] of 8 inputs: [input / 4, half, output, input % 4] becomes [half, output, input]."""
    return codes.unflatten(-1, (2, 2, 16, 4)).movedim(-4, -2).flatten(-4)


def _four_bits(codes: Tensor) -> Tensor:
    """Reorder codes [..., 128] of 8 inputs.

    [half, output, input % 4] with the second four inputs in the high bits becomes [half, output % 8, input] with the
    second eight outputs in the high bits.
    """
    bytes_ = codes.unflatten(-1, (2, 16, 4))
    inputs = torch.cat((bytes_ & 15, bytes_ >> 4), -1)  # [..., half, output, input]
    return (inputs[..., :8, :] | inputs[..., 8:, :] << 4).flatten(-3)


# ---- the table -------------------------------------------------------------------------------------------------------


def table(results: Mapping[str, Mapping[str, Result]]) -> str:
    """Return a Markdown table.

    Args:
        results: Results by precision of each processor, of which the first is this machine, with FP32.
    """
    here = next(iter(results.values()))
    exact = here[REFERENCE]
    tokens = len(exact["likeliest"])
    rows = [
        f"{tokens:,} tokens",
        "",
        "| processor, level | precision | perplexity over FP32 | same most likely token as FP32 | as x86 |",
        "|---|---|---|---|---|",
    ]
    for name, found in results.items():
        for precision, result in found.items():
            if precision != REFERENCE:
                ratio = torch.tensor((result["nats"] - exact["nats"]) / tokens, dtype=torch.float64).exp().item()
                shares = (_agreement(result, exact), _agreement(result, here[precision]))
                rows.append(f"| {name} | {precision} | {ratio:.4f} | {shares[0]:.1%} | {shares[1]:.1%} |")
    return "\n".join(rows)


def _agreement(one: Result, other: Result) -> float:
    pairs = list(zip(one["likeliest"], other["likeliest"], strict=True))
    return sum(mine == theirs for mine, theirs in pairs) / len(pairs)


if __name__ == "__main__":
    sys.exit(main())
