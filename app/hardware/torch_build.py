"""Build options of the installed torch, read from the files of its wheel.

Importing torch would load its thread pools before the plan has set their sizes.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

from app.hardware.facts import TorchBuild
from app.hardware.files import Files

# Every wheel contains the header that its build was configured with.
_HEADER = "include/ATen/Config.h"


def installed_torch() -> Path | None:
    """Return the folder of the installed torch without importing it; None if there is none."""
    spec = find_spec("torch")
    return Path(spec.origin).parent if spec and spec.origin else None


def read(directory: Path) -> TorchBuild | None:
    """Return the build options of the torch in `directory`; None if there is no torch."""
    files = Files(directory)
    source, header = files.text("version.py") or "", files.text(_HEADER) or ""
    version = _assigned(source, "__version__")
    if version is None:
        return None
    return TorchBuild(
        version=version,
        cuda=_assigned(source, "cuda"),
        onednn=_enabled(header, "MKLDNN"),
        acl=_enabled(header, "MKLDNN_ACL"),
        kleidiai=_enabled(header, "KLEIDIAI"),
        mkl=_enabled(header, "MKL"),
    )


def _assigned(source: str, name: str) -> str | None:
    match = re.search(rf"^{name}(?:: [^=]+)? = ['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return match[1] if match else None


def _enabled(header: str, name: str) -> bool | None:
    match = re.search(rf"#define AT_{name}_ENABLED\(\) ([01])", header)
    return match[1] == "1" if match else None
