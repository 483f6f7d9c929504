"""Members of a `.pt2` archive (torch.export.save).

JSON and raw tensors are read; archives that need pickles are refused. torch's loader is not used, since it
unpickles and evaluates the text of expressions. Torch is not needed here.
"""

from __future__ import annotations

import json
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.models.program_graph import dtype_name, read_size
from app.weights.files import remedy

_MAX_JSON_BYTES = 256 * 2**20  # limit for a graph: a thousand layers take about ten megabytes
# Exceptions of zipfile for damaged files: ValueError for names that are not text, RuntimeError for unknown versions
# and ciphers.
_DAMAGE_ERRORS = (OSError, EOFError, ValueError, RuntimeError, zipfile.BadZipFile)
_SAVE_AGAIN = "Save it again with torch.export.save of torch 2.10 or newer"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in the archive: a strided view of the elements of `member`."""

    member: str
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    @property
    def num_elements(self) -> int:
        """Number of elements of the view; 0 if a dimension is 0."""
        number = 1
        for size in self.shape:
            number *= size
        return number

    @property
    def min_member_elements(self) -> int:
        """Number of elements that the member must have at least."""
        if not self.num_elements:
            return 0
        return self.offset + sum((size - 1) * stride for size, stride in zip(self.shape, self.strides, strict=True)) + 1


class Archive:
    """An open archive; no member is compressed, so the sizes in the directory are the sizes of the data."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except _DAMAGE_ERRORS as error:
            raise CheckpointInvalid(
                f"{path.name} is not an archive of torch.export.save: {error}. {remedy(path)}"
            ) from error
        members = self._zip.infolist()
        roots = {member.filename.partition("/")[0] for member in members}
        if len(roots) != 1:
            raise CheckpointInvalid(f"{path.name} is not an archive of torch.export.save: it has {len(roots)} roots.")
        if any(member.compress_type != zipfile.ZIP_STORED for member in members):
            raise CheckpointInvalid(f"{path.name} is compressed, which torch.export.save does not do. {_SAVE_AGAIN}.")
        self._root = roots.pop()
        self._sizes = {member.filename.removeprefix(f"{self._root}/"): member.file_size for member in members}

    def close(self) -> None:
        """Close the file."""
        self._zip.close()

    def names(self, folder: str) -> list[str]:
        """Return the members below a folder, without the folder's name, sorted."""
        return sorted(name.removeprefix(folder) for name in self._sizes if name.startswith(folder))

    def has(self, name: str) -> bool:
        """Return True if the archive has this member."""
        return name in self._sizes

    def size(self, name: str) -> int:
        """Return the bytes of a member."""
        return self._sizes[name]

    def read(self, name: str) -> bytes:
        """Return a member's bytes; their checksum is verified."""
        if name not in self._sizes:
            raise CheckpointInvalid(f"{self.path.name} has no {name}. {_SAVE_AGAIN}.")
        try:
            return self._zip.read(f"{self._root}/{name}")
        except _DAMAGE_ERRORS as error:
            raise CheckpointInvalid(f"{self.path.name}: {name} is damaged: {error}.") from error

    def read_json(self, name: str) -> Mapping[str, Any]:
        """Return a member that is a JSON object."""
        if self._sizes.get(name, 0) > _MAX_JSON_BYTES:
            raise CheckpointInvalid(f"{self.path.name}: {name} is larger than the limit for a graph.")
        try:
            values = json.loads(self.read(name))
        except (ValueError, RecursionError) as error:
            raise CheckpointInvalid(f"{self.path.name}: {name} is not JSON: {error}.") from error
        if not isinstance(values, dict):
            raise CheckpointInvalid(f"{self.path.name}: {name} is not a JSON object.")
        return values

    def stored_tensors(self, kind: str, model: str) -> dict[str, StoredTensor]:
        """Return the tensors of `kind` (weights or constants) by name.

        Raises:
            CheckpointInvalid: A tensor could be read only by running code.
        """
        folder = f"data/{kind}/"
        if self.has(f"{folder}{model}.pt"):
            raise CheckpointInvalid(
                f"{self.path.name}: its {kind} are a pickle, which can run code when read. {_SAVE_AGAIN}."
            )
        config = self.read_json(f"{folder}{model}_{kind}_config.json").get("config")
        if not isinstance(config, dict):
            raise CheckpointInvalid(f"{self.path.name}: the list of {kind} is damaged.")
        return {name: self._stored(folder, name, entry) for name, entry in config.items()}

    def _stored(self, folder: str, name: str, entry: Any) -> StoredTensor:
        if not isinstance(entry, dict) or entry.get("use_pickle") or not isinstance(entry.get("tensor_meta"), dict):
            raise CheckpointInvalid(
                f"{self.path.name}: {name} is stored as a pickle, which can run code when "
                f"read. Only plain tensors are served. {_SAVE_AGAIN}"
                ", without custom objects or tensor subclasses."
            )
        try:
            meta, member = entry["tensor_meta"], folder + str(entry["path_name"])
            sizes, strides = ([_static_size(size) for size in meta[what]] for what in ("sizes", "strides"))
            stored = StoredTensor(
                member, dtype_name(meta["dtype"]), tuple(sizes), tuple(strides), _static_size(meta["storage_offset"])
            )
            enough = stored.min_member_elements * _ITEM_BYTES[stored.dtype] <= self._sizes.get(
                member, 0 if stored.min_member_elements == 0 else -1
            )
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointInvalid(f"{self.path.name}: the description of {name} is damaged: {error!r}.") from error
        if not enough or len(sizes) != len(strides):
            raise CheckpointInvalid(f"{self.path.name}: {member} is missing, or too short for {name} of shape {sizes}.")
        return stored


_ITEM_BYTES: Mapping[str, int] = {
    **dict.fromkeys(("uint8", "int8", "bool"), 1),
    **dict.fromkeys(("int16", "float16", "bfloat16"), 2),
    **dict.fromkeys(("int32", "float32"), 4),
    **dict.fromkeys(("int64", "float64"), 8),
}


def _static_size(size: Mapping[str, Any]) -> int:
    number = read_size(size)
    if not isinstance(number, int) or number < 0:
        raise ValueError(f"the size {number!r} of a stored tensor is not a number >= 0")
    return number
