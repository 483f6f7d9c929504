"""Write the hashed locks: `python -m tools.lock` makes requirements/image-*.txt and *-hashes.txt from the pins.

An image is built from exactly these files with `pip install --require-hashes`: what serving needs (runtime.txt), traces
(otel.txt) and models that transformers computes (transformers.txt). Each image and architecture has its own lock,
because torch's build and the wheels differ. The `cuda` images have torch's CUDA build and the versions that it depends
on.
runtime-hashes.txt and torch-hashes.txt are what `make serve` and `make install` install: each package with the hashes
of its wheels for all Pythons and platforms that are supported. torch has one line for each requirement that
`tools/install.py` may choose.
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
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tools.install import CPU_INDEX, ROOT, TORCH, TORCH_ARM_LINUX, TORCH_CPU, TORCH_HASHES, cpu_index_answers

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


RUNTIME_HASHES = ROOT / "requirements" / "runtime-hashes.txt"
RUNTIME_HEAD = """# What `make serve` installs besides torch, with the hashes of the wheels of every supported Python and platform;
# made by `python -m tools.lock` from runtime.txt. Do not edit.
"""
TORCH_HEAD = """# torch for `make serve`: the hashes of the wheels of every supported Python and platform, one line for each
# requirement that tools/install.py may choose; made by `python -m tools.lock`. Do not edit.
"""
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACOS = [f"--platform=macosx_{version}" for version in ("10_9_universal2", "10_13_universal2", "11_0_universal2")]
MACOS += [f"--platform=macosx_{version}_arm64" for version in ("11_0", "12_0", "13_0", "14_0")]

LOCKS = (
    Lock("amd64", "x86_64", TORCH_CPU),
    Lock("arm64", "aarch64", TORCH_CPU),
    Lock("cuda-amd64", "x86_64", CUDA, brings=True),
    Lock("cuda-arm64", "aarch64", CUDA, brings=True),
)


def main() -> int:
    """Write all locks, or print which requirement has no wheel."""
    files: dict[Path, tuple[str, Callable[[], Iterable[str]]]] = {
        lock.path: (HEAD.format(name=lock.name), partial(locked, lock)) for lock in LOCKS
    }
    files |= {RUNTIME_HASHES: (RUNTIME_HEAD, runtime_lines), TORCH_HASHES: (TORCH_HEAD, torch_lines)}
    for path, (head, lines_of) in files.items():
        print(f"{path.relative_to(ROOT)} ...", flush=True)  # finding torch's CUDA build takes a minute
        try:
            lines = sorted(lines_of())
        except subprocess.CalledProcessError as error:
            print(f"lock: {path.stem}: {error.stderr.strip().splitlines()[-1]}", file=sys.stderr)
            return 1
        path.write_text(head + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{path.relative_to(ROOT)}: {len(lines)} lines")
    return 0


def runtime_lines() -> list[str]:
    """Return one line for each package that serving or building needs, with all hashes."""
    hashes: dict[str, set[str]] = {}
    platforms = [each.platforms for each in LOCKS[:2]] + [MACOS]
    for python in PYTHONS:
        for options in platforms:
            for item in report([*options, f"--python-version={python}", "--no-deps"], [*all_pins().values()]):
                about = item["metadata"]
                digest = item["download_info"]["archive_info"]["hashes"]["sha256"]
                hashes.setdefault(f"{about['name'].lower()}=={about['version']}", set()).add(f"--hash=sha256:{digest}")
    return [f"{name} {' '.join(sorted(found))}" for name, found in hashes.items()]


def torch_lines() -> list[str]:
    """Return one line with hashes for each requirement of torch.

    Hashes that the file already has for a requirement are kept: only where torch's CPU index answers does pip find the
    CPU builds of every Python.
    """
    hashes = {line.split()[0]: set(line.split()[1:]) for line in TORCH_HASHES.read_text("utf-8").splitlines()}
    cpu_index = [f"--extra-index-url={CPU_INDEX}"] if cpu_index_answers() else []
    amd64, arm64 = (each.platforms for each in LOCKS[:2])
    wanted = [(TORCH_CPU, TORCH_CPU, platforms, cpu_index) for platforms in (amd64, arm64)]
    wanted += [(TORCH, CUDA, platforms, []) for platforms in (amd64, arm64, MACOS)]  # PyPI's, also those of macOS
    wanted += [(TORCH_ARM_LINUX, TORCH_ARM_LINUX, arm64, [])]
    lines: dict[str, set[str]] = {requirement: hashes.get(requirement, set()) for requirement, *_ in wanted}
    for python in PYTHONS:
        for requirement, build, platforms, index in wanted:
            try:
                (item,) = report([*platforms, *index, f"--python-version={python}", "--no-deps"], [build])
            except subprocess.CalledProcessError:
                if build is not TORCH_CPU:
                    raise
                continue
            lines[requirement].add(f"--hash=sha256:{item['download_info']['archive_info']['hashes']['sha256']}")
    lines[TORCH] |= lines[TORCH_CPU]  # pip may find any of them
    return [f"{name} {' '.join(sorted(found))}" for name, found in lines.items()]


def pins() -> dict[str, str]:
    """Return the pins of everything in an image except torch, by name."""
    all_of_them = all_pins() | all_pins("otel.txt") | all_pins("transformers.txt")
    return {name: pin for name, pin in all_of_them.items() if name not in BUILD_ONLY}


def all_pins(file: str = "runtime.txt") -> dict[str, str]:
    """Return the pins of a file in requirements/ by name; for serving without torch."""
    text = (ROOT / "requirements" / file).read_text(encoding="utf-8")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    return {re.split("[=<>;]", line)[0].strip(): line for line in lines if line}


def locked(lock: Lock) -> Iterator[str]:
    """Yield each line as pip requires it: name, version and the wheel's SHA-256."""
    ours = pins()
    for item in found(lock, [*ours.values()], "--no-deps"):
        yield hashed(item)
    yield torch_line(lock)
    for item in found(lock, [lock.torch]) if lock.brings else ():
        if item["metadata"]["name"].lower().replace("_", "-") not in {*ours, "torch"}:
            yield hashed(item)


