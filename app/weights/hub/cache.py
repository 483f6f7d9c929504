"""The hub's cache on this machine: which models it has, where their files are, and removing them. Nothing is fetched.

Its layout is models--ORG--NAME/snapshots/COMMIT/FILE, where each file is a link to models--ORG--NAME/blobs/HASH;
models--ORG--NAME/refs/BRANCH has the branch's commit (Hugging Face's documentation of huggingface_hub).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from app.errors import CheckpointInvalid
from app.weights.files import read_text
from app.weights.hub.names import MAIN, HubName
from app.weights.hub.needed_files import needed_files

_FOLDER = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")
_MAX_REF_BYTES = 1024  # of a file with a commit
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class CachedRevision:
    """A snapshot in the cache: its branches and tags, and the size of its files in bytes."""

    repo_id: str
    commit: str
    refs: tuple[str, ...]
    size_bytes: int
    num_files: int
    path: Path

    @property
    def name(self) -> HubName:
        """Name by which `--model` finds this snapshot."""
        return HubName(self.repo_id, MAIN if MAIN in self.refs else next(iter(self.refs), self.commit))


def library_constants() -> ModuleType:
    """Import the values that huggingface_hub takes from its variables, with its telemetry off unless its variable says else.

    This comes before any other import of the library, which reads the variables once.
    """
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from huggingface_hub import constants

    return constants


def cache_directory() -> Path:
    """Return the folder of the hub's cache, as HF_HUB_CACHE, HF_HOME or the library's default says."""
    return Path(library_constants().HF_HUB_CACHE)


def library_is_offline() -> bool:
    """Return True if huggingface_hub's own variable HF_HUB_OFFLINE forbids to fetch."""
    return bool(library_constants().is_offline_mode())


def model_folder(repo_id: str) -> Path:
    """Return the folder of a model in the cache, which may not exist."""
    return cache_directory() / f"models--{repo_id.replace('/', '--')}"


def find_snapshot(name: HubName) -> Path | None:
    """Return the folder of a model's files in the cache; None if the cache does not have this revision."""
    return _snapshot_in(model_folder(name.repo_id), name.revision)


def model_of_folder(folder: Path) -> tuple[HubName, Path] | None:
    """Return the model of a cache's folder `models--ORG--NAME` or of a snapshot in it, and the snapshot.

    The snapshot of the former is that of `main` or the only one. None for any other folder.
    """
    real = folder.resolve()
    is_snapshot = real.parent.name == "snapshots"
    found = _FOLDER.fullmatch(real.parent.parent.name if is_snapshot else real.name)
    if found is not None and is_snapshot:
        return HubName(f"{found['org']}/{found['name']}", real.name), folder
    if found is None or not (folder / "snapshots").is_dir():
        return None
    snapshot = _snapshot_in(folder, MAIN)
    if snapshot is None:
        snapshots = [each for each in (folder / "snapshots").iterdir() if each.is_dir()]
        if len(snapshots) != 1:
            return None
        snapshot = snapshots[0]
    return HubName(f"{found['org']}/{found['name']}"), snapshot


def _snapshot_in(folder: Path, revision: str) -> Path | None:
    commit = revision
    if not _COMMIT.fullmatch(revision):
        try:
            commit = read_text(folder / "refs" / revision, _MAX_REF_BYTES).strip()
        except (OSError, CheckpointInvalid):
            return None
    snapshot = folder / "snapshots" / commit
    return snapshot if _COMMIT.fullmatch(commit) and snapshot.is_dir() else None


def read_listing(repo_id: str, commit: str) -> Mapping[str, int] | None:
    """Return the files that a model has on the hub, with their bytes; None if the cache does not know."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(repo_id, revision=commit, cache_dir=cache_directory())
    except CachedRepoTreeNotFoundError:
        return None
    return {file.path: file.size for file in tree}


def is_complete(name: HubName) -> bool:
    """Return True if the cache has every file that serving a model needs.

    False if it does not know the files that the model has on the hub, as after a download by an older library.

    Raises:
        CheckpointInvalid: The model's files are of a kind that is not served.
    """
    snapshot = find_snapshot(name)
    listing = None if snapshot is None else read_listing(name.repo_id, snapshot.name)
    if snapshot is None or listing is None:
        return False
    return all((snapshot / file).exists() for file in needed_files(name, listing, snapshot))


def cached_revisions() -> list[CachedRevision]:
    """Return the models of the cache, sorted by name."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        repos = scan_cache_dir(cache_directory()).repos
    except CacheNotFound:
        return []
    found = [
        CachedRevision(
            repo.repo_id,
            revision.commit_hash,
            tuple(sorted(revision.refs)),
            revision.size_on_disk,
            revision.nb_files,
            revision.snapshot_path,
        )
        for repo in repos
        if repo.repo_type == "model"
        for revision in repo.revisions
    ]
    return sorted(found, key=lambda one: (one.repo_id.lower(), MAIN not in one.refs, one.commit))


def remove_revisions(repo_id: str, commits: list[str]) -> None:
    """Remove snapshots of a model, with the files that no other snapshot uses.

    Raises:
        OSError: A file cannot be removed.
    """
    from huggingface_hub import scan_cache_dir

    scan_cache_dir(cache_directory()).delete_revisions(*commits).execute()
    folder = model_folder(repo_id)
    with suppress(FileNotFoundError):
        if not any((folder / "snapshots").iterdir()):
            shutil.rmtree(folder)
    if any((folder / "snapshots" / commit).exists() for commit in commits):
        raise PermissionError(13, os.strerror(13), str(folder))


def cached_names() -> list[str]:
    """Return the names of the models in the cache, without looking at their files."""
    folders = cache_directory().glob("models--*--*/snapshots")
    return sorted(
        f"{found['org']}/{found['name']}" for each in folders if (found := _FOLDER.fullmatch(each.parent.name))
    )
