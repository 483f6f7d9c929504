"""Build, test and measure on this machine's device in less than eight minutes: `python -m tools.hardware [--write]`.

It is the check of a GPU that continuous integration does not have. It runs commands that a person could run: the tests
of kernels and of parity on the device, `armature bench engine` and `bench http` with checkpoints of real shapes and
synthetic weights, and steps of every kind (`steps.py`). `--write` puts the table into docs/hardware.md, again after each
part, so that what was found stays whenever the run ends. `--dry-run` runs everything with tiny shapes on any machine.
That shows that the script works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console

from app.hardware.probe.probe import probe
from armature_bench.published import models
from armature_bench.published.models import BERT_LARGE, PublishedModel, model_folder
from tools.hardware.table import markdown, placed, rows_of
from tools.install import ROOT

LLAMA_1B, LLAMA_8B = (
    replace(each, config={**each.config, "max_position_embeddings": 8192})
    for each in (models.LLAMA_1B, models.LLAMA_8B)
)
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
_SMALL_HEADS = {"num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 640}
SMALL_LLAMA = PublishedModel("small-llama", "a small Llama", {**LLAMA_1B.config, **_SMALL, **_SMALL_HEADS})
SMALL_BERT = PublishedModel("small-bert", "a small BERT", {**BERT_LARGE.config, **_SMALL})
DOCUMENT = ROOT / "docs" / "hardware.md"
MINUTES = 8.0
HTTP_LOAD = "--concurrency 1,64,256 --num-requests 512 --max-tokens 128"
# Kernels against their reference implementations, checks that need hardware, and whole models of every architecture
# against FP32 on the CPU.
_PARITY = "tests/device/test_parity.py"
# Tests marked `full` there compile for GPUs that are not in this machine.
_TESTS = {
    "kernels": ("-m", "not full", "tests/parity/gpu", "tests/device", f"--ignore={_PARITY}"),
    "parity": (_PARITY,),
}
_DRY = {"kernels": ("-k", "rms_norm"), "parity": ()}  # on a CPU Triton's interpreter takes minutes for all tests
_TESTS_SHARE = 0.4  # share of the time for tests; the rest is for measurements
_TEST_PROCESSES = 8
_LEAST_SECONDS = 20.0  # a part that has less time left is not started


@dataclass(slots=True)
class Run:
    """The folder, the deadline, the results by part, and the reason for each part without a result."""

    folder: Path
    deadline: float
    console: Console
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    why: dict[str, str] = field(default_factory=dict)
    save: Callable[[], None] = lambda: None

    def measure(self, part: str, command: Sequence[str]) -> None:
        """Run a command that writes its result to the file after `--json`, and save what was found so far."""
        file = self.folder / f"{part}.json"
        with self.console.status(f"{part} …"):
            if self.command(part, [*command, "--json", str(file)]) is not None:
                self.results[part] = json.loads(file.read_text(encoding="utf-8"))
        self.save()

    def command(self, part: str, arguments: Sequence[str], share: float = 1.0) -> str | None:
        """Run a command and return its output.

        None if it failed or exceeded its share of the remaining time; `why` then has the reason.
        """
        left = share * (self.deadline - time.monotonic())
        if left < _LEAST_SECONDS:
            self.why[part] = "no time was left"
            return None
        began = time.monotonic()
        try:
            done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=left, check=False)
        except subprocess.TimeoutExpired:
            self.why[part] = f"took more than {left:.0f} s"
            return None
        self.console.print(f"{part}: {time.monotonic() - began:.0f} s, status {done.returncode}")
        if done.returncode:
            last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
            self.why[part] = f"failed: {last[0] if last else done.returncode}"
            self.console.print(
                f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}", style="red", markup=False, highlight=False
            )
            return None
        return done.stdout


def main() -> int:
    """Return 0 if every check that was possible holds, and 1 if a target was missed or a part failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.hardware", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="run with tiny shapes on this machine, whatever it has")
    parser.add_argument("--write", action="store_true", help="put the table into docs/hardware.md")
    parser.add_argument("--minutes", type=float, default=MINUTES, help=f"maximum minutes (default {MINUTES:g})")
    parser.add_argument(
        "--keep", type=Path, metavar="DIR", help="folder in which the checkpoints are written and kept (20 GB)"
    )
    asked = parser.parse_args()
    if not asked.dry_run and not (probe().cuda or probe().mps):
        print(
            "hardware: this machine has no NVIDIA or Apple GPU; --dry-run tries the script without one.",
            file=sys.stderr,
        )
        return 2
    with tempfile.TemporaryDirectory(prefix="armature-hardware-") as temporary:
        run = Run(asked.keep or Path(temporary), time.monotonic() + 60 * asked.minutes, Console(stderr=True))
        if asked.write:
            run.save = lambda: write(run, asked.dry_run)
        try:
            checked_and_measured(run, asked.dry_run)
        except KeyboardInterrupt:
            print("hardware: stopped; the results so far:", file=sys.stderr)
    rows = rows_of(run.results, run.why)
    print(markdown(about(run, asked.dry_run), rows))
    run.save()
    missed = [row for row in rows if row.holds is False]
    return 1 if run.why or (missed and not asked.dry_run) else 0  # of a dry run no figure counts


