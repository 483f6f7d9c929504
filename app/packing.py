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
from app.settings import Settings
from app.startup import Prepared, prepare

if TYPE_CHECKING:
    from app.weights.pack_cache import Kept

Stage = Callable[[str], Callable[[int, int], None]]  # by name: who hears how many bytes are done, of how many


def pack(settings: Settings) -> str:
    """What became of it, in a line. Raises a `StartupError` where there is nothing to keep, or nowhere to keep it."""
    prepared = prepare(settings)
    folder = prepared.plan.pack_folder
    if folder.value is None:
        raise PlanImpossible(f"There is nothing to pack ahead. {folder.reason} Ask for --precision int4 or int8.")
    began = time.monotonic()
    with _bars() as stage:
        kept = _packed(prepared, Path(folder.value), stage)
    if kept is None:
        raise PlanImpossible(
            f"On this machine {prepared.plan.precision.value} is served by torch's own products, which pack at each start."
        )
    if kept.size is None:
        raise SettingsInvalid(f"Packed weights cannot be kept in {kept.file.parent}. cache_dir says where.")
    done = "was there already, whole" if kept.found else "written"
    return f"{kept.file}: {done}, {kept.size:,} bytes in {prepared.plan.precision.value}, {time.monotonic() - began:.1f} s"


def _packed(prepared: Prepared, folder: Path, stage: Stage) -> Kept | None:
    os.environ.update(prepared.plan.environment())  # the thread pools read it when torch is imported, which is now
    from app.backends.selection import select_backend
    from app.weights.load import pack_weights
    from app.weights.pack_cache import Packs

    backend = select_backend(prepared.plan)
    backend.configure(prepared.plan)
    packs = Packs(folder, stage("keeping packed weights"))
    return pack_weights(prepared.checkpoint, prepared.plan, backend, stage("packing weights"), packs)


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
