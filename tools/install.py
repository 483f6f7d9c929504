"""Create the virtual environment of the Makefile: `python -m tools.install .venv {runtime,bench,dev}`.

Needs only the standard library, because it runs before anything is installed. It chooses torch's build for this
machine; requirements/*.txt pin everything, and what serving needs by the hashes of its wheels. A second run changes
only what is out of date. The native library is compiled meanwhile (tools/native.py). uv installs the packages if it is
on the PATH, and pip what uv does not find: uv does not read pip's configuration, which on machines without internet
names a local folder of wheels. `uv sync` does not replace this module: its lock file cannot choose torch's CPU or CUDA
build by the hardware that is found.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import urllib.request
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tools import native
from tools.progress import Failed, Phase, Progress

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TORCH_CPU = f"{TORCH}+cpu"  # a build of torch's CPU index
# On PyPI, torch for 64-bit Arm Linux is a CPU build up to this version, and a CUDA build of several GB after it.
TORCH_ARM_LINUX = "torch==2.10.0"
TORCH_HASHES = ROOT / "requirements" / "torch-hashes.txt"
CMAKE = (3, 22)  # the minimum version in armature_kernels/csrc/CMakeLists.txt
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_SECONDS = 3.0
KINDS = ("runtime", "bench", "dev")  # each includes the ones before it
# A module is compiled when it is first imported. Where Python may not write bytecode then, it is compiled now, or each
# start of the server would compile torch.
PIP_BYTECODE = () if sys.dont_write_bytecode else ("--no-compile",)
UV_BYTECODE = ("--compile-bytecode",) if sys.dont_write_bytecode else ()


def main(arguments: list[str]) -> int:
    """Return 0 when the environment is complete, and 1 after printing a sentence when it cannot be created."""
    if len(arguments) != 2 or arguments[1] not in KINDS:
        print(__doc__, file=sys.stderr)
        return 2
    venv, kind = Path(arguments[0]), arguments[1]
    try:
        install(venv, kind)
    except Failed as failure:
        print(failure, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted. The same command goes on from here.", file=sys.stderr)
        return 130
    return 0


def install(venv: Path, kind: str) -> None:
    """Create the environment if needed, install the pins and the project, and write a stamp for make.

    Raises a `Failed` that says what is missing and how to get it.
    """
    pool = ThreadPoolExecutor(3)
    index = pool.submit(cpu_index_answers).result  # asked now, waited for when it is needed
    programs = venv / "bin"
    with Progress(5) as progress:

        def start_library() -> Future[None]:
            return pool.submit(native.make, "here", progress, programs.absolute())

        missing = build_tools()
        library = None if missing else start_library()
        with progress.phase("environment") as phase:
            installer = make_venv(venv, progress, phase)
            if missing:
                installer.install(phase, "--only-binary=:all:", *missing)
        library = library or start_library()
        install_packages(installer, kind, index, pool)
        with progress.phase("project") as phase:
            install_project(installer, phase)
        library.result()
    for stamp in KINDS[: KINDS.index(kind) + 1]:
        (venv / f"{stamp}.stamp").touch()


def install_packages(installer: Installer, kind: str, index: Callable[[], bool], pool: ThreadPoolExecutor) -> None:
    """Install what the project needs, with torch's build for this machine.

    torch is half of all bytes, and pip unpacks with one core, so the other packages are installed at the same time.
    """
    requirement, options, reason = choose_torch(
        platform.system(), platform.machine(), has_nvidia_gpu(), index, lambda: pip_finds(installer.python, TORCH_CPU)
    )
    installer.progress.say(f"{requirement}: {reason}.")
    requirements = ROOT / "requirements"
    by_hash = ("--no-deps", "--only-binary=:all:", "--require-hashes")

    def install_torch() -> None:
        with tempfile.TemporaryDirectory() as folder, installer.progress.phase("torch") as phase:
            line = Path(folder) / "torch.txt"
            line.write_text(torch_line(requirement), encoding="utf-8")
            installer.install(phase, *by_hash, *options, "-r", str(line), alone=True)

    torch = pool.submit(install_torch)
    with installer.progress.phase("packages") as phase:
        installer.install(phase, *by_hash, "-r", str(requirements / "runtime-hashes.txt"))
        torch.result()
        # What has no hashes: NVIDIA's libraries, whose versions torch's own wheel pins, and what measuring and
        # developing need.
        if kind != "runtime" or (requirement == TORCH and platform.system() == "Linux"):
            installer.install(phase, *options, requirement, "-r", str(requirements / f"{kind}.txt"))


def install_project(installer: Installer, phase: Phase) -> None:
    """Install the checkout as it stands. Its build tools are among the pins, so this downloads nothing."""
    # The distribution's former name, which on PyPI is another project's.
    if any(installer.python.parents[1].glob("lib/*/site-packages/armature-*.dist-info")):
        installer.pip(phase, "uninstall", "-y", "armature")
    # The library is compiled by tools/native.py.
    build = ("-C", "build-dir=build/editable", "-C", "cmake.define.ARMATURE_COMPILE=OFF")
    installer.pip(phase, "install", "--no-deps", "--no-build-isolation", *build, "-e", str(ROOT))


@dataclass(slots=True)
class Installer:
    """Installs packages into one environment: by uv if there is one, and by pip what uv cannot install."""

    python: Path
    uv: str | None
    progress: Progress

    def install(self, phase: Phase, *arguments: str, alone: bool = False) -> None:
        """Install. `alone`: if uv fails, it is asked again for other packages. Raises `Failed` if pip fails too."""
        if self.uv:
            # By hashes, so it does not matter which index a wheel comes from.
            command = [self.uv, "pip", "install", "--python", str(self.python), "--index-strategy=unsafe-best-match"]
            try:
                self.progress.run(phase, [*command, *UV_BYTECODE, *arguments])
                return
            except Failed:
                self.uv = self.uv if alone else None
        self.pip(phase, "install", *arguments)

    def pip(self, phase: Phase, *arguments: str) -> None:
        """Run pip with this machine's configuration."""
        options = pip_options(self.python) if arguments[0] == "install" else []
        self.progress.run(phase, [str(self.python), "-m", "pip", arguments[0], *options, *arguments[1:]])


