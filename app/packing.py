"""`armature pack`: quantize and pack the weights now and cache them, so that a start does not have to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from app.errors import PlanImpossible, SettingsInvalid
from app.hardware.plan import make_plan
from app.hardware.precision import bf16_products
from app.preparation import Prepared, prepare
from app.settings import Settings
from app.weights.opening import checkpoint_of
from app.weights.recipes import RECIPES

if TYPE_CHECKING:
    from app.backends.base import Backend
    from app.engine.hearing import Correlations
    from app.weights.pack_cache import Kept

MAX_TEXT_TOKENS = 32768  # limit on the text: more tokens change nothing (20,000 are enough for the demo)
Stage = Callable[
    [str], Callable[[int, int], None]
]  # takes a stage's name, returns its progress callback (bytes done, total bytes)


def pack(settings: Settings, text: Path | None = None) -> str:
    """Pack the weights and return one line on the result. `text` improves the 4-bit quantization (GPTQ).

    Raises:
        StartupError: There is nothing to pack, or it cannot be cached.
    """
    prepared = prepare(settings)
    folder = prepared.plan.pack_folder
    if folder.value is None:
        raise PlanImpossible(f"There is nothing to pack. {folder.reason} Use --precision int4 or int8 on a CPU.")
    if text is not None and prepared.plan.precision.value != "int4":
        raise PlanImpossible(
            f"--text only improves 4-bit quantization, not {prepared.plan.precision.value}. Use --precision int4."
        )
    os.environ.update(prepared.plan.environment())  # must be set before torch is imported: its thread pools read it then
    began = time.monotonic()
    with _bars() as stage:
        kept = _packed(prepared, Path(folder.value), stage, text)
    if kept is None:
        raise PlanImpossible(
            f"On this machine {prepared.plan.precision.value} runs on torch's matrix products, which pack the weights at each start."
        )
    if kept.size is None:
        raise SettingsInvalid(f"Packed weights cannot be written to {kept.file.parent}. Set cache_dir to a writable folder.")
    done = "already complete" if kept.found else "written"
    return f"{kept.file}: {done}, {kept.size:,} bytes in {prepared.plan.precision.value}, {time.monotonic() - began:.1f} s"


def _packed(prepared: Prepared, folder: Path, stage: Stage, text: Path | None) -> Kept | None:
    from app.backends.selection import processor
    from app.weights.load import pack_weights
    from app.weights.pack_cache import Packs

    backend = processor(prepared.plan)
    backend.configure(prepared.plan)
    correlations = None if text is None else _heard(prepared, backend, text, stage)
    packs = Packs(folder, stage("writing packed weights"))
    return pack_weights(checkpoint_of(prepared.checkpoint), prepared.plan, backend, stage("packing weights"), packs, correlations)


def _heard(prepared: Prepared, backend: Backend, text: Path, stage: Stage) -> Correlations:
    """Return the input correlations of each linear layer over the text, in the model before quantization."""
    from app.engine.hearing import correlations_of
    from app.engine.scoring import windows_of
    from app.text.tokenizer import Tokenizer

    checkpoint, facts = checkpoint_of(prepared.checkpoint), prepared.facts
    exact = prepared.settings.model_copy(update={"precision": "bf16" if bf16_products(facts) else "fp32", "kv_precision": "auto"})
    plan = make_plan(facts, None, exact, checkpoint.needs(), RECIPES.keys())
    windows = windows_of(Tokenizer(checkpoint.directory), text, checkpoint.decoder.max_model_len, MAX_TEXT_TOKENS)
    return correlations_of(checkpoint, plan, backend, windows, stage("reading the text"))


@contextmanager
def _bars() -> Iterator[Stage]:
    """Yield a function that starts a stage's progress bar on standard error; silent if that is not a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def stage(name: str) -> Callable[[int, int], None]:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage
