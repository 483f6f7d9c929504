"""Errors of fetching as sentences: what is wrong with a name, a token, the network or the disk, and what helps."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import ArmatureError, CheckpointInvalid, FetchFailed, ModelUnavailable
from app.weights.hub.cache import HubName, cache_directory, cached_names, library_constants

if TYPE_CHECKING:
    from huggingface_hub.errors import HfHubHTTPError

_MAX_SUGGESTIONS = 3
_MAX_LISTED = 500  # models of an author among which a misspelt name is searched
_MAX_CHARACTERS = 200  # of a library's message in ours
_LOGIN = "Give a token that may read it: HF_TOKEN, or hf auth login."


@contextmanager
def refusals_of(name: HubName) -> Iterator[None]:
    """Convert the errors of huggingface_hub, of the network and of the disk to ours."""
    import httpx2

    try:
        yield
    except ArmatureError:
        raise
    except (
        OSError,
        httpx2.HTTPError,
        ValueError,
    ) as error:  # ValueError: an answer that is not JSON, an impossible name
        raise _refusal(name, error) from error


def _refusal(name: HubName, error: Exception) -> ArmatureError:
    from huggingface_hub.errors import (
        FileMetadataError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    if isinstance(error, LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        return _refusal(name, error.__cause__)
    if isinstance(error, HFValidationError):
        return CheckpointInvalid(f"{name.repo_id} cannot be a name of the hub: {error}")
    if isinstance(error, OfflineModeIsEnabled):
        return ModelUnavailable(offline_message(name))
    if isinstance(error, HfHubHTTPError):
        return _refused_by_hub(name, error)
    if isinstance(error, FileMetadataError | ValueError):
        return FetchFailed(
            f"{_endpoint()} does not answer as a hub does for {name}: {_one_line(error)} Is HF_ENDPOINT right, and does the network"
            " not ask for a login?"
        )
    if isinstance(error, OSError):
        return _refused_by_disk(name, error)
    return FetchFailed(
        f"The hub ({_endpoint()}) cannot be reached for {name}: {type(error).__name__}: {error}. Is there a network, and does it"
        " need a proxy (HTTPS_PROXY)? A directory with the model's files needs none: --model DIR."
    )


def _refused_by_hub(name: HubName, error: HfHubHTTPError) -> ArmatureError:
    from huggingface_hub import get_token
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    status = error.response.status_code
    if isinstance(error, GatedRepoError):
        page = f"{_endpoint()}/{name.repo_id}"
        return ModelUnavailable(f"{name.repo_id} is gated. Accept its terms on {page}, then give your token: {_LOGIN}")
    if isinstance(error, RepositoryNotFoundError):
        to_whom = "that this token may read" if get_token() else "that is public"
        private = "" if get_token() else " A private model needs a token: HF_TOKEN, or hf auth login."
        return ModelUnavailable(
            f"{name.repo_id} is no directory here, and the hub has no model of this name {to_whom}."
            f"{suggestions(name.repo_id, _models_of_author(name))}{private}"
        )
    if isinstance(error, RevisionNotFoundError):
        return ModelUnavailable(
            f"{name.repo_id} has no revision {name.revision}: give a branch, a tag or a commit's 40 digits, or leave @{name.revision} out."
        )
    if isinstance(error, EntryNotFoundError):
        return FetchFailed(
            f"The hub lists a file of {name} that it does not have: {error.response.url.path}. Try again."
        )
    if status == 401:
        return ModelUnavailable(f"The hub refuses the token for {name}. {_LOGIN}")
    if status == 403:
        return ModelUnavailable(f"The hub forbids this token to read {name}. {_LOGIN}")
    if status == 429:
        return FetchFailed(
            "The hub answers that there were too many requests. Try again later; with a token it allows more."
        )
    return FetchFailed(f"The hub ({_endpoint()}) answers {status} for {name}. Try again later.")


def _models_of_author(name: HubName) -> tuple[str, ...]:
    """Return the names of models on the hub under the same ORG; empty if it does not answer."""
    import httpx2
    from huggingface_hub import HfApi

    try:
        author = name.repo_id.partition("/")[0]
        return tuple(model.id for model in HfApi().list_models(author=author, limit=_MAX_LISTED))
    except (OSError, httpx2.HTTPError):
        return ()


def _refused_by_disk(name: HubName, error: OSError) -> ArmatureError:
    if error.errno == errno.ENOSPC:
        return ModelUnavailable(
            f"The disk of {cache_directory()} is full. Remove models (armature list, armature rm), or set HF_HUB_CACHE."
        )
    if error.errno is not None:
        return ModelUnavailable(
            f"{error.filename or cache_directory()}: {error.strerror}. HF_HUB_CACHE sets the folder of the cache."
        )
    return FetchFailed(f"A file of {name} did not arrive whole: {_one_line(error)} Try again.")


def _one_line(error: Exception) -> str:
    return f"{' '.join(str(error).split())[:_MAX_CHARACTERS].rstrip('.')}."


def offline_message(name: HubName) -> str:
    """Return the sentence for a model that is not in the cache while nothing may be fetched."""
    return (
        f"{name} is no directory here, and the hub's cache ({cache_directory()}) does not have all files of it. Nothing is fetched,"
        f" since offline is on (ARMATURE_OFFLINE or HF_HUB_OFFLINE).{suggestions(str(name))}"
    )


def suggestions(text: str, names: tuple[str, ...] = ()) -> str:
    """Return a sentence with names like this one, of the cache and of `names`; empty if there are none."""
    known = [*names, *cached_names()]
    by_lower = {name.lower(): name for name in known} | {name.rpartition("/")[2].lower(): name for name in known}
    near = difflib.get_close_matches(text.lower(), by_lower, n=_MAX_SUGGESTIONS, cutoff=0.7)
    near += difflib.get_close_matches(Path(text).name.lower(), by_lower, n=_MAX_SUGGESTIONS, cutoff=0.8)
    found = [name for name in dict.fromkeys(by_lower[each] for each in near) if name != text][:_MAX_SUGGESTIONS]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def _endpoint() -> str:
    return str(library_constants().ENDPOINT)
