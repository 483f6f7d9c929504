"""The peers' tests, from the source packages that the peers publish on PyPI.

pip downloads the packages; nothing is built. pip asks the build backend of a source package for its metadata, and the
real backends need compilers. So pip gets a backend of ours that copies the metadata which the package already has.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

BACKEND = """
from email.parser import HeaderParser
from pathlib import Path


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    written = Path("PKG-INFO").read_text(encoding="utf-8")
    headers = HeaderParser().parsestr(written)
    folder = Path(metadata_directory) / f"{headers['Name'].replace('-', '_')}-{headers['Version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(written, encoding="utf-8")
    return folder.name
"""


@dataclass(frozen=True, slots=True)
class Package:
    """A source package: its requirement, the module of its build backend, and its folders: the tests, and other data."""

    requirement: str
    backend: str
    tests: str
    data: str = ""


LLAMA_CPP = Package(
    "llama-cpp-python==0.3.36",
    "scikit_build_core.build",
    "vendor/llama.cpp/tools/server/tests",
    "vendor/llama.cpp/models/templates",
)
VLLM = Package("vllm==0.33.0", "setuptools.build_meta", "tests")


def unpack_tests(package: Package, work: Path) -> Path:
    """Return the folder with the package's tests in `work`, downloaded if it is not there. Raises `SystemExit`."""
    name = package.requirement.replace("==", "-").replace("-cpp-python", "_cpp_python")
    folder = work / name / package.tests
    if not folder.is_dir():
        archive = work / f"{name}.tar.gz"
        if not archive.is_file():
            download(package, work)
        with tarfile.open(archive) as opened:
            starts = tuple(f"{name}/{path}/" for path in (package.tests, package.data) if path)
            wanted = [member for member in opened if member.name.startswith(starts)]
            opened.extractall(work, wanted, filter="data")
    return folder


def download(package: Package, work: Path) -> None:
    """Let pip download the package into `work` without building it."""
    stub = work / "backend"
    module = stub.joinpath(*package.backend.split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True, exist_ok=True)
    (module.parent / "__init__.py").touch()
    module.write_text(BACKEND, encoding="utf-8")
    options = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", str(work)]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, package.requirement]
    print(f"downloading {package.requirement} ...", file=sys.stderr, flush=True)
    if subprocess.run(command, env=os.environ | {"PYTHONPATH": str(stub)}, check=False).returncode:
        raise SystemExit(f"suites: pip cannot get {package.requirement}: see its message above")
    shutil.rmtree(stub)


def interpreter(folder: Path, requirements: list[str]) -> Path:
    """Return an interpreter of the environment in `folder` that sees this environment's packages and the given ones.

    Raises `SystemExit`.
    """
    python = folder / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        # Older versions take many minutes to find versions of the clients that agree.
        subprocess.run([str(python), "-m", "pip", "install", "-q", "--upgrade", "pip"], check=False)
    scheme = {"base": str(folder), "platbase": str(folder)}
    packages = Path(sysconfig.get_path("purelib", vars=scheme))
    (packages / "base.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    command = [str(python), "-m", "pip", "install", "-q", *requirements]
    if requirements and subprocess.run(command, check=False).returncode:
        raise SystemExit("suites: pip cannot install the clients: see its message above")
    return python


def programs(work: Path, packages: Sequence[str]) -> list[Path]:
    """Return environments in `work` with the commands of packages. What pip cannot install is named and left out."""
    folders = []
    for package in packages:
        folder = work / "programs" / package
        if not (folder / "bin" / "python").exists():
            subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        command = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q", "--upgrade", package]
        if subprocess.run(command, check=False).returncode:
            print(f"suites: pip cannot install {package}, whose tests are skipped", file=sys.stderr)
        folders.append(folder)
    return folders


def node_modules(work: Path, packages: Sequence[str]) -> Path | None:
    """Return the folder with npm's packages in `work`, or None without npm or without packages.

    What npm cannot install is named and left out.
    """
    npm = shutil.which("npm")
    if npm is None or not packages:
        return None
    folder = work / "node"
    folder.mkdir(exist_ok=True)
    command = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    if subprocess.run([*command, *packages], check=False).returncode:
        for package in packages:
            if subprocess.run([*command, package], check=False).returncode:
                print(f"suites: npm cannot install {package}, whose tests are skipped", file=sys.stderr)
    return folder / "node_modules"


def node_versions(modules: Path | None, packages: Sequence[str]) -> dict[str, str]:
    names = [package[0] + package[1:].partition("@")[0] for package in packages]
    files = {name: modules / name / "package.json" for name in names} if modules else {}
    return {
        name: json.loads(file.read_text(encoding="utf-8"))["version"] for name, file in files.items() if file.is_file()
    }


def python_versions(folder: Path, requirements: Sequence[str]) -> dict[str, str]:
    scheme = {"base": str(folder), "platbase": str(folder)}
    where = [sysconfig.get_path("purelib", vars=scheme)]
    names = [re.split(r"[\[=<> ]", requirement)[0] for requirement in requirements]
    return {name: each.version for name in names for each in distributions(name=name, path=where)}
