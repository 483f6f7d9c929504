"""Fetching a model from the hub into its cache, by `huggingface_hub`: the only code that opens a connection.

The library honours its own variables (HF_ENDPOINT, HF_TOKEN, ...), resumes broken downloads and checks sizes. This
module chooses the files, reports progress, and checks their hashes.
"""

from __future__ import annotations

import hashlib
import logging
import re
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, cast

from app.errors import CheckpointInvalid, FetchFailed, ModelUnavailable
from app.hardware.decision import format_bytes
from app.hardware.imports import only_errors_logged
from app.metrics.load_progress import LoadProgress
from app.weights.checkpoint import read_model_config
from app.weights.files import join_names
from app.weights.hub.cache import (
    CONFIG,
    METADATA,
    HubName,
    cache_directory,
    find_snapshot,
    library_constants,
    needed_files,
    read_listing,
)
from app.weights.hub.refusals import refusals_of

log = logging.getLogger(__name__)
# Their lines have addresses with signatures, and their failures become our errors.
_REQUEST_LOGGERS = ("httpx2", "httpcore2", "huggingface_hub")

ReportFetch = Callable[[LoadProgress], None]

_WEIGHTS = (".safetensors", ".pt2", ".onnx", ".gguf")
_DISK_RESERVE = 64 * 2**20  # bytes that stay free: the cache's file system is often that of the log and of packs
_ABANDONED_SECONDS = 3600.0  # without a new byte; the library gives up after five waits of 10 s
_HASHED_BYTES = 8 * 2**20  # bytes hashed between two reports
_GIT_HASH, _SHA256 = re.compile(r"[0-9a-f]{40}"), re.compile(r"[0-9a-f]{64}")


def fetch_model(name: HubName, report: ReportFetch) -> Path:
    """Fetch the files of a model that are not in the cache yet, and return the folder that has them.

    `report` may raise to stop; complete files are kept. Raises `ModelUnavailable` if the hub does not have the model,
    or not for this token, or the disk is too small; `FetchFailed` if the hub cannot be reached, or a file arrived
    damaged; `CheckpointInvalid` if the model cannot be served.
    """
    library_constants()
    with only_errors_logged(*_REQUEST_LOGGERS), refusals_of(name):
        snapshot = _fetch_metadata(name)
        fetching = _Fetching(name, snapshot, report)
        _remove_abandoned(snapshot)
        fetching.check_model()
        fetching.fetch([file for file in fetching.needed if not file.endswith(_WEIGHTS)])
        if not name.file and CONFIG in fetching.needed:
            read_model_config(snapshot)  # a model that is not supported is refused before its weights are fetched
        fetching.fetch(fetching.needed)
    return snapshot


def _fetch_metadata(name: HubName) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    found = HfApi().model_info(name.repo_id, revision=name.revision)
    snapshot = snapshot_download(
        name.repo_id,
        revision=name.revision,
        cache_dir=cache_directory(),
        allow_patterns=list(METADATA),
        tqdm_class=cast(Any, _bytes_counter(lambda count: None)),
    )
    folder = Path(snapshot)
    if found.sha != folder.name:
        raise FetchFailed(f"{name} changed on the hub while it was read. Try again.")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _remove_abandoned(snapshot: Path) -> None:
    """Remove files that a process which was killed left half fetched; the library never continues them."""
    for file in (snapshot.parent.parent / "blobs").glob("*.incomplete"):
        with suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > _ABANDONED_SECONDS:
                file.unlink()


