"""The commands for models of Hugging Face's hub: fetch one, list those in the hub's cache, and remove them."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.errors import CheckpointInvalid, ModelUnavailable, SettingsInvalid
from app.hardware.decision import format_bytes, format_count
from app.server.model_source import is_offline
from app.server.start_console import StartConsole
from app.settings import Settings
from app.weights.files import unreadable_message
from app.weights.hub.cache import (
    MAIN,
    CachedRevision,
    HubName,
    cache_directory,
    cached_revisions,
    find_snapshot,
    is_complete,
    parse_hub_name,
    remove_revisions,
)
from app.weights.hub.fetch import fetch_model
from app.weights.hub.refusals import offline_message, suggestions
from app.weights.open import open_model

_SHORT_COMMIT = 12  # digits of a commit in a table


def pull_model(settings: Settings) -> str:
    """Fetch the newest commit of the model as far as needed, and return one line. Raises `StartupError`."""
    name = _required_name(str(settings.model))
    if is_offline(settings):
        raise ModelUnavailable(offline_message(name))
    # Log lines are this command's only output while it fetches, so they have no time and level.
    logging.basicConfig(level=settings.log_level.upper(), format="armature pull: %(message)s", stream=sys.stderr)
    with closing(StartConsole(first_seconds=0)) as console:
        snapshot = fetch_model(name, console.show)
    path = snapshot / name.file
    if not name.file:
        open_model(path)  # a file that the index names may lack a tensor
    files = [file for file in snapshot.rglob("*") if file.is_file()]
    size = format_bytes(sum(file.stat().st_size for file in files))
    return f"{name} at {snapshot.name[:_SHORT_COMMIT]}: {format_count(len(files), 'file')}, {size}, in {path}"


@dataclass(frozen=True, slots=True)
class _ListedModel:
    """A model of the cache, with the reason why it cannot be served, or an empty string."""

    revision: CachedRevision
    refusal: str


def list_models(as_json: bool) -> None:
    listed = [_ListedModel(one, _refusal(one)) for one in cached_revisions()]
    if as_json:
        models = [_to_json(one) for one in listed]
        print(json.dumps({"cache": str(cache_directory()), "models": models}))
        return
    if not listed:
        print(
            f"The hub's cache ({cache_directory()}) has no models. armature pull ORG/NAME fetches one.", file=sys.stderr
        )
        return
    table = Table(header_style="bold", box=None, padding=(0, 2, 0, 0))
    for column in ("name", "revision", "size", "files", "can be served"):
        table.add_column(column, overflow="fold", justify="right" if column in ("size", "files") else "left")
    for one in listed:
        revision = one.revision
        refs = ", ".join((*revision.refs, revision.commit[:_SHORT_COMMIT]))
        size, count = format_bytes(revision.size_bytes), str(revision.num_files)
        table.add_row(revision.repo_id, refs, size, count, f"no: {one.refusal}" if one.refusal else "yes")
    Console().print(table)


def _to_json(one: _ListedModel) -> dict[str, object]:
    revision = one.revision
    return {
        "name": revision.repo_id,
        "commit": revision.commit,
        "refs": list(revision.refs),
        "bytes": revision.size_bytes,
        "files": revision.num_files,
        "path": str(revision.path),
        "servable": not one.refusal,
        "refusal": one.refusal,
    }


def _refusal(revision: CachedRevision) -> str:
    """Return why a snapshot cannot be served; empty if it can, which takes reading its headers."""
    gguf = sorted(file.name for file in revision.path.glob("*.gguf"))
    if gguf and not (revision.path / "config.json").exists():
        return f"name a file, {revision.name}:{gguf[0]}"
    try:
        open_model(revision.path)
    except CheckpointInvalid as error:
        is_partial = find_snapshot(revision.name) is not None and _lacks_files(revision.name)
        return f"files are missing; armature pull {revision.name} fetches them" if is_partial else error.message
    return ""


def _lacks_files(name: HubName) -> bool:
    try:
        return not is_complete(name)
    except CheckpointInvalid:
        return False


def remove_models(texts: Sequence[str], is_confirmed: bool) -> int:
    """Remove models from the hub's cache, after asking, and return the exit status. Raises `SettingsInvalid`."""
    chosen = [each for text in texts for each in _chosen_revisions(_required_name(text))]
    chosen = list(dict.fromkeys(chosen))
    for one in chosen:
        print(f"{one.name}, {format_bytes(one.size_bytes)}, {one.path}", file=sys.stderr)
    if not is_confirmed and not _confirm(len(chosen)):
        print("Nothing was removed.", file=sys.stderr)
        return 1
    for repo_id in dict.fromkeys(one.repo_id for one in chosen):
        commits = [one.commit for one in chosen if one.repo_id == repo_id]
        try:
            remove_revisions(repo_id, commits)
        except OSError as error:
            raise SettingsInvalid(unreadable_message(Path(error.filename or cache_directory()), error)) from error
    print(f"removed {format_count(len(chosen), 'revision')} from {cache_directory()}")
    return 0


def _chosen_revisions(name: HubName) -> list[CachedRevision]:
    own = [one for one in cached_revisions() if one.repo_id == name.repo_id]
    if name.revision != MAIN:
        own = [one for one in own if name.revision in (*one.refs, one.commit)]
    if own:
        return own
    known = suggestions(name.repo_id)
    raise SettingsInvalid(
        f"{name} is not in the hub's cache ({cache_directory()}).{known} armature list shows what is."
    )


def _confirm(count: int) -> bool:
    if not sys.stdin.isatty():
        raise SettingsInvalid("armature rm asks before it removes files, and there is no terminal: give --yes.")
    print(f"Remove {format_count(count, 'revision')} with their files? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _required_name(text: str) -> HubName:
    name = parse_hub_name(Path(text))
    if name is None:
        raise SettingsInvalid(
            f"{text} is no name of a model on the hub: give ORG/NAME, ORG/NAME@REVISION or ORG/NAME:FILE.gguf.{suggestions(text)}"
        )
    return name
