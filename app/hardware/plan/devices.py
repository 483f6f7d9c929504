"""Choice of the device to serve on: the fastest kind that is present, supported and suitable, and one of several GPUs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from app.errors import NoRecipe, PlanImpossible
from app.hardware.decision import ALL_KINDS, Decided, Decision, PlanPart, RecipeKey, format_bytes, format_count
from app.hardware.facts import CudaDevice, Facts, Needs
from app.hardware.plan.precision import list_recipes
from app.settings import Settings

MIN_CAPABILITY = (
    8,
    0,
)  # Ampere: the first with BF16 products; torch's int4 products and this package's kernels need it
_MIN_DARWIN = 23  # macOS 14: the first whose Metal has BF16, and the oldest that torch's wheels for Macs support
# The oldest driver for each CUDA (docs.nvidia.com/deploy/cuda-compatibility, minor version compatibility).
_MIN_DRIVER = {"12": 525, "13": 580}
DEVICE_KERNELS: Mapping[str, str] = {"cuda": "triton", "mps": "metal"}
_NO_PROGRAMS = "exported programs are served on processors"
_NO_EXPERTS = "mixtures of experts are served on processors and NVIDIA GPUs"


@dataclass(frozen=True)
class DevicePlan(PlanPart):
    """Decisions about the device.

    `cuda_device` is nvidia-smi's index. `visible_devices` is the value of CUDA_VISIBLE_DEVICES: CUDA lists the fastest
    GPU first, nvidia-smi sorts by bus, but a UUID means the same to both. `rank_devices` are the GPUs among which the model
    is split, the one with the least free memory first.
    """

    device: Decided[str] = Decided(ALL_KINDS)
    cuda_device: Decided[int | None] = Decided(ALL_KINDS)
    visible_devices: Decided[str | None] = Decided()
    tensor_parallel: Decided[int] = Decided()
    rank_devices: Decided[tuple[str, ...]] = Decided()


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """Decisions about the device, and the GPU that `cuda_device` names; None for every other kind of device."""

    plan: DevicePlan
    gpu: CudaDevice | None = None

    @classmethod
    def without_gpu(cls, device: Decision[str]) -> DeviceChoice:
        reason = "No NVIDIA GPU is used."
        plan = DevicePlan(
            device, Decision(None, reason), Decision(None, reason), Decision(1, reason), Decision((), reason)
        )
        return cls(plan)


def choose_device(
    facts: Facts, settings: Settings, needs: Needs | None, recipes: Collection[RecipeKey]
) -> DeviceChoice:
    """Choose the device. Raises `PlanImpossible` if it is absent or unsuitable, `NoRecipe` if it has none."""
    built = frozenset(kind for kind, architecture, _ in recipes if architecture == facts.architecture)
    device = (
        _forced_device(facts, settings.device, needs, built)
        if settings.device != "auto"
        else _best_device(facts, needs, built)
    )
    if device is None:
        raise NoRecipe(
            f"Serving on {facts.architecture} is not supported yet. {list_recipes(recipes)}"
            if settings.device == "auto"
            else f"Serving on {settings.device} is not supported yet. {list_recipes(recipes)}"
        )
    if device.value == "cuda":
        return (
            _with_gpu(facts, settings, device)
            if settings.tensor_parallel == 1
            else _ranks(facts, settings, device, needs)
        )
    if settings.tensor_parallel > 1:
        raise PlanImpossible(
            f"tensor_parallel is {settings.tensor_parallel}, but device is {device.value}, and models are split among NVIDIA GPUs"
            f" only. {device.reason}"
        )
    if settings.cuda_device != "auto":
        raise PlanImpossible(
            f"cuda_device is {settings.cuda_device}, but device is {device.value}: {device.reason} Leave cuda_device at auto."
        )
    return DeviceChoice.without_gpu(device)


def fallback_to_cpu(choice: DeviceChoice, settings: Settings, refusal: str) -> DeviceChoice | None:
    """Return the processor as the device after `refusal`; None if the device was set, or is the processor already."""
    if choice.plan.device == "cpu" or settings.device != "auto" or settings.cuda_device != "auto":
        return None
    name = choice.gpu.name if choice.gpu else "The Apple GPU"
    return DeviceChoice.without_gpu(Decision("cpu", f"{name} is present, but cannot serve these settings. {refusal}"))


def suited_gpus(facts: Facts) -> list[CudaDevice]:
    return [gpu for gpu in facts.cuda if not _unsuitable_gpu_reason(gpu)]


def cuda_name(gpu: CudaDevice) -> str:
    """Return the name of a GPU for CUDA: its UUID, or its index if the driver reports none."""
    return gpu.uuid or str(gpu.index)


def decide_device_kernels(kind: str) -> Decision[str]:
    """Decide which kernels a device uses between the matrix products."""
    if kind == "cuda":
        return Decision(
            DEVICE_KERNELS[kind],
            "This package's Triton kernels, compiled at first use, and torch's kernels; only torch's if Triton or a C compiler is missing.",
        )
    return Decision(DEVICE_KERNELS[kind], "Torch's kernels for Apple GPUs.")


def decide_kernel_folder(settings: Settings, kind: str) -> Decision[str | None]:
    """Decide the folder in which Triton keeps compiled kernels; None if nothing is compiled or none is known."""
    folder = settings.cache_directory
    if kind != "cuda":
        return Decision(None, "Nothing is compiled for this device while serving.")
    if folder is None:
        return Decision(None, "This user has no home directory; set cache_dir to keep compiled kernels.")
    return Decision(
        str(folder / "triton"), "Compiling the kernels takes a minute; the next start reads them from this folder."
    )


# ---- kind of device -------------------------------------------------------------------------------------------------


def _forced_device(facts: Facts, kind: str, needs: Needs | None, built: Collection[str]) -> Decision[str] | None:
    if kind == "cuda" and not facts.cuda:
        raise PlanImpossible(
            "device is cuda, but neither nvidia-smi nor /proc/driver/nvidia lists a GPU. Check that the driver is installed and "
            "that CUDA_VISIBLE_DEVICES hides no GPU."
        )
    if kind == "mps" and not facts.mps:
        raise PlanImpossible("device is mps, but this is no Apple silicon Mac.")
    if kind not in built:
        return None
    unsuited = _unsuitable_reason(facts, kind, needs)
    if unsuited:
        raise PlanImpossible(f"device is {kind}, but {unsuited}. Leave device at auto to serve on the processor.")
    old = _old_driver_reason(facts) if kind == "cuda" else ""
    return Decision(
        kind, f"Asked for, but {old}: without NVIDIA's compatibility libraries this fails." if old else "Asked for."
    )


def _best_device(facts: Facts, needs: Needs | None, built: Collection[str]) -> Decision[str] | None:
    here = [
        (kind, name)
        for kind, name, present in (("cuda", _gpus(facts), bool(facts.cuda)), ("mps", "The Apple GPU (MPS)", facts.mps))
        if present
    ]
    passed = []
    for kind, name in here:
        why_not = "serving on it is not supported yet" if kind not in built else _unsuitable_reason(facts, kind, needs)
        why_not = why_not or (_old_driver_reason(facts) if kind == "cuda" else "")
        if not why_not:
            return Decision(kind, f"{name} is present and usable.")
        passed.append(f"{name} is present, but {why_not}.")
    return Decision("cpu", " ".join(passed) or "No other device is present.") if "cpu" in built else None


def _gpus(facts: Facts) -> str:
    return f"{len(facts.cuda)} × {facts.cuda[0].name}" if facts.cuda else ""


def _unsuitable_reason(facts: Facts, kind: str, needs: Needs | None) -> str:
    """Return why a kind of device cannot serve, as a clause that follows "but"; empty if it can."""
    if kind == "cpu":
        return ""
    if needs is not None and needs.kind == "program":
        return _NO_PROGRAMS
    if needs is not None and needs.expert_weights and kind == "mps":
        return _NO_EXPERTS
    if kind == "mps":
        release = facts.kernel.partition(".")[0]
        old = release.isdecimal() and int(release) < _MIN_DARWIN
        return f"this macOS (Darwin {facts.kernel}) is older than 14, the oldest supported version" if old else ""
    if facts.torch is not None and not facts.torch.cuda:
        return f"the installed torch ({facts.torch.version}) was built without CUDA"
    reasons = [_unsuitable_gpu_reason(gpu) for gpu in facts.cuda]
    return "" if not all(reasons) else reasons[0]


def _unsuitable_gpu_reason(gpu: CudaDevice) -> str:
    if gpu.mig == "":
        return "it is partitioned by MIG and has no visible instance: create one, or turn MIG off"
    if gpu.capability is None:
        return (
            "its compute capability is unknown: nvidia-smi is missing or older than driver 510 (in a container "
            "NVIDIA_DRIVER_CAPABILITIES must include utility)"
        )
    if gpu.capability < MIN_CAPABILITY:
        return (
            f"its compute capability is {_format_capability(gpu.capability)}, and "
            f"{_format_capability(MIN_CAPABILITY)} (Ampere) is the minimum"
        )
    return ""


def _format_capability(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _old_driver_reason(facts: Facts) -> str:
    """Return a clause if the driver is older than torch's CUDA needs; else the empty string."""
    wanted = _MIN_DRIVER.get((facts.torch.cuda or "").partition(".")[0]) if facts.torch else None
    driver = facts.cuda[0].driver or ""
    major = driver.partition(".")[0]
    if wanted is None or not major.isdecimal() or int(major) >= wanted:
        return ""
    assert facts.torch is not None, "torch has a CUDA version"
    return f"its driver ({driver}) is older than the {wanted} that torch for CUDA {facts.torch.cuda} needs"


