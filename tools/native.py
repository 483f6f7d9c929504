"""Make the native library of this checkout: `python -m tools.native [here | usable | all | LEVEL ...]`.

`here`, the default, compiles the best level of this processor alone; `usable` every level that it runs; `all` every
level that the compiler knows. Nothing happens if armature_kernels has a library of these sources that serves the
purpose: a library says what it was made of, and for which processors (csrc/dispatch.c). `ARMATURE_WHEELS=DIR` names a
folder with wheels of a release: if one has the library of these sources for this machine, it is used, and nothing is
compiled.
Only the standard library is needed, because the installation runs this beside pip.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.progress import Failed, Phase, Progress

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "armature_kernels"
BUILD = ROOT / "build" / "native"
WHEELS_VARIABLE = "ARMATURE_WHEELS"
_DIGESTED = ("*.c", "*.h", "*.txt", "*/*.c")  # as in CMakeLists.txt
_BUILD = re.compile(rb"armature build: ([0-9a-f]{64}) ([a-z0-9 ]*);")
_LEVELS = re.compile(rb"armature levels: ([a-z0-9 ]*);")


def main(arguments: list[str]) -> int:
    """Return 0 when the library is there, or there is no compiler; 1 after printing why it could not be made."""
    wanted = " ".join(arguments) or "here"
    if wanted == "usable":
        wanted = usable_levels()
    if is_current(wanted):
        return 0
    try:
        with Progress(1) as progress:
            make(wanted, progress, Path(sys.executable).parent)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def make(wanted: str, progress: Progress, programs: Path) -> None:
    """Put the library into armature_kernels as one phase. `programs`: a folder that may have cmake and ninja.

    Raises `Failed` if the compiler failed. Its absence is no failure.
    """
    with progress.phase("native library") as phase:
        if is_current(wanted):
            phase.result = "up to date"
        elif wheel := prebuilt(progress):
            phase.result = f"from {wheel.name}"
        else:
            phase.result = compile_library(wanted, progress, phase, programs)


def library_path() -> Path:
    return KERNELS / ("libarmature.dylib" if platform.system() == "Darwin" else "libarmature.so")


def is_current(wanted: str) -> bool:
    """Return True if the library is made of these sources, and has the levels that are wanted.

    A library for `here` was made for the processor that it was compiled on. A checkout may have moved to another.
    """
    try:
        content = library_path().read_bytes()
    except OSError:
        return False
    sources, made_for = build_of(content)
    if sources != digest(KERNELS / "csrc"):
        return False
    return made_for == "all" or made_for == (f"here {processor_levels()}" if wanted == "here" else wanted)


def build_of(library: bytes) -> tuple[str, str]:
    """Return the digest of a library's sources, and what it was made for; empty if it does not say."""
    found = _BUILD.search(library)
    return (found[1].decode(), found[2].decode()) if found else ("", "")


