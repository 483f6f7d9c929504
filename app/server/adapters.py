"""The LoRA adapters of the settings: which a start loads, and where clients may load others from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import CheckpointInvalid, InvalidRequest, SettingsInvalid
from app.models.decoders.config import ModelConfig
from app.service.adapters import AdapterStore
from app.settings import Settings, parse_adapters
from app.weights.checkpoint import Checkpoint
from app.weights.files import readable_or_invalid
from app.weights.lora.adapter import CONFIG, WEIGHTS, ServedAdapters, adapted_layers, is_adapter, open_adapter
from app.weights.open import OpenedModel
from armature_kernels.linear.layout import MAX_LORA_RANK

if TYPE_CHECKING:
    from app.engine.decoder.adapters import AdapterSlots

_ROOT_LORAS, _ROOT_RANK = 8, 16  # with lora_root, where the settings leave it to us


def planned_adapters(settings: Settings, model: OpenedModel) -> ServedAdapters | None:
    """Open the adapters of the settings; None if the server has none.

    Raises `SettingsInvalid` if the settings do not fit together, or to the model, and `CheckpointInvalid` if an adapter
    cannot be served, or lies beside the model without being asked for.
    """
    pairs = parse_adapters(settings.lora)
    _check_beside(model, [directory for _, directory in pairs])
    if not pairs and settings.lora_root is None:
        given = [name for name in ("max_loras", "max_lora_rank") if getattr(settings, name) != "auto"]
        if given:
            raise SettingsInvalid(f"{given[0]} needs adapters: give --lora NAME=DIR or --lora-root DIR.")
        return None
    if not isinstance(model, Checkpoint) or not isinstance(model.model_config, ModelConfig):
        raise SettingsInvalid(
            f"lora: {model.name} does not generate text, and adapters are served for such models only."
        )
    if settings.lora_root is not None and not settings.lora_root.expanduser().is_dir():
        raise SettingsInvalid(f"lora_root {settings.lora_root} is no directory here.")
    names = {model.name, *settings.served_model_name}
    taken = next((name for name, _ in pairs if name in names), None)
    if taken is not None:
        raise SettingsInvalid(f"lora: {taken!r} is the name of the model itself; give the adapter another.")
    highest = MAX_LORA_RANK if settings.max_lora_rank == "auto" else settings.max_lora_rank
    named = {}
    for name, directory in pairs:
        with readable_or_invalid(directory):
            named[name] = open_adapter(directory, model.model_config, highest)
    allows_others = settings.lora_root is not None
    slots = max(len(named), _ROOT_LORAS if allows_others else 1) if settings.max_loras == "auto" else settings.max_loras
    if slots < len(named):
        raise SettingsInvalid(f"max_loras is {slots}, and lora lists {len(named)} adapters, which are all loaded.")
    ranks = [adapter.rank for adapter in named.values()]
    rank = max([*ranks, _ROOT_RANK if allows_others else 1]) if settings.max_lora_rank == "auto" else highest
    return ServedAdapters(adapted_layers(model.model_config), named, slots, rank)


def _check_beside(model: OpenedModel, asked: list[Path]) -> None:
    """Raise `CheckpointInvalid` for an adapter beside the model's files that is not asked for."""
    if not isinstance(model, Checkpoint) or model.gguf is not None or not is_adapter(model.directory):
        return
    if not any(directory.exists() and directory.samefile(model.directory) for directory in asked):
        found = CONFIG if (model.directory / CONFIG).exists() else WEIGHTS
        raise CheckpointInvalid(
            f"{model.directory} has a LoRA adapter beside the model ({found}). To serve it under a name of its own, give"
            f" --lora NAME={model.directory}; to serve the model alone, move {found} elsewhere."
        )


@dataclass(frozen=True, slots=True)
class AdapterReader:
    """Reads adapters that clients name, below `root` only."""

    root: Path
    config: ModelConfig
    max_rank: int
    slots: AdapterSlots

    def __call__(self, path: str, slot: int) -> None:
        """Read the weights of a directory below `root` for a slot. Raises `InvalidRequest`."""
        outside = InvalidRequest("lora_path must be a directory below the server's lora_root.", field="lora_path")
        try:
            root = self.root.expanduser().resolve(strict=True)
            directory = (root / path).resolve(strict=True)
        except (OSError, ValueError, RuntimeError):  # a null character; a link to itself in Python before 3.13
            raise outside from None
        if directory == root or not directory.is_relative_to(root) or not directory.is_dir():
            raise outside
        try:
            with readable_or_invalid(directory):
                self.slots.read_for(slot, open_adapter(directory, self.config, self.max_rank))
        except CheckpointInvalid as error:
            raise InvalidRequest(error.message, field="lora_path") from error


def adapter_reader(
    settings: Settings, served: ServedAdapters | None, model: OpenedModel, slots: AdapterSlots | None
) -> AdapterReader | None:
    """Return what reads the adapters that clients name; None if they may name none."""
    if served is None or slots is None or settings.lora_root is None:
        return None
    assert isinstance(model, Checkpoint), "only a checkpoint has adapters"
    return AdapterReader(settings.lora_root, model.decoder, served.max_rank, slots)


def adapter_store(settings: Settings, served: ServedAdapters | None, read: Callable[[str, int], None]) -> AdapterStore:
    """Return the adapters of the start. `read` reads one that a client names for a slot."""
    if served is None:
        return AdapterStore()
    initial = [(name, str(adapter.directory)) for name, adapter in served.named.items()]
    return AdapterStore(initial, served.slots, None if settings.lora_root is None else read)
