"""Memory of a GPU: the bytes available for weights and KV cache, and the fixed overhead.

Most NVIDIA GPUs have their own memory. An Apple GPU and NVIDIA's small boards share the machine's memory, so the
process itself counts too.
"""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import gib
from app.hardware.facts import CudaDevice, Facts
from app.settings import Settings

GIB, MIB = 2**30, 2**20
# Estimates that were not verified on a device yet (docs/hardware.md). The context is the driver's, with the kernels of torch, cuBLAS and
# this package, and cuBLAS' workspaces (32 MiB a stream on Hopper). The graphs are what captured steps keep in addition to the shared
# activations.
CONTEXT_BYTES = 768 * MIB
GRAPHS_BYTES = 512 * MIB
METAL_BYTES = 256 * MIB  # the GPU's pipelines and command buffers
HOST_BYTES = GIB  # Python, torch with its CUDA libraries and pinned buffers, without a model; mapped weight files can be dropped
PROCESS_BYTES = 400 * MIB  # like on a processor, used if the device shares the machine's memory
# 1/32 of the memory, at most 2 GiB, is left for the allocator's fragmentation.
SLACK_SHARE, MOST_SLACK_BYTES = 32, 2 * GIB
# Apple, recommendedMaxWorkingSetSize as reported for Macs of 8 to 192 GB: two thirds up to 36 GiB of memory, three quarters above.
_SMALL_MAC_BYTES = 36 * GIB


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device that serves.

    `available_bytes` is free before this process allocates anything. `taken_bytes` is the fixed overhead, without
    weights, keys, values and activations; `taken_by` names it. `source` and `host_words` are parts of sentences
    for the operator.
    """

    kind: str
    available_bytes: int
    source: str
    taken_bytes: int
    taken_by: str
    host_words: str

    @property
    def slack_bytes(self) -> int:
        """Bytes that are left for fragmentation."""
        return min(self.available_bytes // SLACK_SHARE, MOST_SLACK_BYTES)


def of_device(facts: Facts, settings: Settings, kind: str, gpu: CudaDevice | None) -> DeviceMemory | None:
    """Return the memory of the chosen device; None on a processor.

    Raises:
        PlanImpossible: the host has too little memory for the process itself.
    """
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
            f"With a GPU, the process takes about {gib(HOST_BYTES)} of the host's memory, but only {gib(facts.usable_bytes)} are "
            f"available of {gib(facts.memory_limit_bytes)}: give it more memory."
        )
    free = gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
    return DeviceMemory(
        kind,
        free,
        f"free of {gib(gpu.memory_bytes)} on {gpu.name}",
        taken,
        "the driver's context, captured steps",
        f"The host only maps the files; the process takes about {gib(HOST_BYTES)} of its {gib(facts.usable_bytes)}.",
    )


def mac_budget_bytes(facts: Facts) -> int:
    """Return the bytes of the shared memory that macOS lets the GPU use."""
    if facts.mps_limit_bytes:
        return facts.mps_limit_bytes
    memory = facts.memory_bytes
    return memory * 2 // 3 if memory <= _SMALL_MAC_BYTES else memory * 3 // 4


def _of_mac(facts: Facts) -> DeviceMemory:
    budget = mac_budget_bytes(facts)
    whose = "iogpu.wired_limit_mb" if facts.mps_limit_bytes else "macOS' own limit"
    source = f"the GPU may use {gib(budget)} of {gib(facts.memory_bytes)}, set by {whose}"
    shared = "Processor and GPU share one memory."
    taken = METAL_BYTES + PROCESS_BYTES
    return DeviceMemory("mps", min(budget, facts.usable_bytes), source, taken, "the process, Metal's pipelines", shared)
