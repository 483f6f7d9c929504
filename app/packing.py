"""`armature pack`: weights are quantised and packed now, so that no start has to. A bar for people, then what became of it."""

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

MAX_TEXT_TOKENS = 32768  # read of a text: more shows nothing new (20,000 are enough for the demo)
Stage = Callable[[str], Callable[[int, int], None]]  # by name: who hears how many bytes are done, of how many


def pack(settings: Settings, text: Path | None = None) -> str:
    """What became of it, in a line; `text` shows which codes are best. Raises a `StartupError` where nothing can be kept."""
    prepared = prepare(settings)
    folder = prepared.plan.pack_folder
    if folder.value is None:
        raise PlanImpossible(f"There is nothing to pack ahead. {folder.reason} Ask for --precision int4 or int8, on a processor.")
    if text is not None and prepared.plan.precision.value != "int4":
        raise PlanImpossible(
            f"A text makes better codes of four bits, not of {prepared.plan.precision.value}. Ask for --precision int4."
        )
    os.environ.update(prepared.plan.environment())  # the thread pools read it when torch is imported, which is now
    began = time.monotonic()
    with _bars() as stage:
        kept = _packed(prepared, Path(folder.value), stage, text)
    if kept is None:
        raise PlanImpossible(
            f"On this machine {prepared.plan.precision.value} is served by torch's own products, which pack at each start."
        )
    if kept.size is None:
        raise SettingsInvalid(f"Packed weights cannot be kept in {kept.file.parent}. cache_dir says where.")
    done = "was there already, whole" if kept.found else "written"
    return f"{kept.file}: {done}, {kept.size:,} bytes in {prepared.plan.precision.value}, {time.monotonic() - began:.1f} s"


def _packed(prepared: Prepared, folder: Path, stage: Stage, text: Path | None) -> Kept | None:
    from app.backends.selection import processor
    from app.weights.load import pack_weights
    from app.weights.pack_cache import Packs

    backend = processor(prepared.plan)
    backend.configure(prepared.plan)
    correlations = None if text is None else _heard(prepared, backend, text, stage)
    packs = Packs(folder, stage("keeping packed weights"))
    return pack_weights(checkpoint_of(prepared.checkpoint), prepared.plan, backend, stage("packing weights"), packs, correlations)


def _heard(prepared: Prepared, backend: Backend, text: Path, stage: Stage) -> Correlations:
    """What the text shows of the model as it is before it is rounded."""
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
    """One bar a stage, on standard error; quiet where that is no terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bars:

        def stage(name: str) -> Callable[[int, int], None]:
            task = bars.add_task(name, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage
