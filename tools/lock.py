"""Write the images' hashed locks: `python -m tools.lock` makes requirements/image-*.txt from runtime.txt.

An image is built from exactly these files with `pip install --require-hashes`. Each image and architecture has its own
lock, because torch's build and the wheels differ. The `cuda` images have torch's CUDA build and the versions that it
depends on.
pip itself resolves the locks (`pip install --dry-run --report`). `uv pip compile --generate-hashes` and pip-tools do
not fit: they write the hashes of every file of a release where an image needs one wheel, pip-tools resolves only for
the machine it runs on, and uv does not read pip's configuration, which may name a local folder with torch.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tools.install import ROOT, TORCH, TORCH_ARM_LINUX

PYTHON = "3.11"  # the Python of Debian 12, the image's base
# manylinux tags that Debian 12 (glibc 2.36) satisfies and that our dependencies use.
GLIBC = ("2_5", "2_12", "2_17", "2_18", "2_24", "2_25", "2_27", "2_28", "2_31", "2_34")
BUILD_ONLY = {"scikit-build-core", "pathspec"}  # needed to build the project, not to serve
HEAD = """# What is in the image for {name}, file by file; made by `python -m tools.lock` from runtime.txt. Do not edit.
"""
CUDA = (
    f"torch={TORCH.removeprefix('torch')}"  # `===` selects exactly this version: PyPI's build, not a local +cpu build
)


@dataclass(frozen=True, slots=True)
class Lock:
    """One image on one architecture.

    `machine` is the name in wheel tags. `brings`: also lock torch's own dependencies.
    """

    name: str
    machine: str
    torch: str
    brings: bool = False

    @property
    def path(self) -> Path:
        return ROOT / "requirements" / f"image-{self.name}.txt"

    @property
    def platforms(self) -> list[str]:
        return [f"--platform=manylinux_{version}_{self.machine}" for version in GLIBC] + [
            f"--platform=manylinux2014_{self.machine}"
        ]


LOCKS = (
    Lock("amd64", "x86_64", f"{TORCH}+cpu"),
    Lock("arm64", "aarch64", TORCH_ARM_LINUX),
    Lock("cuda-amd64", "x86_64", CUDA, brings=True),
    Lock("cuda-arm64", "aarch64", CUDA, brings=True),
)


def main() -> int:
    """Write all locks, or print which requirement has no wheel."""
    for lock in LOCKS:
        print(f"{lock.path.relative_to(ROOT)} ...", flush=True)  # finding torch's CUDA build takes a minute
        try:
            lines = sorted(locked(lock))
        except subprocess.CalledProcessError as error:
            print(f"lock: {lock.name}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        lock.path.write_text(HEAD.format(name=lock.name) + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{lock.path.relative_to(ROOT)}: {len(lines)} wheels")
    return 0


def pins() -> dict[str, str]:
    """Return the pins of everything except torch, by name."""
    text = (ROOT / "requirements" / "runtime.txt").read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    named = {re.split("[=<>;]", line)[0].strip(): line for line in lines if line}
    return {name: pin for name, pin in named.items() if name not in BUILD_ONLY}


def locked(lock: Lock) -> Iterator[str]:
    """Yield each line as pip requires it: name, version and the wheel's SHA-256."""
    ours = pins()
    for item in found(lock, [*ours.values(), lock.torch], "--no-deps"):
        yield hashed(item, "===" if item["metadata"]["name"] == "torch" and lock.brings else "==")
    for item in found(lock, [lock.torch]) if lock.brings else ():
        if item["metadata"]["name"].lower().replace("_", "-") not in {*ours, "torch"}:
            yield hashed(item)


def found(lock: Lock, requirements: list[str], *options: str) -> list[Any]:
    """Return the packages that pip would install on that platform."""
    with tempfile.TemporaryDirectory() as target:
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "-q",
            "--dry-run",
            "--ignore-installed",
            "--report=-",
            *options,
        ]
        command += [
            "--only-binary=:all:",
            f"--python-version={PYTHON}",
            *lock.platforms,
            f"--target={target}",
            *requirements,
        ]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    items: list[Any] = json.loads(report)["install"]
    return items


def hashed(item: Any, equals: str = "==") -> str:
    about, archive = item["metadata"], item["download_info"]["archive_info"]
    return f"{about['name'].lower()}{equals}{about['version']} --hash=sha256:{archive['hashes']['sha256']}"


if __name__ == "__main__":
    sys.exit(main())
