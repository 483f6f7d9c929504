"""Builds wheels in dist/ that say where they run: `python -m tools.wheels`. For this machine, and for 64-bit Arm given a cross compiler;
or for those named alone: `python -m tools.wheels aarch64`.

The oldest C library is the one whose symbols the native library asks for. It must bring no OpenMP runtime: torch brings the only one.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
TOOLCHAIN = ROOT / "cmake" / "aarch64-linux-gnu.cmake"
LIBRARY = "app/kernels/libarmature.so"
# What every Linux has, and what torch has loaded before us. Anything else would have to be carried along.
MAY_NEED = {"libc.so.6", "libm.so.6", "libgomp.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OLDEST_GLIBC = (2, 17)  # of the manylinux names that pip knows for both architectures
TORCH_GOMP = (
    5,
    0,
)  # the newest symbols of libgomp in the wheels: 2.10 for x86-64 (CUDA) and arm64, 2.13 for x86-64 (CPU)


class Unfit(Exception):
    """A wheel that would not run where it says."""


def main() -> int:
    """Builds one wheel an architecture."""
    if platform.system() != "Linux":
        print("wheels: manylinux wheels are made on Linux; `make build` makes one for this machine", file=sys.stderr)
        return 1
    machine, named = platform.machine(), sys.argv[1:]
    if unknown := set(named) - {machine, "aarch64"}:
        print(f"wheels: {machine} makes none for {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    machines = named or [machine]
    if not named and machine != "aarch64":
        if shutil.which("aarch64-linux-gnu-gcc"):
            machines.append("aarch64")
        else:
            print("wheels: none for aarch64 without gcc-aarch64-linux-gnu; `make cross` says more", file=sys.stderr)
    try:
        for each in machines:
            print(build(each, cross=each != machine, folder=DIST))
    except (Unfit, subprocess.CalledProcessError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


def build(machine: str, cross: bool, folder: Path) -> Path:
    """One wheel for `machine`, tagged with the oldest C library that it runs on."""
    with tempfile.TemporaryDirectory() as work:
        options = [f"--config-settings=wheel.tags=py3-none-linux_{machine}"]
        if cross:
            options.append(f"--config-settings=cmake.toolchain-file={TOOLCHAIN}")
        pip = [
            sys.executable,
            "-m",
            "pip",
            "wheel",
            "-q",
            "--no-deps",
            "--no-build-isolation",
            "-w",
            work,
            *options,
            str(ROOT),
        ]
        subprocess.run(pip, check=True)
        (wheel,) = Path(work).glob("*.whl")
        tag = platform_tag(wheel, machine, Path(work))
        command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(work).glob("*.whl")
        folder.mkdir(exist_ok=True)
        for other in folder.glob("-".join(wheel.name.split("-")[:2]) + f"-*_{machine}.whl"):
            other.unlink()  # of this version and machine, perhaps for another C library
        return Path(shutil.copy(wheel, folder))


def platform_tag(wheel: Path, machine: str, work: Path) -> str:
    """`manylinux_2_17_x86_64` and its kin, or Unfit."""
    with zipfile.ZipFile(wheel) as archive:
        binaries = [name for name in archive.namelist() if ".so" in name]
        if binaries != [LIBRARY]:
            raise Unfit(f"{wheel.name} should hold {LIBRARY} and no other library, and holds {binaries or 'none'}")
        library = Path(archive.extract(LIBRARY, work))
    needed, versions = needs(library)
    if needed - MAY_NEED:
        raise Unfit(f"the native library needs {sorted(needed - MAY_NEED)}, which not every Linux has")
    newest = max(versions["GOMP"], default=(0,))
    if newest > TORCH_GOMP:
        raise Unfit(f"the native library wants GOMP_{'.'.join(map(str, newest))}, newer than what torch brings")
    glibc = max(versions["GLIBC"] | {OLDEST_GLIBC})
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def needs(library: Path) -> tuple[set[str], dict[str, set[tuple[int, ...]]]]:
    """Libraries that it names, and the versions of their symbols that it uses, by family."""
    said = subprocess.run(["readelf", "-W", "-d", "-V", library], check=True, capture_output=True, text=True).stdout
    versions: dict[str, set[tuple[int, ...]]] = {"GLIBC": set(), "GOMP": set()}
    for family, version in re.findall(r"Name: (GLIBC|GOMP|OMP)_([0-9.]+)", said):
        versions["GOMP" if family == "OMP" else family].add(tuple(map(int, version.split("."))))
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", said)), versions


if __name__ == "__main__":
    sys.exit(main())
