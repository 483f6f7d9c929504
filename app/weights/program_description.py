"""What a program's own TOML file says of its tensors: inputs that are pictures, and files with labels of outputs.

`resnet18.toml` lies beside `resnet18.pt2`:

    [pictures.image]                # the name of an input
    resize = 256                    # of the shorter side; the middle of the picture is cut out
    crop = [224, 224]               # rows and columns, if the input's own are free
    mean = [0.485, 0.456, 0.406]    # of the values from 0 to 1
    std = [0.229, 0.224, 0.225]
    interpolation = "bilinear"      # or "nearest", "bicubic"

    [labels]
    output = "imagenet.txt"         # an output: a file with a label in each line
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from app.errors import CheckpointInvalid
from app.messages import Signature, TensorSpec

_MAX_BYTES = 2**20  # of a description, and of a file of labels
_INTERPOLATIONS = ("bilinear", "nearest", "bicubic")
_KEYS = frozenset(("resize", "crop", "mean", "std", "interpolation"))
_DATATYPES = ("FP32", "FP16", "FP64", "UINT8")
_RESIZE = 256 / 224  # torchvision's, of the shorter side to the rows that are cut out


@dataclass(frozen=True, slots=True)
class PictureSpec:
    """How pictures become rows of an input, as by the presets of torchvision.

    `shape` is that of a row, with `channels` in the first or the last place. `crop` are its rows and columns, and
    `resize` is the size of a picture's shorter side before. `mean` and `std` of each channel; empty: values stay as they
    are, from 0 to 1, or bytes.
    """

    name: str
    datatype: str
    shape: tuple[int, ...]
    channels: int
    crop: tuple[int, int]
    resize: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    interpolation: str = "bilinear"

    @property
    def channels_first(self) -> bool:
        return self.shape[0] == self.channels and self.shape[1:] == self.crop


@dataclass(frozen=True, slots=True)
class ProgramDescription:
    """`pictures` by input, and `labels` by output."""

    pictures: Mapping[str, PictureSpec] = field(default_factory=dict)
    labels: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def read_description(program: Path, signature: Signature) -> ProgramDescription:
    """Return what the file beside the program says; nothing without one. Raises `CheckpointInvalid` or `OSError`."""
    path = program.with_suffix(".toml")
    if not path.is_file():
        return ProgramDescription()
    if path.stat().st_size > _MAX_BYTES:
        raise CheckpointInvalid(f"{path.name} is larger than {_MAX_BYTES} bytes.")
    try:
        values = tomllib.loads(path.read_text())
    except (ValueError, RecursionError) as error:
        raise CheckpointInvalid(f"{path.name} is not TOML: {error}.") from error
    reader = DescriptionReader(path)
    reader.check_keys("", values, ("pictures", "labels"))
    inputs, outputs = ({spec.name: spec for spec in specs} for specs in (signature.inputs, signature.outputs))
    pictures = {name: reader.picture(spec, one) for name, spec, one in reader.named("pictures", values, inputs)}
    labels = {name: reader.labels(spec, one) for name, spec, one in reader.named("labels", values, outputs)}
    return ProgramDescription(pictures, labels)


class DescriptionReader:
    def __init__(self, path: Path) -> None:
        self._path = path

    def error(self, sentence: str) -> CheckpointInvalid:
        return CheckpointInvalid(f"{self._path.name}: {sentence}.")

    def check_keys(self, table: str, values: Mapping[str, Any], known: Sequence[str] | frozenset[str]) -> None:
        for key in values:
            if key not in known:
                raise self.error(f"{table}{key} is not known here: use {', '.join(sorted(known))}")

    def named(
        self, table: str, values: Mapping[str, Any], specs: Mapping[str, TensorSpec]
    ) -> list[tuple[str, TensorSpec, Any]]:
        given = values.get(table, {})
        if not isinstance(given, dict):
            raise self.error(f"{table} must be a table")
        self.check_keys(f"{table}.", given, tuple(specs))
        return [(name, specs[name], one) for name, one in given.items()]

    def picture(self, spec: TensorSpec, values: Any) -> PictureSpec:
        where = f"pictures.{spec.name}"
        if not isinstance(values, dict):
            raise self.error(f"{where} must be a table")
        self.check_keys(f"{where}.", values, _KEYS)
        channels, sizes = self._layout(spec, where)
        crop = self._crop(values, sizes, where)
        if spec.datatype not in _DATATYPES:
            raise self.error(f"{where} is {spec.datatype}, and a picture is one of {', '.join(_DATATYPES)}")
        resize = values.get("resize", max(round(size * _RESIZE) for size in crop))
        if type(resize) is not int or resize < max(crop):
            raise self.error(
                f"{where}.resize must be a whole number of at least {max(crop)}, so that {list(crop)} can be cut out"
            )
        mean, std = (self._numbers(values, key, channels, where) for key in ("mean", "std"))
        if (mean or std) and spec.datatype == "UINT8":
            raise self.error(f"{where} is UINT8, so it has neither mean nor std")
        if any(one == 0 for one in std):
            raise self.error(f"{where}.std must not be 0")
        interpolation = values.get("interpolation", _INTERPOLATIONS[0])
        if interpolation not in _INTERPOLATIONS:
            raise self.error(f"{where}.interpolation must be one of {', '.join(_INTERPOLATIONS)}")
        first = spec.shape[1] in (1, 3)
        shape = (channels, *crop) if first else (*crop, channels)
        return PictureSpec(spec.name, spec.datatype, shape, channels, crop, resize, mean, std, interpolation)

    def _layout(self, spec: TensorSpec, where: str) -> tuple[int, tuple[int, ...]]:
        """Return the channels, and the rows and columns of the input; -1 are free."""
        row = spec.shape[1:]
        if len(row) == 3 and row[0] in (1, 3):
            return row[0], row[1:]
        if len(row) == 3 and row[2] in (1, 3):
            return row[2], row[:2]
        raise self.error(f"{where} has the shape {list(spec.shape)}, which has no 1 or 3 channels of a picture")

    def _crop(self, values: Mapping[str, Any], sizes: tuple[int, ...], where: str) -> tuple[int, int]:
        given = values.get("crop", list(sizes))
        if not isinstance(given, list) or len(given) != 2 or not all(type(one) is int and one > 0 for one in given):
            raise self.error(f"{where}.crop must be the rows and columns of the input, as [224, 224]")
        if any(size not in (-1, one) for size, one in zip(sizes, given, strict=True)):
            raise self.error(f"{where}.crop is {given}, and the input has {list(sizes)}")
        return given[0], given[1]

    def _numbers(self, values: Mapping[str, Any], key: str, channels: int, where: str) -> tuple[float, ...]:
        given = values.get(key, [])
        if not isinstance(given, list) or any(type(one) not in (int, float) for one in given):
            raise self.error(f"{where}.{key} must be a list of numbers")
        if given and len(given) != channels:
            raise self.error(f"{where}.{key} has {len(given)} numbers, and the input has {channels} channels")
        return tuple(map(float, given))

    def labels(self, spec: TensorSpec, given: Any) -> tuple[str, ...]:
        if not isinstance(given, str):
            raise self.error(f"labels.{spec.name} must be the name of a file")
        file = (self._path.parent / given).resolve()
        if not file.is_relative_to(self._path.parent.resolve()) or not file.is_file():
            raise self.error(f"labels.{spec.name}: {given[:100]} is no file of the program's directory")
        if file.stat().st_size > _MAX_BYTES:
            raise self.error(f"{file.name} is larger than {_MAX_BYTES} bytes")
        try:
            found = tuple(file.read_text(encoding="utf-8").splitlines())
        except UnicodeDecodeError as error:
            raise self.error(f"{file.name} is no text in UTF-8") from error
        size = spec.shape[-1]
        if len(spec.shape) != 2 or size not in (-1, len(found)):
            raise self.error(
                f"{file.name} has {len(found)} labels, and the output {spec.name!r} has the shape {list(spec.shape)}"
            )
        return found
