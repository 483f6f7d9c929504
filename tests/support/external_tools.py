"""Programs of others that tests of the image, the manifests, the rules and the dashboards need; and what they make of our files."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHECKERS = ROOT / "build" / "checkers"
PLACES = os.pathsep.join([str(CHECKERS / "venv" / "bin"), os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])

Manifest = dict[str, Any]


def tool(name: str) -> str:
    """Where the program is; skips the test by its name where it is not."""
    found = shutil.which(name, path=PLACES)
    if found is None:
        pytest.skip(f"{name} is not here: `make checkers` says how to get it")
    return found


def node_package(name: str) -> Path:
    """The folder of a package of npm; skips the test by its name where it is not."""
    folder = CHECKERS / "node_modules" / name
    if not folder.is_dir():
        pytest.skip(f"{name} is not here: `make checkers` installs it")
    return folder


def run(command: Sequence[str | Path], **options: Any) -> subprocess.CompletedProcess[str]:
    """What it said and its status; never waits for input, and not for ever."""
    return subprocess.run(
        command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL, **{"timeout": 300, **options}
    )


@cache
def built(folder: str) -> tuple[Manifest, ...]:
    """The manifests of a kustomization under k8s/, as a cluster would be given them."""
    if shutil.which("kustomize", path=PLACES):
        command = [tool("kustomize"), "build"]
    else:
        command = [tool("kubectl"), "kustomize"]
    made = run([*command, ROOT / "k8s" / folder])
    assert made.returncode == 0, made.stderr
    return tuple(document for document in yaml.safe_load_all(made.stdout) if document)


def of_kind(manifests: Sequence[Manifest], kind: str, name: str | None = None) -> list[Manifest]:
    return [each for each in manifests if each["kind"] == kind and name in (None, each["metadata"]["name"])]
