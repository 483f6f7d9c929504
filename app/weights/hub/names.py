"""Names of models on Hugging Face's hub, as `--model` takes them: ORG/NAME, with a revision or a GGUF file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

MAIN = "main"  # the branch that a name without a revision refers to
# The hub's rule for a name: letters, digits, - _ and ., at most 96 characters (huggingface_hub, validate_repo_id).
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_NAME = re.compile(rf"(?P<repo_id>{_PART}/{_PART})(?:@(?P<revision>[^:@\s]+))?(?::(?P<file>[^:]+\.gguf))?", re.ASCII)

_ADDRESS = re.compile(rf"(?:https?:/+[^/]+|hf:)/+(?P<repo_id>{_PART}/{_PART})(?:[/@?#]|$)", re.ASCII)


@dataclass(frozen=True, slots=True)
class HubName:
    """A model of the hub: ORG/NAME, a branch, tag or commit hash, and a GGUF file of it or an empty string."""

    repo_id: str
    revision: str = MAIN
    file: str = ""

    def __str__(self) -> str:
        """Return the name as `--model` takes it."""
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
