"""Writes the image's hashed locks: `python -m tools.lock` makes requirements/image-amd64.txt and image-arm64.txt from runtime.txt.

An image is built from exactly these files (`pip install --require-hashes`): what was tested, or nothing. One lock for each architecture,
since torch is another build on each, and wheels are other files.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

from tools.install import ROOT, TORCH, TORCH_ARM_LINUX

PYTHON = "3.11"  # of Debian 12, the image's base
# By the name that image builders have for an architecture: the wheels' name for it, and torch's CPU build.
ARCHITECTURES = {"amd64": ("x86_64", f"{TORCH}+cpu"), "arm64": ("aarch64", TORCH_ARM_LINUX)}
GLIBC = ("2_17", "2_27", "2_28", "2_31", "2_34")  # manylinux names that Debian 12 (2.36) satisfies
BUILD_ONLY = {"scikit-build-core", "pathspec"}  # what builds the project, and nothing that serves
HEAD = """# What is in the image for {architecture}, file by file; made by `python -m tools.lock` from runtime.txt. Do not edit.
"""


def main() -> int:
    """Writes both files, or says which requirement has no wheel."""
    for architecture in ARCHITECTURES:
        try:
            lines = sorted(locked(architecture))
        except subprocess.CalledProcessError as error:
            print(f"lock: {architecture}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        path = ROOT / "requirements" / f"image-{architecture}.txt"
        path.write_text(HEAD.format(architecture=architecture) + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(lines)} wheels")
    return 0


def requirements(torch: str) -> list[str]:
    """The pins that serve, torch among them."""
    text = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    pins = [line.partition("#")[0].strip() for line in text.splitlines()]
    return [torch, *(pin for pin in pins if pin and re.split("[=<>;]", pin)[0].strip() not in BUILD_ONLY)]


def locked(architecture: str) -> Iterator[str]:
    """Each as pip wants it: name, version and the wheel's SHA-256."""
    machine, torch = ARCHITECTURES[architecture]
    platforms = [f"--platform=manylinux_{version}_{machine}" for version in GLIBC] + [f"--platform=manylinux2014_{machine}"]
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--no-deps", "--report=-"]
        command += ["--only-binary=:all:", f"--python-version={PYTHON}", *platforms, f"--target={target}", *requirements(torch)]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    for item in json.loads(report)["install"]:
        about, archive = item["metadata"], item["download_info"]["archive_info"]
        yield f"{about['name'].lower()}=={about['version']} --hash=sha256:{archive['hashes']['sha256']}"


if __name__ == "__main__":
    sys.exit(main())