def pip_options(python: Path) -> list[str]:
    """Return options of `pip install`: bytecode, and progress as lines."""
    found = [re.search(r"pip-(\d+)\.(\d+)", path.name) for path in python.parents[1].glob("lib/*/site-packages/pip-*")]
    version = max(((int(each[1]), int(each[2])) for each in found if each), default=(0, 0))
    return [*PIP_BYTECODE, *(["--progress-bar=raw"] if version >= (24, 1) else [])]


def torch_line(requirement: str) -> str:
    """Return the requirement with the hashes of its wheels. One that is installed already is not checked."""
    lines = TORCH_HASHES.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{requirement} "))


def make_venv(venv: Path, progress: Progress, phase: Phase) -> Installer:
    """Return what installs into the environment. An incomplete one, for example without pip, is created again."""
    python, uv = venv / "bin" / "python", shutil.which("uv")
    installer = Installer(python, uv, progress)
    if python.exists() and succeeds([python, "-c", "import pip"]):
        return installer
    # With pip, for what uv does not find and for `make build`.
    if uv and succeeds([uv, "venv", "-q", "--seed", "--clear", "--python", sys.executable, venv]):
        return installer
    if importlib.util.find_spec("ensurepip") is None:  # Debian and Ubuntu leave it out of python3
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Failed(
            f"Python {version} at {sys.executable} has no ensurepip, which a virtual environment needs. "
            f"On Debian and Ubuntu: sudo apt install python{version}-venv"
        )
    create = [sys.executable, "-m", "venv", "--clear", str(venv)]
    if wheel := pip_wheel():
        # pip installs itself from its wheel, as ensurepip would, but compiles nothing: 3 seconds instead of 10.
        progress.run(phase, [*create, "--without-pip"])
        options = ("--no-index", "--no-deps", *PIP_BYTECODE)
        progress.run(phase, [python, "-m", "pip", "install", *options, wheel], {"PYTHONPATH": str(wheel)})
    else:
        progress.run(phase, create)
    return installer


