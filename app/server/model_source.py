"""Opening the model of the settings, and fetching it from the hub before, if its name is one of the hub's."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

from app.errors import ModelUnavailable
from app.server.start_console import StartConsole
from app.settings import Settings
from app.weights.hub.cache import HubName, find_snapshot, is_complete, library_is_offline, parse_hub_name, read_listing
from app.weights.hub.fetch import fetch_or_use_cached
from app.weights.hub.refusals import offline_message
from app.weights.open import OpenedModel, is_here, open_model


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
    """Open the model of the settings, or another one at `path`, fetched before with progress on a terminal.

    Raises `StartupError` if it cannot be fetched or opened.
    """
    name = missing_model(settings, path)
    if name is not None:
        with closing(StartConsole()) as console:
            fetch_or_use_cached(name, console.show)
    return open_model(path or settings.checkpoint_directory)
