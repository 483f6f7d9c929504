"""On which device to serve: the fastest kind that is here, built and suited, and of several GPUs which; what is not taken is told why.

One process serves on one device. How much of its memory is left is worked out in `device_memory`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import Decision, RecipeKey, count, gib
from app.hardware.facts import CudaDevice, Facts, Needs
from app.hardware.precision import what_exists
from app.settings import Settings

LEAST_CAPABILITY = (8, 0)  # Ampere: the first that multiplies BF16; torch's int4 products and our kernels ask for it
_LEAST_DARWIN = 23  # macOS 14: the first whose Metal has BF16, and the oldest that torch's wheels for Macs run on
# The oldest driver for each CUDA (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility).
_LEAST_DRIVER = {"12": 525, "13": 580}
DEVICE_KERNELS: Mapping[str, str] = {"cuda": "triton", "mps": "metal"}
_PROGRAMS = "exported programs are served on processors"


@dataclass(frozen=True, slots=True)
class Devices:
    """`gpu` is what `cuda_device` names; None on every other kind of device."""

    device: Decision[str]
    cuda_device: Decision[int | None]
    gpu: CudaDevice | None = None


def decide(facts: Facts, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]) -> Devices:
    """Raises `PlanImpossible` or `NoRecipe` where what is asked for cannot be."""
    built = frozenset(kind for kind, architecture, _ in recipes if architecture == facts.architecture)
    device = _forced(facts, settings.device, needs, built) if settings.device != "auto" else _best(facts, needs, built)
    if device is None:
        raise NoRecipe(
            f"Nothing is built for {facts.architecture}. {what_exists(recipes)}"
            if settings.device == "auto"
            else f"Serving on {settings.device} is not built yet. {what_exists(recipes)}"
        )
    if device.value == "cuda":
        return _with_gpu(facts, settings, device)
    if settings.cuda_device != "auto":
        raise PlanImpossible(
            f"cuda_device is {settings.cuda_device}, but device is {device.value}: {device.reason} Leave cuda_device at auto."
        )
    return Devices(device, Decision(None, "No GPU of NVIDIA serves."))


def instead(place: Devices, settings: Settings, refusal: str) -> Devices | None:
    """The processor, where nobody asked for the device on which what is asked cannot be; None: there is nothing else."""
    if place.device.value == "cpu" or settings.device != "auto" or settings.cuda_device != "auto":
        return None
    name = place.gpu.name if place.gpu else "The Apple GPU"
    return Devices(
        Decision("cpu", f"{name} is here, but cannot do what is asked. {refusal}"), Decision(None, "No GPU of NVIDIA serves.")
    )


def visible(place: Devices) -> Decision[str | None]:
    """What CUDA_VISIBLE_DEVICES says, so that the process sees its own device alone: torch's number of it is then 0.

    CUDA numbers the quickest first, nvidia-smi by bus; a name means the same to both, and nothing of ours lands on a neighbour's GPU.
    """
    if place.gpu is None:
        return Decision(None, "No GPU of NVIDIA serves.")
    return Decision(name_of(place.gpu), "The process is shown the GPU that it serves on, and no other.")


def name_of(gpu: CudaDevice) -> str:
    """To CUDA: a number only where the driver did not tell its name."""
    return gpu.uuid or str(gpu.index)


def kernels(kind: str) -> Decision[str]:
    """Whose kernels do what lies between a device's products."""
    if kind == "cuda":
        return Decision(
            DEVICE_KERNELS[kind],
            "Our own, compiled for this GPU when they are first used, and torch's; torch's alone where Triton or a C compiler is missing.",
        )
    return Decision(DEVICE_KERNELS[kind], "Torch's own for Apple GPUs.")


def kernel_folder(settings: Settings, kind: str) -> Decision[str | None]:
    """Where Triton keeps what it compiled."""
    folder = settings.cache_directory
    if kind != "cuda":
        return Decision(None, "Nothing is compiled for this device while it serves.")
    if folder is None:
        return Decision(None, "This user has no home; cache_dir would say where compiled kernels may be kept.")
    return Decision(str(folder / "triton"), "Compiling our kernels takes a minute: the next start finds them there.")


# ---- which kind --------------------------------------------------------------------------------------------------------


def _forced(facts: Facts, kind: str, needs: Needs | None, built: Collection[str]) -> Decision[str] | None:
    """None where it is not built."""
    if kind == "cuda" and not facts.cuda:
        raise PlanImpossible(
            "device is cuda, but neither nvidia-smi nor /proc/driver/nvidia names a GPU. Is the driver installed, and does "
            "CUDA_VISIBLE_DEVICES hide none?"
        )
    if kind == "mps" and not facts.mps:
        raise PlanImpossible("device is mps, but this is no Apple silicon Mac.")
    if kind not in built:
        return None
    unsuited = _unsuited(facts, kind, needs)
    if unsuited:
        raise PlanImpossible(f"device is {kind}, but {unsuited}. Leave device at auto, which serves on the processor.")
    old = _old_driver(facts) if kind == "cuda" else ""
    return Decision(
        kind, f"Asked for, though {old}: without NVIDIA's compatibility libraries this ends." if old else "Asked for."
    )


