"""Opening the model of the settings, and fetching it from the hub before, if its name is one of the hub's."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

from app.errors import CheckpointInvalid, ModelUnavailable, SettingsInvalid
from app.models.decoders.config import ModelConfig
from app.server.start_console import StartConsole
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.draft_head import open_draft_head
from app.weights.hub.cache import HubName, find_snapshot, is_complete, library_is_offline, parse_hub_name, read_listing
from app.weights.hub.fetch import fetch_or_use_cached
from app.weights.hub.refusals import offline_message
from app.weights.open import OpenedModel, is_here, open_model, require_checkpoint

if TYPE_CHECKING:
    from app.text.tokenizer import Tokenizer

MAX_MISSING_TOKENS = 128  # ids that only one of the two vocabularies may have: unused ones, and some added ones


def missing_model(settings: Settings, path: Path | None = None) -> HubName | None:
    """Return the hub's name of the model if files of it must be fetched; None if it can be opened, or only refused.

    `path` is another model than the one to serve. Raises `ModelUnavailable` or `CheckpointInvalid`.
    """
    path = path or settings.checkpoint_directory
    name = None if is_here(path) else parse_hub_name(path)
    if name is None or is_complete(name):
        return None
    if not is_offline(settings):
        return name
    snapshot = find_snapshot(name)
    if snapshot is None or read_listing(name.repo_id, snapshot.name) is not None:
        raise ModelUnavailable(offline_message(name))
    return None  # what the cache has of it is used, since nobody knows what it lacks


def is_offline(settings: Settings) -> bool:
    return settings.offline == "on" or library_is_offline()


def open_or_fetch_model(settings: Settings, path: Path | None = None) -> OpenedModel:
    """Open the settings' model, or one at `path`, fetched before with progress. Raises `StartupError`."""
    name = missing_model(settings, path)
    if name is not None:
        with closing(StartConsole()) as console:
            fetch_or_use_cached(name, console.show)
    if path is not None:
        return open_model(path, "native")
    mmproj = None if settings.mmproj is None else settings.mmproj.expanduser()
    model = open_model(settings.checkpoint_directory, settings.engine, mmproj)
    if _is_head(model):
        raise SettingsInvalid(
            f"model: {model.name} drafts for another model: serve that one, with this as draft_model."
        )
    return model


def _is_head(model: OpenedModel) -> TypeGuard[Checkpoint]:
    config = model.model_config if isinstance(model, Checkpoint) else None
    return isinstance(config, ModelConfig) and config.is_draft_head


def planned_draft(settings: Settings, model: OpenedModel) -> Checkpoint | None:
    """Open the settings' draft model, fetched before, or the model's own head; None without either.

    Raises `SettingsInvalid` or `StartupError`.
    """
    if settings.draft_model is None:
        return _draft_head(settings, model)
    if model.needs().kind != "decoder":
        raise SettingsInvalid(f"draft_model: {model.name} does not generate text, so nothing can be drafted for it.")
    draft = open_or_fetch_model(settings, settings.draft_model.expanduser())
    if not isinstance(draft, Checkpoint) or not isinstance(draft.model_config, ModelConfig):
        raise SettingsInvalid(f"draft_model: {draft.name} does not generate text, and only a decoder can draft.")
    if _is_head(draft):
        return replace(draft, model_config=draft.decoder.reading(require_checkpoint(model).decoder))
    if settings.speculation == "mtp":
        raise SettingsInvalid(
            "speculation is mtp, and draft_model is no draft head: the head of the model drafts, or a draft model."
        )
    ours, size = model.needs().num_parameters, draft.needs().num_parameters
    if size > ours:
        raise SettingsInvalid(
            f"draft_model: {draft.name} has {size:,} parameters, more than {model.name} with {ours:,}: give a smaller model."
        )
    return draft


def _draft_head(settings: Settings, model: OpenedModel) -> Checkpoint | None:
    has_drafts = settings.speculation != "off" and isinstance(model, Checkpoint)
    head = open_draft_head(model) if has_drafts and isinstance(model, Checkpoint) else None
    if head is None and settings.speculation == "mtp":
        raise SettingsInvalid(
            f"speculation is mtp, but {model.name} has no draft head of one layer (tensors mtp.*): use auto."
        )
    return head


def check_vocabulary(tokenizer: Tokenizer, draft: Checkpoint, cache: Path | None = None) -> None:
    """Raise `CheckpointInvalid` with the first difference unless the draft model's tokens are the model's."""
    from app.text.tokenizer_check import try_and_load  # with numpy, which settings and plans do without

    other, missing = try_and_load(draft.location, cache), 0
    for token_id in range(max(tokenizer.vocab_size, other.vocab_size)):
        ours, its = tokenizer.token_text(token_id), other.token_text(token_id)
        if ours == its:
            continue
        missing += not ours or not its
        if (ours and its) or missing > MAX_MISSING_TOKENS:
            raise CheckpointInvalid(
                f"draft_model: {draft.name} has another vocabulary: its token {token_id} is {_shown(its)}, and the model's is "
                f"{_shown(ours)}; give a draft model of the same family."
            )


def _shown(token: str) -> str:
    return repr(token) if token else "missing"
