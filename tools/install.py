"""Makes the virtual environment that the Makefile uses: `python tools/install.py .venv {runtime,bench,dev}`. Standard library only.

Chooses torch's build for this machine; everything else stands in requirements/*.txt. Run again, it changes only what is out of date.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
# On PyPI, torch for 64-bit Arm Linux is a CPU build up to this version and a CUDA build of several GB after it.
TORCH_ARM_LINUX = "torch==2.10.0"
CMAKE = (3, 22)  # app/kernels/csrc/CMakeLists.txt
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_SECONDS = 3.0
KINDS = ("runtime", "bench", "dev")  # each holds what stands before it


def main(arguments: list[str]) -> int:
    """Exit status 0 when the environment stands, 1 with a sentence when it cannot."""
    if len(arguments) != 2 or arguments[1] not in KINDS:
        print(__doc__, file=sys.stderr)
        return 2
    venv, kind = Path(arguments[0]), arguments[1]
    try:
        install(venv, kind)
    except Refusal as refusal:
        print(refusal, file=sys.stderr)
        return 1
    return 0


class Refusal(Exception):
    """What is missing and what would mend it."""


def install(venv: Path, kind: str) -> None:
    """Creates the environment where it is not, installs the pins and the project itself, and leaves a stamp for make."""
    python = make_venv(venv)
    requirement, options, reason = choose_torch(
        platform.system(), platform.machine(), has_nvidia_gpu(), cpu_index_answers
    )
    print(f"{requirement}: {reason}.", flush=True)
    print(f"Installing what {kind} needs into {venv} ...", flush=True)
    pins = ROOT / "requirements" / f"{kind}.txt"
    pip(python, "install", "-q", *options, requirement, "-r", str(pins), *build_tools())
    # What builds the project is among the pins, so this fetches nothing more. The build folder is kept: `make native` goes on from there.
    pip(python, "install", "-q", "--no-deps", "--no-build-isolation", "-C", "build-dir=build/native", "-e", str(ROOT))
    for stamp in KINDS[: KINDS.index(kind) + 1]:
        (venv / f"{stamp}.stamp").touch()


def make_venv(venv: Path) -> Path:
    """The environment's interpreter. A half-made environment, such as one without pip, is made again."""
    python = venv / "bin" / "python"
    if (
        python.exists()
        and subprocess.run([python, "-c", "import pip"], capture_output=True, check=False).returncode == 0
    ):
        return python
    if importlib.util.find_spec("ensurepip") is None:  # Debian and Ubuntu leave it out of python3
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise Refusal(
            f"Python {version} at {sys.executable} has no ensurepip, which a virtual environment needs. "
            f"On Debian and Ubuntu: sudo apt install python{version}-venv"
        )
    print(f"Making {venv} with Python {platform.python_version()} ...", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    return python


def choose_torch(system: str, machine: str, gpu: bool, index_answers: Callable[[], bool]) -> tuple[str, list[str], str]:
    """Requirement, pip options and reason. `index_answers` is asked only where the answer matters."""
    arm_linux = system == "Linux" and machine in ("aarch64", "arm64")
    if system == "Darwin":
        if machine != "arm64":
            raise Refusal("torch has had no builds for Intel Macs since 2.2; Armature needs 2.10 or newer.")
        return TORCH, [], "on macOS there is one build, with MPS"
    if gpu:
        return TORCH, [], "there is an NVIDIA GPU, and PyPI has the CUDA build"
    if index_answers():
        return TORCH, ["--extra-index-url", CPU_INDEX], f"no NVIDIA GPU here, and {CPU_INDEX} has the CPU build"
    if arm_linux:
        return TORCH_ARM_LINUX, [], f"{CPU_INDEX} does not answer; this is PyPI's last CPU build for 64-bit Arm"
    return TORCH, [], f"{CPU_INDEX} does not answer; pip takes what its own configuration offers"


def build_tools() -> list[str]:
    """Pins of cmake and ninja where this machine has none that will do; a C compiler it must have itself, or torch's products serve."""
    found = shutil.which("cmake")
    if found and (shutil.which("ninja") or shutil.which("make")):
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
        version = re.search(r"version (\d+)\.(\d+)", said)
        if version and (int(version[1]), int(version[2])) >= CMAKE:
            return []
    return ["-r", str(ROOT / "requirements" / "cmake.txt")]


def has_nvidia_gpu() -> bool:
    """True where the driver or its tool says so."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def cpu_index_answers() -> bool:
    """One request, given up after a few seconds. In a thread, since looking up a name ignores a socket's timeout."""
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


def pip(python: Path, *arguments: str) -> None:
    """Runs pip as it is configured on this machine."""
    result = subprocess.run([str(python), "-m", "pip", *arguments], check=False)
    if result.returncode != 0:
        raise Refusal(
            f"pip could not install ({' '.join(arguments[:1])} ended with {result.returncode}); its reason stands above."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