def write(run: Run, dry: bool) -> None:
    table = markdown(about(run, dry), rows_of(run.results, run.why))
    DOCUMENT.write_text(placed(DOCUMENT.read_text(encoding="utf-8"), table), encoding="utf-8")


def checked_and_measured(run: Run, dry: bool) -> None:
    """Run the tests and write the checkpoints in parallel, then measure.

    Tests of kernels mostly compile on one core of the host, so whole models are tested meanwhile. Nothing is timed
    before all of that is done.
    """
    shapes = (SMALL_LLAMA, SMALL_BERT) if dry else (LLAMA_1B, LLAMA_8B, BERT_LARGE)
    with ThreadPoolExecutor(len(_TESTS)) as pool:
        tested = [pool.submit(test, run, part, dry) for part in _TESTS]
        with run.console.status("tests on the device, and checkpoints of synthetic weights …"):
            for made in shapes:
                model_folder(made, run.folder)
            for one in tested:
                one.result()
    benches(run, dry)


def test(run: Run, part: str, dry: bool) -> None:
    """Run the tests of kernels against their references, or of the engine on the device against the CPU."""
    parallel = ["-n", str(_TEST_PROCESSES)] if find_spec("xdist") and not dry else []
    pytest = [sys.executable, *"-m pytest -q -p no:cacheprovider".split(), *parallel]
    command = [*pytest, *_TESTS[part], *(_DRY[part] if dry else ())]
    told = run.command(part, command, share=_TESTS_SHARE)
    if told is not None:
        run.results[part] = {"passed": _counted(told, "passed"), "skipped": _counted(told, "skipped")}


def benches(run: Run, dry: bool) -> None:
    """Run each bench in its own process, which releases the device's memory."""
    llama, large, bert = (SMALL_LLAMA, SMALL_LLAMA, SMALL_BERT) if dry else (LLAMA_1B, LLAMA_8B, BERT_LARGE)
    few = ["--device", "cpu", "--rounds", "1", "--rows", "1", "--steps", "2"] if dry else []
    for made, precision, part in (
        (llama, "bf16", "llama-1b bf16"),
        (large, "bf16", "llama-8b bf16"),
        (large, "int4", "llama-8b int4"),
        (large, "int8" if dry else "fp8", "llama-8b fp8"),  # processors have no FP8
        (bert, "bf16", "bert-large bf16"),
    ):
        model = ["--model", str(run.folder / made.name), "--precision", precision]
        bench = [sys.executable, *"-m app bench engine --calibrate off".split()]
        run.measure(part, [*bench, *model, *few])
        if part == "llama-1b bf16":
            steps(run, dry)
            http(run, dry)


def steps(run: Run, dry: bool) -> None:
    model = str(run.folder / (SMALL_LLAMA if dry else LLAMA_1B).name)
    few = ["--simulated", "--rows", "4"] if dry else []
    run.measure("steps", [sys.executable, "-m", "tools.hardware.steps", "--model", model, *few])


def http(run: Run, dry: bool) -> None:
    """Measure a server that the benchmark starts."""
    model = str(run.folder / (SMALL_LLAMA if dry else LLAMA_1B).name)
    load = "--concurrency 2 --num-requests 4 --max-tokens 8" if dry else HTTP_LOAD
    device = ["--device", "cpu"] if dry else []
    bench = [sys.executable, *"-m app bench http --calibrate off --precision bf16 --model".split(), model]
    run.measure("http", [*bench, *load.split(), *device])


def about(run: Run, dry: bool) -> list[str]:
    facts = probe()
    devices = ", ".join(f"{gpu.name} (driver {gpu.driver})" for gpu in facts.cuda) or (
        "Apple GPU" if facts.mps else "none"
    )
    torch = facts.torch.version if facts.torch else "none"
    day = datetime.now(UTC).date().isoformat()
    checked = "; ".join(
        f"{part}: {found['passed']} passed, {found['skipped']} skipped"
        for part, found in run.results.items()
        if "passed" in found
    )
    trouble = [f"- {part}: {why}" for part, why in run.why.items()]
    dryness = ["**A dry run: tiny shapes, no device. The figures say nothing.**", ""] if dry else []
    what = f"{day}; device: {devices}; host: {facts.cpu.name}; torch {torch}. Tests: {checked or 'none'}."
    return [*dryness, *textwrap.wrap(what, 120), *trouble]


def _counted(told: str, word: str) -> int:
    found = re.search(rf"(\d+) {word}", told)
    return int(found[1]) if found else 0


if __name__ == "__main__":
    sys.exit(main())
