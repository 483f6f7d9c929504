"""Build manylinux wheels in dist/: `python -m tools.wheels [--sdist] [ARCHITECTURE ...]`.

Builds for this machine, and for 64-bit Arm if a cross compiler is present; with `--sdist` the source archive too. The
platform tag is the oldest C library that the native library's symbols allow. The wheel must not contain an OpenMP
runtime, because torch brings the only one.
auditwheel does not replace it: it would copy libgomp into the wheel, and two OpenMP runtimes in a process slow each
other down; excluding libgomp skips the check of its symbol versions, which matter because torch's libgomp is old.
cibuildwheel builds in containers per Python version, but these wheels do not depend on the Python version and are
cross-compiled.
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
LIBRARY = "armature_kernels/libarmature.so"
SDIST = "--sdist"
# Libraries that every Linux has or that torch has loaded before. A wheel would have to contain any other library.
MAY_NEED = {"libc.so.6", "libm.so.6", "libgomp.so.1", "ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}
OLDEST_GLIBC = (2, 17)  # the oldest manylinux tag that pip knows for both architectures
# The newest symbols of libgomp in the wheels: 2.10 for x86-64 (CUDA) and arm64, 2.13 for x86-64 (CPU).
TORCH_GOMP = (5, 0)


class Unfit(Exception):
    """A wheel that would not run on the platform of its tag."""


def main() -> int:
    if platform.system() != "Linux":
        print(
            "wheels: manylinux wheels can only be built on Linux; `make build` builds one for this machine",
            file=sys.stderr,
        )
        return 1
    machine = platform.machine()
    named = [each for each in sys.argv[1:] if each != SDIST]
    if unknown := set(named) - {machine, "aarch64"}:
        print(f"wheels: {machine} cannot build wheels for {', '.join(sorted(unknown))}", file=sys.stderr)
        return 1
    machines = named or [machine]
    if not named and machine != "aarch64":
        if shutil.which("aarch64-linux-gnu-gcc"):
            machines.append("aarch64")
        else:
            print(
                "wheels: gcc-aarch64-linux-gnu is missing, so no wheel for aarch64; `make cross` names the packages",
                file=sys.stderr,
            )
    try:
        if SDIST in sys.argv[1:]:
            print(source_archive(DIST))
        for each in machines:
            print(build(each, cross=each != machine, folder=DIST))
    except (Unfit, subprocess.CalledProcessError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


def source_archive(folder: Path) -> Path:
    """Build the source archive. pip has no command for it, so the build backend is asked."""
    folder.mkdir(exist_ok=True)
    ask = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(folder)!r}))"
    said = subprocess.run([sys.executable, "-c", ask], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return folder / said.split()[-1]


def build(machine: str, cross: bool, folder: Path) -> Path:
    """Build one wheel for `machine`, tagged with the oldest C library that it runs on."""
    with tempfile.TemporaryDirectory() as work:
        options = [f"--config-settings=wheel.tags=py3-none-linux_{machine}"]
        if cross:
            options.append(f"--config-settings=cmake.toolchain-file={TOOLCHAIN}")
        pip = [sys.executable, *"-m pip wheel -q --no-deps --no-build-isolation -w".split(), work]
        subprocess.run([*pip, *options, str(ROOT)], check=True)
        (wheel,) = Path(work).glob("*.whl")
        tag = platform_tag(wheel, machine, Path(work))
        command = [sys.executable, "-m", "wheel", "tags", "--remove", "--platform-tag", tag, str(wheel)]
        subprocess.run(command, check=True, capture_output=True)
        (wheel,) = Path(work).glob("*.whl")
        folder.mkdir(exist_ok=True)
        for other in folder.glob("-".join(wheel.name.split("-")[:2]) + f"-*_{machine}.whl"):
            other.unlink()  # same version and machine, possibly another C library
        return Path(shutil.copy(wheel, folder))


def platform_tag(wheel: Path, machine: str, work: Path) -> str:
    """Return the platform tag, for example `manylinux_2_17_x86_64`.

    Raises `Unfit` if the wheel contains or needs other libraries, or newer symbols than torch's libgomp has.
    """
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
        raise Unfit(f"the native library needs GOMP_{'.'.join(map(str, newest))}, newer than torch's libgomp")
    glibc = max(versions["GLIBC"] | {OLDEST_GLIBC})
    return f"manylinux_{glibc[0]}_{glibc[1]}_{machine}"


def needs(library: Path) -> tuple[set[str], dict[str, set[tuple[int, ...]]]]:
    """Return the libraries that it links to, and the versions of their symbols that it uses, by family."""
    said = subprocess.run(["readelf", "-W", "-d", "-V", library], check=True, capture_output=True, text=True).stdout
    versions: dict[str, set[tuple[int, ...]]] = {"GLIBC": set(), "GOMP": set()}
    for family, version in re.findall(r"Name: (GLIBC|GOMP|OMP)_([0-9.]+)", said):
        versions["GOMP" if family == "OMP" else family].add(tuple(map(int, version.split("."))))
    return set(re.findall(r"\(NEEDED\).*\[(.+)\]", said)), versions


if __name__ == "__main__":
    sys.exit(main())