class _Fetching:
    """Fetches files of one snapshot and reports the bytes of all that it still lacks."""

    def __init__(self, name: HubName, snapshot: Path, report: ReportFetch) -> None:
        self.name, self.snapshot, self._report = name, snapshot, report
        listing = read_listing(name.repo_id, snapshot.name)
        if listing is None:
            raise FetchFailed(f"The list of the files of {name} cannot be kept in {cache_directory()}.")
        self._listing: Mapping[str, int] = listing
        self.needed = needed_files(name, listing, snapshot)
        self._total_bytes = sum(listing.get(file, 0) for file in self._missing(self.needed))
        self._done_bytes, self._began = 0, time.monotonic()

    def _missing(self, files: list[str]) -> list[str]:
        return [file for file in files if not (self.snapshot / file).exists()]

    def check_model(self) -> None:
        absent = [file for file in self.needed if file not in self._listing]
        if absent:
            raise CheckpointInvalid(f"{self.name} lacks files on the hub: {join_names(absent)}.")
        free = shutil.disk_usage(self.snapshot).free
        if self._total_bytes + _DISK_RESERVE > free:
            raise ModelUnavailable(
                f"{self.name} needs {format_bytes(self._total_bytes)} more in {cache_directory()}, and {format_bytes(free)}"
                " are free there. Remove models (armature list, armature rm), or set HF_HUB_CACHE to a larger disk."
            )

    def fetch(self, files: list[str]) -> None:
        """Fetch those of these files that are missing, one after the other, and check each."""
        from huggingface_hub import hf_hub_download

        for file in self._missing(files):
            before = self._done_bytes
            path = hf_hub_download(
                self.name.repo_id,
                file,
                revision=self.snapshot.name,
                cache_dir=cache_directory(),
                tqdm_class=cast(Any, _bytes_counter(self._add_bytes)),
            )
            self._done_bytes = before + self._listing[file]
            self._check_hash(Path(path))

    def _add_bytes(self, count: int) -> None:
        self._done_bytes += count
        elapsed, done = time.monotonic() - self._began, min(self._done_bytes, self._total_bytes)
        self._report(LoadProgress(f"fetching {self.name}", done, self._total_bytes, elapsed_seconds=elapsed))

    def _check_hash(self, path: Path) -> None:
        """Remove a file whose hash (SHA-256 if large, else Git's SHA-1) is not the name of its blob."""
        blob = path.resolve()
        size = blob.stat().st_size
        if _SHA256.fullmatch(blob.name):
            digest = hashlib.sha256()
        elif _GIT_HASH.fullmatch(blob.name):
            digest = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
        else:  # a cache without links does not keep the hash
            return
        with blob.open("rb") as stream:
            while part := stream.read(_HASHED_BYTES):
                digest.update(part)
                self._add_bytes(0)  # the file is fetched, and a stop is noticed meanwhile
        if digest.hexdigest() != blob.name:
            path.unlink(missing_ok=True)  # another process that fetched it too may have been faster
            blob.unlink(missing_ok=True)
            raise FetchFailed(
                f"{path.name} of {self.name} arrived damaged: its hash is not the one that the hub states. It was removed;"
                " try again. If it happens again, a proxy changes what it passes on."
            )


def _bytes_counter(add: Callable[[int], None]) -> type:
    """Return a class that huggingface_hub uses for its progress bars, and that only passes on the number of bytes."""

    class BytesCounter:
        """Has the methods of tqdm that the library calls. The one for bytes of the network makes it need no second bar."""

        total, n = 0, 0

        def __init__(self, *positional: object, **options: object) -> None: ...

        def __enter__(self) -> BytesCounter:
            return self

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
        ) -> None: ...

        def update(self, count: float | None = 1) -> None:
            add(int(count or 0))

        def update_transfer(self, count: float | None = 1) -> None: ...

        def _ignore(self, *positional: object, **options: object) -> None: ...

        close = refresh = set_description = set_description_str = set_postfix_str = set_transfer_postfix_str = _ignore

    return BytesCounter


def fetch_or_use_cached(name: HubName, report: ReportFetch) -> Path:
    """Fetch a model, or return its files in the cache if the hub cannot be reached. Raises as `fetch_model`."""
    try:
        return fetch_model(name, report)
    except FetchFailed as error:
        snapshot = find_snapshot(name)
        if snapshot is None or read_listing(name.repo_id, snapshot.name) is not None:
            raise
        log.warning("%s The files in the cache are used, although the hub may have more.", error.message)
        return snapshot