def torch_line(lock: Lock) -> str:
    """Return the line of torch.

    A CPU build that pip does not find, because torch's index does not answer, keeps the line that it has.
    """
    if lock.brings:
        return hashed(found(lock, [lock.torch], "--no-deps")[0], "===")
    index = [f"--extra-index-url={CPU_INDEX}"] if cpu_index_answers() else []
    try:
        return hashed(found(lock, [lock.torch], "--no-deps", *index)[0])
    except subprocess.CalledProcessError:
        lines = lock.path.read_text(encoding="utf-8").splitlines()
        kept = next((line for line in lines if line.startswith(f"{lock.torch} ")), None)
        if kept is None:
            raise
        return kept


def found(lock: Lock, requirements: list[str], *options: str) -> list[Any]:
    return report([f"--python-version={PYTHON}", *lock.platforms, *options], requirements)


def report(options: list[str], requirements: list[str]) -> list[Any]:
    """Return the wheels that pip would install for a Python and platform."""
    with tempfile.TemporaryDirectory() as target:
        command = [sys.executable, "-m", "pip", "install", "-q", "--dry-run", "--ignore-installed", "--report=-"]
        command += ["--only-binary=:all:", *options, f"--target={target}", *requirements]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    items: list[Any] = json.loads(output)["install"]
    return items


def hashed(item: Any, equals: str = "==") -> str:
    about, archive = item["metadata"], item["download_info"]["archive_info"]
    return f"{about['name'].lower()}{equals}{about['version']} --hash=sha256:{archive['hashes']['sha256']}"


if __name__ == "__main__":
    sys.exit(main())
