"""What quantizing a checkpoint costs in quality, noted when its weights were packed, for the plan of the next start.

A note is found by the identity of the weight files (path, size and time), without reading weights.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from app.hardware.facts import Needs
from app.models.decoders.config import ModelConfig
from app.settings import Settings, parse_kept_layers
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, file_identity, log_not_kept, open_trusted
from app.weights.checkpoint import Checkpoint
from app.weights.forms import QUANTIZED, kept_layer_bytes
from app.weights.open import OpenedModel

log = logging.getLogger(__name__)

FORMAT = 1  # version of the formats and of the measurement: raise it when older figures would mislead
FOLDER = "packs"
_MAX_BYTES = 2**12


class QualityNotes:
    """The note of one checkpoint with these settings, which may not exist yet."""

    def __init__(self, checkpoint: OpenedModel, settings: Settings) -> None:
        self._file: Path | None = None
        folder = settings.cache_directory
        if folder is None or not isinstance(checkpoint, Checkpoint):
            return
        key = [VERSION, FORMAT, settings.keep_layers, *(file_identity(file) for file in checkpoint.content_files)]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        self._file = folder / FOLDER / f"{digest[:32]}.quality"

    def read(self) -> dict[str, float]:
        """Return the cost of each precision that was measured; empty if there is no usable note."""
        if self._file is None:
            return {}
        try:
            with os.fdopen(open_trusted(self._file), encoding="utf-8") as stream:
                noted = json.loads(stream.read(_MAX_BYTES))
            return {name: float(noted[name]) for name in QUANTIZED if name in noted}
        except (OSError, ValueError, TypeError, FileUnusable, RecursionError):
            return {}

    def write(self, costs: Mapping[str, float]) -> None:
        if self._file is None or costs == self.read():
            return
        try:
            with atomic_write(self._file) as stream:
                stream.write(json.dumps(dict(costs)).encode())
        except OSError as error:
            log_not_kept(self._file, "the measured cost in quality", error)


def planned_needs(checkpoint: OpenedModel, settings: Settings) -> Needs:
    """Return a checkpoint's needs with its noted costs, and with the bytes of the layers in `keep_layers`.

    Raises `SettingsInvalid` if `keep_layers` names a layer that the model does not have.
    """
    needs = checkpoint.needs()
    with suppress(OSError):  # a file that vanished is reported when it is read
        needs = replace(needs, quality_costs=QualityNotes(checkpoint, settings).read())
    kept = parse_kept_layers(settings.keep_layers)
    if not kept or not isinstance(checkpoint, Checkpoint) or not isinstance(checkpoint.model_config, ModelConfig):
        return needs
    changed = {
        name: size + kept_layer_bytes(checkpoint.model_config, name, kept) if name in QUANTIZED else size
        for name, size in needs.bytes_by_precision.items()
    }
    return replace(needs, bytes_by_precision=changed)
