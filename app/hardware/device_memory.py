"""How much memory a device with a queue of its own has for weights, keys and values, and what it takes before either; all in bytes.

A GPU of NVIDIA mostly has memory of its own; an Apple GPU, and NVIDIA's small boards, share the machine's, and then the process counts too.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import gib
from app.hardware.facts import CudaDevice, Facts
from app.settings import Settings

GIB, MIB = 2**30, 2**20
# Estimates, held against no device yet (docs/hardware.md says so). The driver's context with the kernels of torch, cuBLAS and ours, cuBLAS'
# workspaces (32 MiB a stream on Hopper), and what captured steps keep beside the activations that they share.
CONTEXT_BYTES = 768 * MIB
GRAPHS_BYTES = 512 * MIB
METAL_BYTES = 256 * MIB  # the GPU's pipelines and command buffers
HOST_BYTES = (
    GIB  # Python, torch with its CUDA libraries and pinned buffers, without a model; files of weights are mapped and make way
)
PROCESS_BYTES = 400 * MIB  # as on a processor, where the device's memory is the machine's
# One part in so many is left to the allocator's gaps, and no more than that.
SLACK_SHARE, MOST_SLACK_BYTES = 32, 2 * GIB
# Apple, recommendedMaxWorkingSetSize as reported for Macs of 8 to 192 GB: two thirds up to 36 GiB of memory, three quarters above.
_SMALL_MAC_BYTES = 36 * GIB


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """`available_bytes` before anything of ours is there; `taken_bytes` by what serves, weights, keys, values and activations apart."""

    kind: str
    available_bytes: int
    source: str
    taken_bytes: int
    taken_by: str
    host_words: str

    @property
    def slack_bytes(self) -> int:
        return min(self.available_bytes // SLACK_SHARE, MOST_SLACK_BYTES)


def of_device(facts: Facts, settings: Settings, kind: str, gpu: CudaDevice | None) -> DeviceMemory | None:
    """None on a processor. Raises `PlanImpossible` where the host has no memory for the process itself."""
    if kind == "cpu":
        return None
    if kind == "mps":
        return _of_mac(facts)
    assert gpu is not None, "cuda is chosen with a GPU"
    taken = CONTEXT_BYTES + (GRAPHS_BYTES if settings.compile != "off" else 0)
    if gpu.memory_bytes is None:
        return DeviceMemory(
            kind,
            facts.usable_bytes,
            f"{gpu.name} shares the machine's memory",
            taken + HOST_BYTES,
            "the process, the driver's context, captured steps",
            "Host and GPU share one memory.",
        )
    if facts.usable_bytes < HOST_BYTES:
        raise PlanImpossible(
            f"The process itself takes about {gib(HOST_BYTES)} of the host's memory beside the GPU, but {gib(facts.usable_bytes)} are "
            f"available of {gib(facts.memory_limit_bytes)}: give it more."
        )
    free = gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
    return DeviceMemory(
        kind,
        free,
        f"free of {gib(gpu.memory_bytes)} on {gpu.name}",
        taken,
        "the driver's context, captured steps",
        f"The host only maps the files, and takes about {gib(HOST_BYTES)} of its {gib(facts.usable_bytes)}.",
    )


def mac_budget_bytes(facts: Facts) -> int:
    """What macOS lets the GPU hold of the memory that all share."""
    if facts.mps_limit_bytes:
        return facts.mps_limit_bytes
    memory = facts.memory_bytes
    return memory * 2 // 3 if memory <= _SMALL_MAC_BYTES else memory * 3 // 4


def _of_mac(facts: Facts) -> DeviceMemory:
    budget = mac_budget_bytes(facts)
    whose = "iogpu.wired_limit_mb" if facts.mps_limit_bytes else "macOS' own limit"
    source = f"of {gib(facts.memory_bytes)} the GPU may hold {gib(budget)}, by {whose}"
    shared = "Processor and GPU share one memory."
    taken = METAL_BYTES + PROCESS_BYTES
    return DeviceMemory("mps", min(budget, facts.usable_bytes), source, taken, "the process, Metal's pipelines", shared)