# ---- one of several GPUs --------------------------------------------------------------------------------------------


def _with_gpu(facts: Facts, settings: Settings, device: Decision[str]) -> DeviceChoice:
    asked = settings.cuda_device
    here = [gpu for gpu in facts.cuda if asked in ("auto", gpu.index)]
    if not here:
        known = ", ".join(str(index) for index in sorted({gpu.index for gpu in facts.cuda}))
        raise PlanImpossible(f"cuda_device is {asked}, but the GPUs of this machine are: {known}.")
    suited = [gpu for gpu in here if not _unsuitable_gpu_reason(gpu)]
    if not suited:
        raise PlanImpossible(f"cuda_device is {asked} ({here[0].name}), but {_unsuitable_gpu_reason(here[0])}.")
    best = max(suited, key=lambda gpu: (_free_bytes(gpu), -gpu.index))
    visible: Decision[str | None] = Decision(cuda_name(best), "The process sees only the GPU that it serves on.")
    chosen: Decision[int | None] = Decision(best.index, _gpu_reason(best, facts, asked == "auto"))
    alone = "Not asked for: the model is on one GPU."
    return DeviceChoice(DevicePlan(device, chosen, visible, Decision(1, alone), Decision((), alone)), best)


def _ranks(facts: Facts, settings: Settings, device: Decision[str], needs: Needs | None) -> DeviceChoice:
    """Choose the GPUs among which a model is split. Raises `PlanImpossible` if there are too few."""
    number = settings.tensor_parallel
    if settings.cuda_device != "auto":
        raise PlanImpossible(f"tensor_parallel is {number}, but cuda_device names one GPU: leave it at auto.")
    if needs is not None and needs.adapter_elements:
        raise PlanImpossible(f"tensor_parallel is {number}, and LoRA adapters are not split yet: leave lora out.")
    gpus = sorted(suited_gpus(facts), key=_free_bytes, reverse=True)[:number]
    if len(gpus) < number:
        raise PlanImpossible(f"tensor_parallel is {number}, but the usable GPUs of this machine are {len(gpus)}.")
    gpus.reverse()  # the plan counts the memory of the first one, which has the least
    names, first = tuple(map(cuda_name, gpus)), gpus[0]
    split: Decision[int] = Decision(
        number,
        f"Asked for: each of {number} GPUs has a part of the heads and of each MLP, and they add up their results twice a layer."
        " Not verified on hardware.",
    )
    why = "The process of each rank sees its own GPU."
    chosen: Decision[int | None] = Decision(first.index, f"Of {number} GPUs, the one with the least free memory leads.")
    return DeviceChoice(DevicePlan(device, chosen, Decision(names[0], why), split, Decision(names, why)), first)