def _best(facts: Facts, needs: Needs | None, built: Collection[str]) -> Decision[str] | None:
    """None where nothing is built."""
    here = [
        (kind, name)
        for kind, name, present in (("cuda", _gpus(facts), bool(facts.cuda)), ("mps", "The Apple GPU (MPS)", facts.mps))
        if present
    ]
    passed = []
    for kind, name in here:
        why_not = "serving on it is not built yet" if kind not in built else _unsuited(facts, kind, needs)
        why_not = why_not or (_old_driver(facts) if kind == "cuda" else "")
        if not why_not:
            return Decision(kind, f"{name} is here and can be served on.")
        passed.append(f"{name} is here, but {why_not}.")
    return Decision("cpu", " ".join(passed) or "No other device is here.") if "cpu" in built else None


def _gpus(facts: Facts) -> str:
    return f"{len(facts.cuda)} × {facts.cuda[0].name}" if facts.cuda else ""


def _unsuited(facts: Facts, kind: str, needs: Needs | None) -> str:
    """Why nothing can be served there, as what follows "but"; empty where it can."""
    if kind == "cpu":
        return ""
    if needs is not None and needs.kind == "program":
        return _PROGRAMS
    if kind == "mps":
        release = facts.kernel.partition(".")[0]
        old = release.isdecimal() and int(release) < _LEAST_DARWIN
        return f"this macOS (Darwin {facts.kernel}) is older than 14, the first that is served on" if old else ""
    if facts.torch is not None and not facts.torch.cuda:
        return f"the installed torch ({facts.torch.version}) was built without CUDA"
    reasons = [_unsuited_gpu(gpu) for gpu in facts.cuda]
    return "" if not all(reasons) else reasons[0]


def _unsuited_gpu(gpu: CudaDevice) -> str:
    if gpu.mig == "":
        return "it is divided (MIG), and no instance of it can be seen: make one, or turn MIG off"
    if gpu.capability is None:
        return (
            "nobody says its compute capability: nvidia-smi is older than driver 510 or not here (in a container "
            "NVIDIA_DRIVER_CAPABILITIES must have utility)"
        )
    if gpu.capability < LEAST_CAPABILITY:
        return f"its compute capability is {_words(gpu.capability)}, and {_words(LEAST_CAPABILITY)} (Ampere) is the least"
    return ""


def _words(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _old_driver(facts: Facts) -> str:
    """Where torch's CUDA asks for a newer driver than this, that; else empty."""
    wanted = _LEAST_DRIVER.get((facts.torch.cuda or "").partition(".")[0]) if facts.torch else None
    driver = facts.cuda[0].driver or ""
    major = driver.partition(".")[0]
    if wanted is None or not major.isdecimal() or int(major) >= wanted:
        return ""
    assert facts.torch is not None, "it has a CUDA"
    return f"its driver ({driver}) is older than the {wanted} that torch for CUDA {facts.torch.cuda} asks for"


# ---- which of several ----------------------------------------------------------------------------------------------------


def _with_gpu(facts: Facts, settings: Settings, device: Decision[str]) -> Devices:
    asked = settings.cuda_device
    here = [gpu for gpu in facts.cuda if asked in ("auto", gpu.index)]
    if not here:
        known = ", ".join(str(index) for index in sorted({gpu.index for gpu in facts.cuda}))
        raise PlanImpossible(f"cuda_device is {asked}, but the GPUs here are: {known}.")
    suited = [gpu for gpu in here if not _unsuited_gpu(gpu)]
    if not suited:
        raise PlanImpossible(f"cuda_device is {asked} ({here[0].name}), but {_unsuited_gpu(here[0])}.")
    best = max(suited, key=lambda gpu: (_free(gpu), -gpu.index))
    return Devices(device, Decision(best.index, _which(best, facts, asked == "auto")), best)


def _free(gpu: CudaDevice) -> int:
    return gpu.free_bytes if gpu.free_bytes is not None else gpu.memory_bytes or 0


def _which(best: CudaDevice, facts: Facts, is_auto: bool) -> str:
    free = f" ({gib(_free(best))})" if _free(best) else ""
    if not is_auto:
        return f"Asked for: {best.name}{free}."
    if len(facts.cuda) == 1:
        return f"The only one: {best.name}{free}."
    return (
        f"Of {count(len(facts.cuda), 'GPU')} the one with the most free memory{free}. A process serves on one: start another, with a "
        "cuda_device of its own, for each of the rest."
    )