def digest(sources: Path) -> str:
    """Return the digest of the sources' names and contents, as CMakeLists.txt computes it."""
    names = sorted({path.relative_to(sources).as_posix() for pattern in _DIGESTED for path in sources.glob(pattern)})
    lines = [f"{hashlib.sha256((sources / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def usable_levels() -> str:
    """Return the levels that this processor runs as the names to make; `all` if no build has asked the processor yet."""
    levels = [level for level in processor_levels().split() if level != "portable"]  # which every library has
    return " ".join(levels) if len(levels) > 1 else "here" if levels else "all"


def processor_levels() -> str:
    """Return the levels of this processor, the best first, from the program that the build left; empty without it."""
    try:
        said = subprocess.run([BUILD / "processor-levels"], capture_output=True, text=True, check=False)
    except OSError:  # there is none, or it is for another architecture
        return ""
    return said.stdout.strip()


def prebuilt(progress: Progress) -> Path | None:
    """Take the library of these sources out of a wheel in `ARMATURE_WHEELS`; return that wheel.

    The digest of the sources is compared, so the library of another version cannot be used by mistake.
    """
    folder = os.environ.get(WHEELS_VARIABLE)
    if not folder:
        return None
    refused = []
    for wheel in sorted(Path(folder).glob("armature_serve-*.whl")):
        if reason := _refusal(wheel):
            refused.append(f"{wheel.name}: {reason}")
            continue
        _place(_content(wheel))
        return wheel
    said = "; ".join(refused) or "no wheel of armature-serve"
    progress.say(f"{WHEELS_VARIABLE}={folder} has no library for this checkout ({said}), so it is compiled.")
    return None


def _refusal(wheel: Path) -> str:
    """Return why this wheel's library cannot be used here; empty if it can."""
    if not any(fits(tag) for tag in wheel.stem.rpartition("-")[2].split(".")):
        return "for another platform"
    sources, made_for = build_of(_content(wheel))
    if not sources:
        return "without a library that names its sources"
    if sources != digest(KERNELS / "csrc"):
        return "made of other sources"
    return "" if made_for == "all" else "only for the processor that it was compiled on"


def _content(wheel: Path) -> bytes:
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.read(f"armature_kernels/{library_path().name}")
    except (KeyError, OSError, zipfile.BadZipFile):
        return b""


def fits(tag: str) -> bool:
    """Return True if this machine runs wheels with this platform tag."""
    machine = platform.machine()
    if platform.system() == "Darwin":
        return tag.startswith("macosx_") and tag.endswith(machine)
    if tag == f"linux_{machine}":
        return True
    found = re.fullmatch(rf"manylinux_(\d+)_(\d+)_{machine}", tag)
    family, version = platform.libc_ver()
    return (
        bool(found) and family == "glibc" and (int(found[1]), int(found[2])) <= tuple(map(int, version.split(".")[:2]))
    )


def _place(content: bytes) -> None:
    """Write the library in one move, so that a process that has the old one mapped keeps it intact."""
    path = library_path()
    new = path.with_name(f"{path.name}.new")
    new.write_bytes(content)
    new.replace(path)


def compile_library(wanted: str, progress: Progress, phase: Phase, programs: Path) -> str:
    """Configure and compile, and return what CMake says about the library."""
    path = os.pathsep.join((str(programs), os.environ.get("PATH", "")))
    cmake = shutil.which("cmake", path=path)
    if cmake is None:
        raise Failed(
            "There is no cmake, which builds the native library. `make install` fetches it where there is none."
        )
    environment = {"PATH": path}
    if shutil.which("ninja", path=path):
        environment["CMAKE_GENERATOR"] = "Ninja"
    BUILD.mkdir(parents=True, exist_ok=True)
    levels = "" if wanted == "all" else wanted.replace(" ", ";")
    configure = [
        cmake,
        "-S",
        KERNELS / "csrc",
        "-B",
        BUILD,
        "-DARMATURE_INPLACE=ON",
        f"-DARMATURE_ONLY_LEVELS={levels}",
    ]
    try:
        said = progress.run(phase, configure, environment)
    except Failed:  # the cache may be another generator's, or of a folder that has moved
        for left in [*BUILD.glob("CMake*")]:
            shutil.rmtree(left) if left.is_dir() else left.unlink()
        said = progress.run(phase, configure, environment)
    phase.detail = "compiling"
    progress.run(phase, [cmake, "--build", BUILD, "--parallel", str(_cores())], environment)
    if library_path().exists():
        phase.name = f"native library ({' '.join(levels_of(library_path()))})"
    return "; ".join(_sentences(said))


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def levels_of(library: Path) -> list[str]:
    """Return the levels that a library has, the best first."""
    found = _LEVELS.search(library.read_bytes())
    return found[1].decode().split() if found else []


def _sentences(said: list[str]) -> Iterator[str]:
    """Yield what CMakeLists.txt says of a library that is not complete."""
    for line in said:
        name, _, sentence = line.partition("-- Armature: ")
        if not name and not sentence.startswith("native library for"):
            yield sentence


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
