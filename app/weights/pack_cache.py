"""The pack file of one checkpoint in one recipe: read if it is valid, else made and kept.

Several processes may share the folder and start at once. A pack that cannot be used or kept causes a warning and
costs the packing; it never ends a start. Damaged packs, and packs that another user could have written, are never
used.
"""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from app.kernels import compensate, equalise, int_panels, layout, rounding
from app.kernels.linear import host_architecture
from app.kernels.native import native
from app.version import VERSION
from app.weights.checkpoint import Checkpoint
from app.weights.choice import Choice, Layer
from app.weights.content import content_of
from app.weights.packed import Progress, key_in, open_pack, write_pack
from app.weights.whole_file import FileUnusable, differences, tell_unkept

log = logging.getLogger(__name__)

FORMAT = 1  # version of the blobs' layout: raise it when csrc/ops.h changes the layout of packed weights
FOLDER = "packs"
_MAKERS = (compensate, equalise, int_panels, layout, rounding)  # their source decides a weight's codes


@dataclass(frozen=True, slots=True)
class Packs:
    """The folder of pack files.

    `keeping` is called with (bytes done, bytes in total) while one is written. `mapped`: weights stay in the mapped
    file, shared with other processes, instead of being read into private memory. With huge pages (Linux, ext4), a
    product of one row takes equally long with both, and a start is several times faster.
    """

    folder: Path
    keeping: Progress
    mapped: bool = True

    def open(self, checkpoint: Checkpoint, choice: Choice, layers: Sequence[Layer]) -> Kept | None:
        """Return the pack file of these layers' weights, which may not exist yet.

        None if no layer is held in a form that can be kept.
        """
        wanted = {name: nbytes for layer in layers for name, nbytes in layer.kept_bytes()}
        if not wanted:
            return None
        began = time.monotonic()
        content = content_of(checkpoint, self.folder / FOLDER, torch.get_num_threads())
        log.debug("the checkpoint is %s (%.1f s)", content, time.monotonic() - began)
        return Kept(self, {"checkpoint": content, "choice": repr(choice), **_machine()}, wanted)


class Kept:
    """One pack file: `file` is its path, existing or not; `size` its bytes, None if not kept; `found`: it existed."""

    def __init__(self, packs: Packs, key: Mapping[str, str], wanted: Mapping[str, int]) -> None:
        """Compute the path from `key`. `wanted`: the names and bytes of the blobs that the file must contain."""
        self._packs, self.key, self._wanted = packs, key, wanted
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.file = packs.folder / FOLDER / f"{digest[:32]}.pack"
        self.size: int | None = None
        self.found = False

    def read(self, progress: Progress) -> Mapping[str, Tensor] | None:
        """Return the blobs, uint8 and all verified, or None if the weights must be packed."""
        try:
            pack = open_pack(self.file, self.key)
        except FileNotFoundError:
            self._tell_of_others()
            return None
        except (OSError, FileUnusable) as error:
            self._warn(error)
            return None
        try:
            if {name: blob.nbytes for name, blob in pack.blobs.items()} != dict(self._wanted):
                raise FileUnusable("it holds other weights")
            blobs = _read_all(self._wanted, progress, pack.mapping() if self._packs.mapped else pack.read)
            self.size, self.found = pack.size, True
            return blobs
        except (OSError, FileUnusable) as error:
            self._warn(error)
            return None
        finally:
            pack.close()

    def keep(self, blobs: Mapping[str, Tensor]) -> None:
        """Write the blobs for the next start, or log a warning."""
        try:
            self.size = write_pack(self.file, self.key, blobs, self._packs.keeping)
        except OSError as error:
            tell_unkept(self.file, "the packed weights", error)
        else:
            log.info("kept %d MiB of packed weights in %s", self.size >> 20, self.file)

    def _tell_of_others(self) -> None:
        """Log that packs of this checkpoint exist for another architecture or version.

        They are never used, and they are left for whatever made them.
        """
        others = []
        for file in self.file.parent.glob("*.pack"):
            with suppress(OSError, FileUnusable):
                others.append(key_in(file))
        differ = differences(self.key, [key for key in others if key.get("checkpoint") == self.key["checkpoint"]])
        if differ:
            log.info("packs of this model in %s differ in %s: they are not used and stay there", self.file.parent, differ)

    def _warn(self, error: Exception) -> None:
        log.warning("the packed weights in %s cannot be used (%s): packing again", self.file, error)


def _read_all(wanted: Mapping[str, int], progress: Progress, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    done, total, blobs = 0, sum(wanted.values()), {}
    with ThreadPoolExecutor(torch.get_num_threads()) as pool:
        for name, blob in zip(wanted, pool.map(read, wanted), strict=True):
            blobs[name] = blob
            done += wanted[name]
            progress(done, total)
    return blobs


def _machine() -> dict[str, str]:
    """Return the rest of the key: version, source hash, and the block layout of this instruction set level."""
    text = hashlib.sha256()
    for module in _MAKERS:
        text.update(Path(str(module.__file__)).read_bytes())
    return {
        "format": str(FORMAT),
        "version": VERSION,
        "text": text.hexdigest(),
        "architecture": host_architecture(),
        "block": str(native().block),
    }