def pip_wheel() -> Path | None:
    """Return the wheel of pip that this Python brings for new environments."""
    packages = importlib.util.find_spec("ensurepip")
    folders = [Path(folder) for folder in [sysconfig.get_config_var("WHEEL_PKG_DIR")] if folder]
    folders += [Path(packages.origin).parent / "_bundled"] if packages and packages.origin else []
    return next((wheel for folder in folders for wheel in sorted(folder.glob("pip-*.whl"))), None)


def succeeds(command: Sequence[str | Path]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def choose_torch(
    system: str,
    machine: str,
    gpu: bool,
    index_answers: Callable[[], bool],
    has_cpu_build: Callable[[], bool] = lambda: False,
) -> tuple[str, list[str], str]:
    """Return torch's requirement, pip options and the reason.

    `index_answers` and `has_cpu_build`, which looks where pip is configured to look, are called only if needed.
    """
    arm_linux = system == "Linux" and machine in ("aarch64", "arm64")
    if system == "Darwin":
        if machine != "arm64":
            raise Failed("torch has had no builds for Intel Macs since 2.2; Armature needs 2.10 or newer.")
        return TORCH, [], "on macOS there is one build, with MPS"
    if gpu:
        return TORCH, [], "there is an NVIDIA GPU, and PyPI has the CUDA build"
    if index_answers():
        return TORCH_CPU, ["--extra-index-url", CPU_INDEX], f"no NVIDIA GPU here, and {CPU_INDEX} has the CPU build"
    # By name, because pip prefers a wheel whose hash an index names, PyPI's CUDA build, to a file in a local folder.
    if has_cpu_build():
        return TORCH_CPU, [], f"{CPU_INDEX} does not answer; what pip is configured with has the CPU build"
    if arm_linux:
        return TORCH_ARM_LINUX, [], f"{CPU_INDEX} does not answer; this is the last CPU build for 64-bit Arm on PyPI"
    return TORCH, [], f"{CPU_INDEX} does not answer; pip uses its own configuration"


def pip_finds(python: Path, requirement: str) -> bool:
    """Return True if pip has a wheel for NAME==VERSION, or it is installed. Nothing is downloaded."""
    name, _, version = requirement.partition("==")
    command = [str(python), "-m", "pip", "index", "versions", "--only-binary=:all:", name]
    said = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return version in re.split(r"[\s,]+", said)


def build_tools() -> list[str]:
    """Return the pins of cmake and ninja if this machine has no suitable ones.

    A C compiler must be present already. Without one the server uses torch's products.
    """
    found = shutil.which("cmake")
    if found and (shutil.which("ninja") or shutil.which("make")):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"version (\d+)\.(\d+)", said)
        if version and (int(version[1]), int(version[2])) >= CMAKE:
            return []
    return ["-r", str(ROOT / "requirements" / "cmake.txt")]


def has_nvidia_gpu() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def cpu_index_answers() -> bool:
    """Send one request to torch's CPU index with a timeout.

    The request runs in a thread because name resolution ignores a socket's timeout.
    """
    answered: list[bool] = []

    def ask() -> None:
        try:
            request = urllib.request.Request(f"{CPU_INDEX}/torch/", method="HEAD")
            with urllib.request.urlopen(request, timeout=INDEX_SECONDS) as response:
                answered.append(response.status == 200)
        except OSError:
            pass

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(INDEX_SECONDS)
    return answered == [True]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
