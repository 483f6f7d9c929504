"""What a machine is and what a checkpoint asks of it, as plain values without torch: the words of `probe` and `plan`.

The probe fills them, the plan reads them, people see them through `report`; nothing here looks at a machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CoreKind = Literal["performance", "efficiency"]
CacheKind = Literal["data", "instruction", "unified"]
PowerSource = Literal["rapl", "scmi", "hwmon", "powermetrics"]


@dataclass(frozen=True, slots=True)
class Cpu:
    """`vendor` and `microarchitecture` from the numbers the kernel states; `name` is what the maker prints and decides nothing.

    `product` is what is sold with that core inside (`Graviton4`), from DMI or the cloud's own files; None where nobody says.
    """

    vendor: str
    name: str
    microarchitecture: str | None = None
    product: str | None = None


@dataclass(frozen=True, slots=True)
class Core:
    """One physical core that is online: `cpu_ids` are its logical CPUs, more than one where it runs SMT siblings."""

    cpu_ids: tuple[int, ...]
    package: int = 0
    numa_node: int = 0
    kind: CoreKind = "performance"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """A memory node and the logical CPUs near it; a node without CPUs is memory only. What is in the page cache counts as available."""

    id: int
    cpu_ids: tuple[int, ...]
    memory_bytes: int
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """One level of cache as seen from the first CPU: `shared_by` logical CPUs use one instance of `size_bytes`."""

    level: int
    kind: CacheKind
    size_bytes: int
    shared_by: int


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The tightest limits of this process's control group and all its ancestors; `version` 0 where there is none.

    `quota_cores` is quota over period, so 1.5 is one core and a half; `cpuset` and `memory_limit_bytes` are None where unlimited.
    `memory_available_bytes` is the limit less what is in use there and cannot be dropped.
    """

    version: Literal[0, 1, 2] = 0
    quota_cores: float | None = None
    cpuset: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HugePages:
    """`transparent` is the kernel's mode (always, madvise, never), None where it has none; the rest counts explicit ones."""

    transparent: str | None = None
    page_bytes: int = 0
    total: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """An NVIDIA device as its driver names it, by nvidia-smi's number; what the driver did not say is None.

    A driver that names a capability and no memory has a GPU that shares the machine's. `mig`: of which profile it is an instance, empty
    where it is to be divided and has none; None: it is whole.
    """

    index: int
    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int | None = None
    free_bytes: int | None = None
    uuid: str | None = None
    driver: str | None = None
    mig: str | None = None


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What the installed torch was built with, read from its files without importing it; None: the wheel does not say."""

    version: str
    cuda: str | None = None
    onednn: bool | None = None
    acl: bool | None = None
    kleidiai: bool | None = None
    mkl: bool | None = None


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """Our own library of kernels: the levels of instructions compiled into it, the best first; `forced` is what `ARMATURE_ISA` names."""

    levels: tuple[str, ...]
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class PowerCounter:
    """A file with a number: microjoules that count up (`energy`, from 0 again after `wraps_at`), or microwatts just now (`power`)."""

    name: str
    file: str
    unit: Literal["energy", "power"] = "energy"
    wraps_at: int | None = None


@dataclass(frozen=True, slots=True)
class PowerMeter:
    """What tells the power that this machine takes; `source` None where nothing does. `reason`: what is counted, or why nothing can be."""

    source: PowerSource | None = None
    counters: tuple[PowerCounter, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything the plan may know of a machine.

    `os` is linux, macos or what the kernel calls itself; `architecture` is `x86_64` or `arm64` (aarch64 too), else the kernel's word.
    `memory_node_ids` are those that memory may be taken from (a cpuset may name fewer than there are); empty: nobody says.
    `commit_left_bytes`: where every reservation counts at once (vm.overcommit_memory=2), what may still be reserved; else None.
    `mps_limit_bytes`: how much memory the operator lets a Mac's GPU hold; None: as much as macOS does by itself.
    `is_translated`: this Python is for Intel Macs and runs on Apple silicon by Rosetta.
    `isa` uses Linux's names on x86 (`avx512_bf16`) and short ones on Arm (`neon`, `dotprod`, `i8mm`, `bf16`, `sve`, `lse`).
    """

    os: str
    architecture: str
    cpu: Cpu
    cores: tuple[Core, ...]
    memory_bytes: int
    available_bytes: int
    affinity: tuple[int, ...]
    kernel: str = ""
    isa: frozenset[str] = frozenset()
    sve_bits: int | None = None
    numa_nodes: tuple[NumaNode, ...] = ()
    caches: tuple[Cache, ...] = ()
    cgroup: Cgroup = Cgroup()
    memory_node_ids: tuple[int, ...] = ()
    commit_left_bytes: int | None = None
    page_bytes: int = 4096
    huge_pages: HugePages = HugePages()
    cuda: tuple[CudaDevice, ...] = ()
    mps: bool = False
    mps_limit_bytes: int | None = None
    is_translated: bool = False
    torch: TorchBuild | None = None
    native: NativeLibrary | None = None
    power: PowerMeter = PowerMeter()

    @property
    def num_logical_cpus(self) -> int:
        return sum(len(core.cpu_ids) for core in self.cores)

    @property
    def allowed_cpus(self) -> frozenset[int]:
        """Logical CPUs that this process may run on: online, in its affinity mask and in its cpuset."""
        online = {cpu for core in self.cores for cpu in core.cpu_ids}
        allowed = online & set(self.affinity)
        return frozenset(allowed if self.cgroup.cpuset is None else allowed & set(self.cgroup.cpuset))

    @property
    def memory_limit_bytes(self) -> int:
        """What this process could ever hold: the machine's memory or the control group's limit, whichever is less."""
        limit = self.cgroup.memory_limit_bytes
        return self.memory_bytes if limit is None else min(self.memory_bytes, limit)

    @property
    def usable_bytes(self) -> int:
        """What this process could take now."""
        available = self.cgroup.memory_available_bytes
        return self.available_bytes if available is None else min(self.available_bytes, available)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = plain(self)
        return fields


@dataclass(frozen=True, slots=True)
class Needs:
    """What a checkpoint asks of a machine, from its config and tensor headers alone. A program's steps are of rows instead of tokens.

    `weight_bytes` are on disk; `bytes_by_precision` are resident when served, by precision (`fp32`, `bf16`, …);
    `device_bytes_by_precision` the same on a device with memory of its own, where that differs.
    `int8_copy_bytes` come on top where layers are held in eight bits beside four.
    `kv_elements_per_token` is 2 · layers · kv_heads · head_dim, 0 for an encoder.
    `rows_vary`: what a program's row costs depends on dimensions that each request chooses.
    """

    kind: Literal["decoder", "encoder", "program"]
    architecture: str
    num_parameters: int
    weight_bytes: int
    bytes_by_precision: Mapping[str, int]
    kv_elements_per_token: int
    max_model_len: int
    num_layers: int
    hidden_size: int
    vocab_size: int
    stored_dtype: str
    int8_copy_bytes: int = 0
    num_kv_heads: int = 0
    rows_vary: bool = False
    device_bytes_by_precision: Mapping[str, int] = field(default_factory=dict)

    @property
    def generates(self) -> bool:
        """Whether it keeps keys and values and goes on token by token; what does not is done in one step."""
        return self.kind == "decoder"


def plain(value: Any) -> Any:
    """A value of this module as JSON knows it: dataclasses become dicts, sets become sorted lists."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(plain(item) for item in value)
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    return value
