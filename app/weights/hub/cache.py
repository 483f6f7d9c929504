"""The hub's cache on this machine: names of models, which it has, which files a model needs. Nothing is fetched.

Its layout is models--ORG--NAME/snapshots/COMMIT/FILE, where each file is a link to models--ORG--NAME/blobs/HASH;
models--ORG--NAME/refs/BRANCH has the branch's commit (Hugging Face's documentation of huggingface_hub).
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

from app.errors import CheckpointInvalid
from app.weights.checkpoint import INDEX, PICKLE_PATTERNS, SINGLE_FILE, shard_names
from app.weights.files import join_names, read_optional, read_text
from app.weights.sentence_transformers import MODULES, read_modules

MAIN = "main"  # the branch that a name without a revision refers to
# The hub's rule for a name: letters, digits, - _ and ., at most 96 characters (huggingface_hub, validate_repo_id).
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"(?P<repo_id>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<file>[^:]+\.gguf))?", re.ASCII)

_ADDRESS = re.compile(rf"(?:https?:/+[^/]+|hf:)/+(?P<repo_id>{_PART}/{_PART})(?:[/@?#]|$)", re.ASCII)
_FOLDER = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")
_MAX_REF_BYTES = 1024  # of a file with a commit
_COMMIT = re.compile(r"[0-9a-f]{40}")
CONFIG = "config.json"
_TOKENIZER, _TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
# Files that say which others are needed; they are fetched first.
METADATA = (CONFIG, MODULES, INDEX, _TOKENIZER_CONFIG)
# Read if tokenizer_config.json is of an older version, which does not list all added tokens.
_TOKEN_FILES = ("special_tokens_map.json", "added_tokens.json")
_TEXT_FILES = (
    _TOKENIZER,
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "config_sentence_transformers.json",
    "sentence_*_config.json",
)
_GGUF_PART = re.compile(r"(?P<stem>.+)-\d{5}-of-(?P<count>\d{5})\.gguf")  # one of several files, as llama.cpp splits


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub: ORG/NAME, a branch, tag or commit hash, and a GGUF file of it or an empty string."""

    repo_id: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        revision = "" if self.revision == MAIN else f"@{self.revision}"
        return f"{self.repo_id}{revision}{f':{self.file}' if self.file else ''}"


def parse_hub_name(path: Path) -> HubName | None:
    """Return the hub's name that a setting `model` has; None if it can only be a path or another name."""
    found = _NAME.fullmatch(str(path))
    if found is None:
        return None
    name = HubName(found["repo_id"], found["revision"] or MAIN, found["file"] or "")
    parts = [*name.revision.split("/"), *(name.file.split("/") if name.file else ())]
    leads_elsewhere = any(part in ("", ".", "..") for part in parts)  # both are parts of paths in the cache
    is_refused = leads_elsewhere or ".." in name.repo_id or "--" in name.repo_id or name.repo_id.endswith(".git")
    return None if is_refused else name


def name_in_address(path: Path) -> str:
    """Return the name ORG/NAME in the address of a model's page, which `Path` has shortened; empty for anything else."""
    found = _ADDRESS.match(str(path))
    return found["repo_id"] if found is not None else ""


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
        return HubName(self.repo_id, MAIN if MAIN in self.refs else next(iter(self.refs), self.commit))


def library_constants() -> ModuleType:
    """Import the values that huggingface_hub takes from its variables, with its telemetry off by default.

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
    return cache_directory() / f"models--{repo_id.replace('/', '--')}"


def find_snapshot(name: HubName) -> Path | None:
    """Return the folder of a model's files in the cache; None if the cache does not have this revision."""
    return _snapshot_in(model_folder(name.repo_id), name.revision)