def needs_of_rank(needs: Needs, ranks: int) -> Needs:
    """Return the needs of one of several GPUs: its part of the layers, and whole tables and output layer."""
    whole = 2 * 2 * needs.vocab_size * needs.hidden_size  # BF16

    def part(sizes: Mapping[str, int]) -> dict[str, int]:
        return {name: max(0, size - whole) // ranks + min(size, whole) for name, size in sizes.items()}

    return replace(
        needs,
        bytes_by_precision=part(needs.bytes_by_precision),
        device_bytes_by_precision=part(needs.device_bytes_by_precision),
        kv_elements_per_token=needs.kv_elements_per_token // ranks,
        num_kv_heads=needs.num_kv_heads // ranks,
    )


def _free_bytes(gpu: CudaDevice) -> int:
    return gpu.free_bytes if gpu.free_bytes is not None else gpu.memory_bytes or 0


def _gpu_reason(best: CudaDevice, facts: Facts, is_auto: bool) -> str:
    free = f" ({format_bytes(_free_bytes(best))})" if _free_bytes(best) else ""
    if not is_auto:
        return f"Asked for: {best.name}{free}."
    if len(facts.cuda) == 1:
        return f"The only one: {best.name}{free}."
    return (
        f"Of {format_count(len(facts.cuda), 'GPU')}, the one with the most free memory{free}. "
        "An engine serves on one GPU: data_parallel starts one on each of several."
    )
