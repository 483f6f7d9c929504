"""Report on several result files: tables on the console, and an HTML page with plots if a folder is given."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from app.bench.compare.result import read_result
from app.bench.report.comparison import Comparison, compare
from app.bench.report.judging import Here, check_comparable
from app.bench.report.printing import print_report
from app.bench.stats import MeasurementFailed

__all__ = ["Here", "make_report"]

PAGE = "report.html"


def make_report(paths: Sequence[Path], folder: Path | None, force: bool, here: Here) -> int:
    """Make the report and return the exit status.

    Raises:
        MeasurementFailed: A file cannot be read or written, results cannot be compared, or matplotlib is missing.
    """
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise MeasurementFailed(
            "--report needs matplotlib, which is not installed: pip install 'armature[bench]', or make report."
        )
    results = [read_result(path) for path in paths]
    check_comparable(results, force)
    comparison = compare(results, here)
    written = None if folder is None else write_report(comparison, folder)  # first: the reader of the tables may close the pipe
    print_report(comparison.judged, comparison.sentences, comparison.tables)
    if written is not None:
        sys.stderr.write(f"{written} ({written.stat().st_size / 1e6:.1f} MB)\n")
    return 0


def write_report(comparison: Comparison, folder: Path) -> Path:
    """Write the page and each plot as a PNG file into `folder`. Only this needs matplotlib."""
    from app.bench.report.page import render, sections_of

    try:
        folder.mkdir(parents=True, exist_ok=True)
        sections = sections_of(comparison)
        for plot in (plot for section in sections for plot in section.plots):
            (folder / f"{plot.name}.png").write_bytes(plot.png)
        (folder / PAGE).write_text(render(comparison, sections), encoding="utf-8")
    except OSError as error:
        raise MeasurementFailed(f"the report cannot be written to {folder}: {error}.") from error
    return folder / PAGE