def model_of_folder(folder: Path) -> tuple[HubName, Path] | None:
    """Return the model of a cache's folder `models--ORG--NAME` or of a snapshot in it, and the snapshot.

    A model's snapshot is that of `main` or the only one. None for any other folder.
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
    """Return True if the cache is known to have every file that serving needs. Raises `CheckpointInvalid`."""
    snapshot = find_snapshot(name)
    listing = None if snapshot is None else read_listing(name.repo_id, snapshot.name)
    if snapshot is None or listing is None:
        return False
    return all((snapshot / file).exists() for file in needed_files(name, listing, snapshot))


def cached_revisions() -> list[CachedRevision]:
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
    """Remove snapshots of a model, with the files that no other snapshot uses. Raises `OSError`."""
    from huggingface_hub import scan_cache_dir

    scan_cache_dir(cache_directory()).delete_revisions(*commits).execute()
    folder = model_folder(repo_id)
    with suppress(FileNotFoundError):
        if not any((folder / "snapshots").iterdir()):
            shutil.rmtree(folder)
    if any((folder / "snapshots" / commit).exists() for commit in commits):
        raise PermissionError(13, os.strerror(13), str(folder))


def cached_names() -> list[str]:
    folders = cache_directory().glob("models--*--*/snapshots")
    return sorted(
        f"{found['org']}/{found['name']}" for each in folders if (found := _FOLDER.fullmatch(each.parent.name))
    )


def needed_files(name: HubName, listing: Collection[str], snapshot: Path) -> list[str]:
    """Return the files that serving a model needs, in the order of fetching.

    While some of `METADATA` is missing in `snapshot`, only that is returned. Raises `CheckpointInvalid` if files of
    `listing` are missing, or of a kind that is not served.
    """
    if name.file:
        return _gguf_files(name, listing)
    if CONFIG not in listing:
        return [_only_program(name, listing)]
    metadata = [file for file in METADATA if file in listing]
    if not all((snapshot / file).exists() for file in metadata):
        return metadata
    if _TOKENIZER not in listing:
        raise CheckpointInvalid(f"{name} has no {_TOKENIZER}, which serving needs.")
    lists_tokens = "added_tokens_decoder" in read_optional(snapshot / _TOKENIZER_CONFIG)
    texts = [
        file
        for pattern in (_TEXT_FILES if lists_tokens else (*_TEXT_FILES, *_TOKEN_FILES))
        for file in sorted(listing)
        if fnmatch(file, pattern) and file.count("/") == pattern.count("/")
    ]
    folders = [one.folder for one in read_modules(snapshot) if one.folder] if MODULES in listing else []
    configs = [file for folder in folders if (file := f"{folder}/{CONFIG}") in listing]
    weights = [file for folder in folders for file in _weights(name, listing, folder)]
    return [*metadata, *texts, *configs, *weights, *_model_weights(name, listing, snapshot)]


def _matches(file: str, pattern: str) -> bool:
    """Return True if a file's path matches a pattern, whose stars stand for names within a folder."""
    return fnmatch(file, pattern) and file.count("/") == pattern.count("/")


def _model_weights(name: HubName, listing: Collection[str], snapshot: Path) -> list[str]:
    if INDEX in listing:
        files = shard_names(snapshot)
        missing = [file for file in files if file not in listing]
        if missing:
            raise CheckpointInvalid(f"{name}: {INDEX} names files that the hub does not have: {join_names(missing)}.")
        return files
    files = _weights(name, listing, "")
    if not files:
        raise CheckpointInvalid(f"{name} has no weights: no *.safetensors file.{_gguf_note(name, listing)}")
    return files


def _weights(name: HubName, listing: Collection[str], folder: str) -> list[str]:
    own = sorted(file for file in listing if file.rpartition("/")[0] == folder)
    tensors = [file for file in own if file.endswith(".safetensors")]
    single = f"{folder}/{SINGLE_FILE}" if folder else SINGLE_FILE
    if single in tensors:
        return [single]
    if len(tensors) > 1:
        raise CheckpointInvalid(f"{name} has {len(tensors)} *.safetensors files and no {INDEX} to join them.")
    pickles = [file for file in own if any(fnmatch(Path(file).name, pattern) for pattern in PICKLE_PATTERNS)]
    if pickles and not tensors:
        raise CheckpointInvalid(
            f"{name} has pickled weights only ({join_names(pickles)}), which can run code when read: they are not fetched."
            " Look for a revision (@refs/pr/N) or another model with *.safetensors files."
        )
    return tensors


def _only_program(name: HubName, listing: Collection[str]) -> str:
    programs = [file for file in listing if file.endswith((".pt2", ".onnx")) and "/" not in file]
    if len(programs) == 1:
        return programs[0]
    if "adapter_config.json" in listing:
        raise CheckpointInvalid(
            f"{name} is an adapter, which is not served alone: give its base model with --model, and --lora NAME=DIR with its directory."
        )
    raise CheckpointInvalid(f"{name} has no {CONFIG}, so it is no model that is served.{_gguf_note(name, listing)}")


def _gguf_note(name: HubName, listing: Collection[str]) -> str:
    found = sorted(file for file in listing if file.endswith(".gguf"))
    return f" Of its GGUF files one is given as {name}:{found[0]} (it has {join_names(found)})." if found else ""


def _gguf_files(name: HubName, listing: Collection[str]) -> list[str]:
    if name.file not in listing:
        found = sorted(file for file in listing if file.endswith(".gguf"))
        has = f"it has {join_names(found)}" if found else "it has no GGUF file"
        raise CheckpointInvalid(f"{name.repo_id} has no file {name.file}: {has}.")
    part = _GGUF_PART.fullmatch(name.file)
    if part is None:
        return [name.file]
    stem, count = part["stem"], part["count"]
    return [f"{stem}-{number:05}-of-{count}.gguf" for number in range(1, int(count) + 1)]
