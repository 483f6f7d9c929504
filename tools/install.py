"""Create the virtual environment of the Makefile: `python tools/install.py .venv {runtime,bench,dev}`.

Needs only the standard library, because it runs before anything is installed. It chooses torch's build for this
machine; requirements/*.txt pin everything, and what serving needs by the hashes of its wheels. A second run changes
only what is out of date. `uv sync` does not replace it: uv would have to be installed first, it does not read pip's
configuration, which on machines without internet names a local folder of wheels, and its lock file cannot choose
torch's CPU or CUDA build by the hardware that is found.
"""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TORCH = "torch==2.13.0"
TORCH_CPU = f"{TORCH}+cpu"  # a build of torch's CPU index
# On PyPI, torch for 64-bit Arm Linux is a CPU build up to this version, and a CUDA build of several GB after it.
TORCH_ARM_LINUX = "torch==2.10.0"
TORCH_HASHES = ROOT / "requirements" / "torch-hashes.txt"
CMAKE = (3, 22)  # the minimum version in app/kernels/csrc/CMakeLists.txt
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_SECONDS = 3.0
KINDS = ("runtime", "bench", "dev")  # each includes the ones before it


def main(arguments: list[str]) -> int:
    """Return 0 when the environment is complete, and 1 after printing a sentence when it cannot be created."""
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
    """The installation cannot continue. The message says what is missing and how to get it."""


def install(venv: Path, kind: str) -> None:
    """Create the environment if needed, install the pins and the project, and write a stamp for make."""
    python = make_venv(venv)
    requirement, options, reason = choose_torch(
        platform.system(), platform.machine(), has_nvidia_gpu(), cpu_index_answers
    )
    print(f"{requirement}: {reason}.", flush=True)
    print(f"Installing what {kind} needs into {venv} ...", flush=True)
    requirements = ROOT / "requirements"
    # By hash. The second command finds these packages installed, and adds what has no hashes: NVIDIA's libraries, whose
    # versions torch's own wheel pins, and what measuring and developing need.
    with tempfile.TemporaryDirectory() as folder:
        torch = Path(folder) / "torch.txt"
        torch.write_text(torch_line(requirement), encoding="utf-8")
        hashed = ["-r", str(requirements / "runtime-hashes.txt"), "-r", str(torch)]
        pip(python, "install", "-q", "--no-deps", "--only-binary=:all:", "--require-hashes", *options, *hashed)
    pip(python, "install", "-q", *options, requirement, "-r", str(requirements / f"{kind}.txt"), *build_tools())
    # The build tools are among the pins, so this downloads nothing. The build folder is kept, and `make native`
    # continues from it.
    pip(python, "install", "-q", "--no-deps", "--no-build-isolation", "-C", "build-dir=build/native", "-e", str(ROOT))
    for stamp in KINDS[: KINDS.index(kind) + 1]:
        (venv / f"{stamp}.stamp").touch()


def torch_line(requirement: str) -> str:
    """Return the requirement with the hashes of its wheels. One that is installed already is not checked."""
    lines = TORCH_HASHES.read_text(encoding="utf-8").splitlines()
    return next(line for line in lines if line.startswith(f"{requirement} "))


def make_venv(venv: Path) -> Path:
    """Return the environment's interpreter.

    An incomplete environment, for example one without pip, is created again.
    """
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
    """Return torch's requirement, pip options and the reason. `index_answers` is called only if the answer matters."""
    arm_linux = system == "Linux" and machine in ("aarch64", "arm64")
    if system == "Darwin":
        if machine != "arm64":
            raise Refusal("torch has had no builds for Intel Macs since 2.2; Armature needs 2.10 or newer.")
        return TORCH, [], "on macOS there is one build, with MPS"
    if gpu:
        return TORCH, [], "there is an NVIDIA GPU, and PyPI has the CUDA build"
    if index_answers():
        return TORCH_CPU, ["--extra-index-url", CPU_INDEX], f"no NVIDIA GPU here, and {CPU_INDEX} has the CPU build"
    if arm_linux:
        return TORCH_ARM_LINUX, [], f"{CPU_INDEX} does not answer; this is the last CPU build for 64-bit Arm on PyPI"
    return TORCH, [], f"{CPU_INDEX} does not answer; pip uses its own configuration"


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
    """Return True if the driver or nvidia-smi is present."""
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


def pip(python: Path, *arguments: str) -> None:
    """Run pip with this machine's configuration."""
    result = subprocess.run([str(python), "-m", "pip", *arguments], check=False)
    if result.returncode != 0:
        raise Refusal(
            f"pip could not install ({' '.join(arguments[:1])} ended with {result.returncode}); see its output above."
        )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
