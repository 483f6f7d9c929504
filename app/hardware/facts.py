"""Facts about a machine and needs of a checkpoint, as plain values. Nothing in this module reads the machine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

CoreKind = Literal["performance", "efficiency"]
CacheKind = Literal["data", "instruction", "unified"]
FrequencySource = Literal["cpufreq", "cpuinfo"]
PowerSource = Literal["rapl", "scmi", "hwmon", "powermetrics"]


@dataclass(frozen=True, slots=True)
class Cpu:
    """Processor.

    `vendor` and `microarchitecture` come from the numbers that the kernel reports, `name` is the maker's brand string,
    and `product` (`Graviton4`) comes from DMI or the cloud's files.
    """

    vendor: str
    name: str
    microarchitecture: str | None = None
    product: str | None = None


@dataclass(frozen=True, slots=True)
class Core:
    """Physical core that is online. `cpu_ids` are its logical CPUs: more than one if it has SMT siblings."""

    cpu_ids: tuple[int, ...]
    package: int = 0
    numa_node: int = 0
    kind: CoreKind = "performance"


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Memory node and the logical CPUs near it, if any. `available_bytes` includes the page cache."""

    id: int
    cpu_ids: tuple[int, ...]
    memory_bytes: int
    available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Cache:
    """A cache level of the first CPU. `shared_by` logical CPUs share one instance of `size_bytes`."""

    level: int
    kind: CacheKind
    size_bytes: int
    shared_by: int


@dataclass(frozen=True, slots=True)
class Cgroup:
    """Tightest limits of this process's control group and all its ancestors; None without a limit.

    `version` is 0 without control groups. `quota_cores` is quota over period, so 1.5 is one and a half cores.
    `memory_available_bytes` is the limit less the memory in use there that cannot be dropped.
    """

    version: Literal[0, 1, 2] = 0
    quota_cores: float | None = None
    cpuset: tuple[int, ...] | None = None
    memory_limit_bytes: int | None = None
    memory_available_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class HugePages:
    """Huge pages: the kernel's transparent mode (always, madvise, never; None: none), and explicit ones."""

    transparent: str | None = None
    page_bytes: int = 0
    total: int = 0
    free: int = 0


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """NVIDIA device as its driver reports it, with nvidia-smi's index; None: not reported.

    A device with a capability and without `memory_bytes` shares the machine's memory. `mig` is the MIG profile of an
    instance, the empty string for a GPU in MIG mode without instances, and None for one that is not partitioned.
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
    """Build options of the installed torch, read from its files without importing it; None: the wheel does not say."""

    version: str
    cuda: str | None = None
    onednn: bool | None = None
    acl: bool | None = None
    kleidiai: bool | None = None
    mkl: bool | None = None


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """Native kernel library with its instruction set levels, the best first; `ARMATURE_ISA` names `forced`."""

    levels: tuple[str, ...]
    forced: str | None = None


@dataclass(frozen=True, slots=True)
class PowerCounter:
    """File with one number: microjoules that restart at 0 after `wraps_at`, or the present microwatts."""

    name: str
    file: str
    unit: Literal["energy", "power"] = "energy"
    wraps_at: int | None = None


@dataclass(frozen=True, slots=True)
class PowerMeter:
    """Source of the machine's power readings, None without one, and what is counted or why nothing is."""

    source: PowerSource | None = None
    counters: tuple[PowerCounter, ...] = ()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class TemperatureSensor:
    """File with the temperature of the processor in thousandths of a degree Celsius."""

    name: str
    file: str


@dataclass(frozen=True, slots=True)
class ThermalSensors:
    """Sources of the processor's frequency, temperature and thermal throttling; each may be missing.

    `frequency_files` hold the present kHz of single CPUs (`cpufreq`); the source `cpuinfo` is the line `cpu MHz`.
    `throttle_files` count the times that heat slowed a core down, `cooling_files` are above 0 while it does.
    `has_pmset`: a Mac, where `pmset` says whether the speed is limited.
    """

    frequency_source: FrequencySource | None = None
    frequency_files: tuple[str, ...] = ()
    max_hertz: float | None = None
    temperatures: tuple[TemperatureSensor, ...] = ()
    throttle_files: tuple[str, ...] = ()
    cooling_files: tuple[str, ...] = ()
    has_pmset: bool = False

    @property
    def has_sources(self) -> bool:
        """True if anything can be read."""
        files = self.temperatures or self.throttle_files or self.cooling_files
        return bool(self.frequency_source or files or self.has_pmset)


