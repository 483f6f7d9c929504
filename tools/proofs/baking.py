"""Build both architectures with `docker buildx bake`.

WHEELS names a folder with torch's wheel if its index is slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from app.version import VERSION

ROOT = Path(__file__).resolve().parents[2]
MINUTES = 60


def bake() -> str:
    """Build and load the image with visible progress. Returns its tag."""
    wheels = os.environ.get("WHEELS")
    allowed = [f"--allow=fs.read={wheels}"] if wheels else []
    environment = os.environ | {"VERSION": VERSION, "REVISION": _revision()}
    command = ["docker", "buildx", "bake", *allowed, "cpu", "--load"]
    made = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, check=False, timeout=MINUTES * 60)
    if made.returncode != 0:
        raise SystemExit(f"prove: docker buildx bake ended with {made.returncode}; see the output above")
    return f"armature:{VERSION}"


def _revision() -> str:
    made = subprocess.run(
        ["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return made.stdout.strip() or "unknown"