@dataclass(frozen=True, slots=True)
class Facts:
    """Everything that the plan may know about a machine.

    `os` is linux, macos or the kernel's name for itself. `architecture` is `x86_64` or `arm64` (also for aarch64), else
    the kernel's name. `memory_node_ids` are the nodes that a cpuset allows; empty if unknown. `commit_left_bytes` is
    the address space that may still be reserved if every reservation counts at once (vm.overcommit_memory=2), else
    None. `mps_limit_bytes` is the operator's limit for a Mac's GPU. `is_translated`: Rosetta runs a Python for Intel
    Macs. `share_bytes` is the memory that one model may take, the setting memory_bytes. `isa` uses Linux's names on x86
    (`avx512_bf16`) and short names on Arm (`neon`, `dotprod`, `i8mm`, `bf16`, `sve`, `lse`).
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
    thermal: ThermalSensors = ThermalSensors()
    share_bytes: int | None = None

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
        """Most memory that this process can ever have: the machine's memory or the control group's limit."""
        limit = self.cgroup.memory_limit_bytes
        return self.memory_bytes if limit is None else min(self.memory_bytes, limit)

    @property
    def usable_bytes(self) -> int:
        """Bytes that this process can allocate now."""
        available = self.cgroup.memory_available_bytes
        return self.available_bytes if available is None else min(self.available_bytes, available)

    def to_json(self) -> dict[str, Any]:
        fields: dict[str, Any] = to_json_value(self)
        return fields


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of a checkpoint, from its config and tensor headers alone; a program has rows instead of tokens.

    `weight_bytes` is the size on disk, `bytes_by_precision` in memory; `device_bytes_by_precision` on a device with its
    own memory, where they differ. `layer_weights` are the weights of the linear layers, without the output layer, by
    the number of inputs. `stored_quantization` is the type of most quantized weights in a file, such as Q4_1, and
    `codes_precision` the precision in which they keep their codes; `keeps_fp8`: on NVIDIA GPUs, fp8. `int8_copy_bytes`
    are added if 4-bit layers also have an 8-bit copy. `state_bytes` are a sequence's recurrent states (0: none).
    `kv_elements_per_token` is 2 · layers · kv_heads · head_dim, or 0 for an encoder; the layers are the `num_kv_layers`
    with keys and values (0: all). `rows_vary`: the cost of a program's row depends on sizes that each request chooses.
    `operations_per_token` is two times the multiply-adds of one token or row, without an output layer (0: two for each
    parameter), and `convolution_operations` the part of it in convolutions. Of `table_bytes` a step reads only some
    rows. `quality_costs` are the relative increases of perplexity by quantized precision, or of an encoder 1 minus the
    lowest cosine with the exact vectors. `has_vectors`: an encoder gives vectors, not only labels. `adapter_elements`
    are the weights of all LoRA adapters that may be loaded at once. Of `num_parameters`, `expert_weights` belong to
    experts, of which a token uses the share `expert_use`. `engine` auto: a program that ONNX Runtime may compute too.
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
    num_kv_layers: int = 0
    state_bytes: int = 0
    rows_vary: bool = False
    operations_per_token: float = 0.0
    convolution_operations: float = 0.0
    table_bytes: int = 0
    device_bytes_by_precision: Mapping[str, int] = field(default_factory=dict)
    layer_weights: Mapping[int, int] = field(default_factory=dict)
    quality_costs: Mapping[str, float] = field(default_factory=dict)
    stored_quantization: str = ""
    codes_precision: str = ""
    keeps_fp8: bool = False
    has_vectors: bool = False
    adapter_elements: int = 0
    expert_weights: int = 0
    expert_use: float = 1.0
    draft: Needs | None = None
    engine: Literal["native", "transformers", "onnxruntime", "auto"] = "native"

    def read_share(self, rows: int) -> float:
        """Return the share of the weights that a step with this many rows reads, if experts are selected evenly."""
        idle = self.expert_weights / max(1, self.num_parameters)
        return float(1.0 - idle * (1.0 - self.expert_use) ** rows)

    @property
    def generates(self) -> bool:
        """True for a decoder, which generates token by token; other models take one step."""
        return self.kind == "decoder"


def to_json_value(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: to_json_value(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_json_value(item) for key, item in value.items()}
    if isinstance(value, set | frozenset):
        return sorted(to_json_value(item) for item in value)
    if isinstance(value, list | tuple):
        return [to_json_value(item) for item in value]
    return value
