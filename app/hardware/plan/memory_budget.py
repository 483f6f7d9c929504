"""Arithmetic of memory: the bytes that a configuration needs, and the bytes left for the KV cache.

Most NVIDIA GPUs have their own memory. An Apple GPU and NVIDIA's small boards share the machine's, so the process
itself counts too.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from app.errors import PlanImpossible
from app.hardware.decision import format_bytes
from app.hardware.facts import CudaDevice, Facts, Needs
from app.settings import Settings
from armature_kernels.linear.torchao_config import is_torchao, stored_bytes_per_weight

GIB, MIB = 2**30, 2**20

# Resident memory without a model, measured on x86-64 Linux: Python, FastAPI and torch 240 MiB, oneDNN's first product
# 40, a large tokenizer 100.
_PROCESS_BYTES = 400 * 2**20
MODEL_SHARE = "this model's share, memory_bytes"

_SLACK_DIVISOR = 16  # 1/16 is left for page tables, the allocator and the kernel

_ACTIVATION_WIDTHS = 16  # FP32 values of a token at the widest point of a layer, in multiples of the hidden size

# Each precision of keys and values: torch's name of its dtype, and bytes per element.
KV_PRECISIONS: Mapping[str, tuple[str, int]] = {
    "bf16": ("bfloat16", 2),
    "fp16": ("float16", 2),
    "fp32": ("float32", 4),
    "int8": ("int8", 1),
}

# Bytes of each logit, as computed and during sampling. A GPU samples without the host and holds four FP32 values
# besides the logit.
_LOGIT_BYTES, _DEVICE_LOGIT_BYTES = 8, 20

# A token's int8 values and scales of one layer are padded to a multiple of this (armature_kernels/attention/attention.py).
_KV_ALIGNMENT_BYTES = 64

KV_PAGE_TOKENS = (
    64  # tokens of a KV page on a GPU (armature_kernels/attention/paged.py); one page is reserved for padding
)

MIN_CONTEXT_TOKENS = 16  # shortest context worth serving

MIN_BATCH_TOKENS = 64  # smallest useful step; used to judge what fits

# A precision is useful if its KV cache holds this number of sequences and of tokens of each, or less if the model
# supports less.
USEFUL_SEQS, USEFUL_TOKENS = 8, 1024

# Sequences that a draft model drafts for at the same time; its KV cache holds this number of sequences of
# `USEFUL_TOKENS` tokens each. With more sequences, steps are too full for draft tokens to pay.
DRAFT_SEQS = USEFUL_SEQS
# Rows of recurrent states for each slot: a device's step reads one of them and writes the other (engine/decoder/device_states.py).
STATE_ROWS: Mapping[str, int] = {"cpu": 1, "cuda": 2, "mps": 2}
# Estimates that were not verified on a device yet (docs/hardware.md). The context is the driver's, with the kernels of
# torch, cuBLAS and this package, and cuBLAS' workspaces (32 MiB a stream on Hopper). The graphs are what captured
# steps keep in addition to the shared activations.
CONTEXT_BYTES = 768 * MIB
GRAPHS_BYTES = 512 * MIB
METAL_BYTES = 256 * MIB  # the GPU's pipelines and command buffers
HOST_BYTES = (
    GIB  # Python, torch with its CUDA libraries and pinned buffers, without a model; mapped weight files can be dropped
)
PROCESS_BYTES = 400 * MIB  # like on a processor, used if the device shares the machine's memory
# 1/32 of the memory, at most 2 GiB, is left for the allocator's fragmentation.
SLACK_DIVISOR, MAX_SLACK_BYTES = 32, 2 * GIB
# Apple, recommendedMaxWorkingSetSize as reported for Macs of 8 to 192 GB: two thirds up to 36 GiB of memory, three
# quarters above.
_SMALL_MAC_BYTES = 36 * GIB


@dataclass(frozen=True, slots=True)
class MemoryDemand:
    """Memory that a checkpoint needs in one precision, with its KV cache in another.

    The memory is that of one memory node, of all nodes (None), or of a device. `int8_copy`: layers also have 8-bit
    weights.
    """

    needs: Needs | None
    precision: str
    kv_precision: str
    numa_node: int | None = None
    int8_copy: bool = False
    device: DeviceMemory | None = None

    @property
    def kind(self) -> str:
        return "cpu" if self.device is None else self.device.kind

    @property
    def weight_bytes(self) -> int:
        if self.needs is None:
            return 0
        exact_bytes = 4 if self.kv_precision == "fp32" else 2
        added = (self.needs.int8_copy_bytes if self.int8_copy else 0) + exact_bytes * self.needs.adapter_elements
        held = dict(self.needs.bytes_by_precision)
        if self.device is not None:
            held |= {"fp16": held["bf16"]} if "bf16" in held else {}
            held |= self.needs.device_bytes_by_precision
        if is_torchao(self.precision):
            return torchao_bytes(self.needs, held, self.precision, exact_bytes) + added
        return held.get(self.precision, self.needs.weight_bytes) + added

    def draft_bytes(self, reserved: bool = False) -> int:
        """Return the bytes of a draft model, 0 without one; `reserved`: all address space of its KV counts."""
        if (
            self.needs is None or self.needs.draft is None or self.device is not None
        ):  # a device has no drafts of a model
            return 0
        draft, precision = self.needs.draft, draft_precision(self.precision, KV_PRECISIONS[self.kv_precision][1])
        length = min(draft.max_model_len, self.needs.max_model_len)
        tokens = DRAFT_SEQS * min(length, draft_kv_tokens(length)) if reserved else draft_kv_tokens(length)
        weights = draft.bytes_by_precision.get(precision, draft.weight_bytes)
        states = 2 * DRAFT_SEQS * draft.state_bytes  # one after the known tokens, and one after the drafted ones
        return weights + states + tokens * kv_bytes_per_token(draft, self.kv_precision)

    @property
    def weights_name(self) -> str:
        return f"{self.precision} with an int8 copy" if self.int8_copy else self.precision

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return kv_bytes_per_token(self.needs, self.kv_precision) if self.needs else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states."""
        return self.needs.state_bytes if self.needs else 0

    def kv_tokens(self, size: int) -> int:
        """Return the number of tokens whose keys and values fit in `size` bytes; on a device in whole pages."""
        assert self.kv_bytes_per_token, "called only for models with a KV cache"
        if self.device is None:
            return size // self.kv_bytes_per_token
        return max(0, size // (KV_PAGE_TOKENS * self.kv_bytes_per_token) - 1) * KV_PAGE_TOKENS

    def kv_bytes(self, seqs: int, length: int) -> int:
        """Return the bytes of the KV cache of `seqs` sequences of `length` tokens; on a device in whole pages."""
        if self.device is None:
            return seqs * length * self.kv_bytes_per_token
        return (seqs * -(-length // KV_PAGE_TOKENS) + 1) * KV_PAGE_TOKENS * self.kv_bytes_per_token


def draft_precision(precision: str, kv_element_bytes: int) -> str:
    """Return the precision of a draft model's weights: the model's, or 16 or 32 bits beside torchao's formats."""
    if not is_torchao(precision):
        return precision
    return "fp32" if kv_element_bytes == 4 else "bf16"


def draft_kv_tokens(max_model_len: int) -> int:
    """Return the number of tokens that a draft model's KV cache holds, of all sequences together."""
    return DRAFT_SEQS * min(max_model_len, USEFUL_TOKENS)


def torchao_bytes(needs: Needs, held: Mapping[str, int], quantization: str, exact_bytes: int) -> int:
    """Return the bytes of weights in a format of torchao, up to some percent too many.

    `held` are the bytes of the model's weights by precision. The layers have codes and scales; the output layer, and
    layers without whole groups, have `exact_bytes` per weight.
    """
    if not needs.layer_weights or "bf16" not in held:
        return max(held.values(), default=needs.weight_bytes)
    output = needs.vocab_size * needs.hidden_size if needs.generates else 0
    layers = 0.0
    for inputs, weights in needs.layer_weights.items():
        each = stored_bytes_per_weight(quantization, inputs)
        layers += weights * (exact_bytes if each is None else each)
    fixed = held["bf16"] - 2 * (sum(needs.layer_weights.values()) + output)
    return fixed + ceil(layers) + exact_bytes * output


def kv_bytes_per_token(needs: Needs, kv_precision: str) -> int:
    """Return the bytes of one token's keys and values in all layers; in int8 with an FP32 scale per head."""
    if kv_precision != "int8":
        return needs.kv_elements_per_token * KV_PRECISIONS[kv_precision][1]
    if not needs.kv_elements_per_token:
        return 0
    layers = needs.num_kv_layers or needs.num_layers
    row = needs.kv_elements_per_token // layers + 8 * needs.num_kv_heads
    return layers * -(-row // _KV_ALIGNMENT_BYTES) * _KV_ALIGNMENT_BYTES


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Bytes available for the KV cache (negative if the rest does not fit), with the numbers for a sentence."""

    size: int
    headroom: int
    available: int
    source: str
    explanation: str


def memory_budget(facts: Facts, demand: MemoryDemand, batch_tokens: int, running: int) -> MemoryBudget:
    """Return the available memory less the weights and less the other memory of the process."""
    available, source, taken = _available_and_overhead(facts, demand)
    draft = demand.draft_bytes(reserved=facts.commit_left_bytes is not None)
    headroom = taken + _activation_bytes(demand, batch_tokens, running) + draft
    held = f" less {format_bytes(demand.weight_bytes)} of weights" if demand.needs else ""
    return MemoryBudget(
        available - demand.weight_bytes - headroom,
        headroom,
        available,
        source,
        f"{format_bytes(available)} available ({source}){held} less {format_bytes(headroom)} for {_overhead_phrase(demand)}",
    )


def _available_and_overhead(facts: Facts, demand: MemoryDemand) -> tuple[int, str, int]:
    device = demand.device
    if device is not None:
        return device.available_bytes, device.source, device.overhead_bytes + device.slack_bytes
    available, source = available_memory(facts, demand.numa_node)
    return available, source, _PROCESS_BYTES + available // _SLACK_DIVISOR


def _overhead_phrase(demand: MemoryDemand) -> str:
    if demand.device is not None:
        return f"{demand.device.overhead_name} and activations"
    if demand.draft_bytes():
        return f"the process, its activations and the draft model ({format_bytes(demand.draft_bytes())})"
    return "the process and its activations"


def smallest_step_budget(facts: Facts, settings: Settings, demand: MemoryDemand) -> MemoryBudget:
    """Return the memory left with the smallest useful steps, or with those that were set, to see if anything fits."""
    running = MIN_BATCH_TOKENS if settings.max_running_seqs == "auto" else settings.max_running_seqs
    tokens = max(running, MIN_BATCH_TOKENS) if settings.max_batch_tokens == "auto" else settings.max_batch_tokens
    return memory_budget(facts, demand, tokens, min(running, tokens))


def does_not_fit_message(settings: Settings, demand: MemoryDemand, left: MemoryBudget) -> str:
    """Return the message for a model that does not fit, with the memory of one usual request and what is available."""
    needs = demand.needs
    assert needs is not None, "without needs everything fits"
    longest = needs.max_model_len if settings.max_model_len == "auto" else settings.max_model_len
    tokens = min(longest, USEFUL_TOKENS)
    if needs.generates:
        request_bytes, label = (
            tokens * demand.kv_bytes_per_token,
            f"keys and values of one sequence of {tokens:,} tokens",
        )
    else:
        request_bytes, label = tokens * activation_bytes_per_token(needs), f"one text of {tokens:,} tokens"
    return (
        f"The model does not fit: {format_bytes(demand.weight_bytes)} of weights in {demand.weights_name}, "
        f"{format_bytes(request_bytes)} for {label} and "
        f"{format_bytes(left.headroom)} for {_overhead_phrase(demand)} make "
        f"{format_bytes(demand.weight_bytes + request_bytes + left.headroom)}, but only "
        f"{format_bytes(left.available)} are available ({left.source}). Give it more memory or serve a smaller model or precision."
    )


def available_memory(facts: Facts, node: int | None) -> tuple[int, str]:
    """Return the least of what the machine, the control group and the memory node have available, and its source."""
    choices = [(facts.available_bytes, "the machine's memory")]
    if facts.cgroup.memory_available_bytes is not None and facts.cgroup.memory_limit_bytes is not None:
        choices.append(
            (
                facts.cgroup.memory_available_bytes,
                f"of the control group's limit of {format_bytes(facts.cgroup.memory_limit_bytes)}; the rest is in use",
            )
        )
    choices += [
        (known.available_bytes, f"memory node {node}")
        for known in facts.numa_nodes
        if known.id == node and known.available_bytes
    ]
    allowed = [known.available_bytes or 0 for known in facts.numa_nodes if known.id in facts.memory_node_ids]
    given = sum(allowed)
    if given and len(allowed) < len(facts.numa_nodes):
        choices.append((given, f"memory nodes {', '.join(map(str, facts.memory_node_ids))}, as the cpuset allows"))
    if facts.commit_left_bytes is not None:
        choices.append((facts.commit_left_bytes, "the address space left under vm.overcommit_memory=2"))
    if facts.share_bytes is not None:
        choices.append((facts.share_bytes, MODEL_SHARE))
    return min(choices)


def _activation_bytes(demand: MemoryDemand, batch_tokens: int, running: int) -> int:
    needs = demand.needs
    if needs is None:
        return 0
    each = _LOGIT_BYTES if demand.device is None else _DEVICE_LOGIT_BYTES
    logits = each * running * needs.vocab_size if needs.generates else 0
    return batch_tokens * activation_bytes_per_token(needs) + logits


def activation_bytes_per_token(needs: Needs) -> int:
    """Return the bytes of activations for each token of a step."""
    return 4 * needs.hidden_size * _ACTIVATION_WIDTHS


def useful_kv_cache_bytes(settings: Settings, demand: MemoryDemand) -> int:
    """Return the size of a useful KV cache: `kv_cache_bytes` if it was set, else that of some usual sequences."""
    needs = demand.needs
    if needs is None:
        return 0
    if settings.kv_cache_bytes != "auto":
        return settings.kv_cache_bytes
    length = needs.max_model_len if settings.max_model_len == "auto" else settings.max_model_len
    seqs = USEFUL_SEQS if settings.max_running_seqs == "auto" else min(USEFUL_SEQS, settings.max_running_seqs)
    tokens = seqs * min(length, USEFUL_TOKENS)
    return max(tokens, 0 if settings.max_model_len == "auto" else length) * demand.kv_bytes_per_token


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Memory of the device that serves.

    `available_bytes` is free before this process allocates anything. `overhead_bytes` is fixed, without weights, keys,
    values and activations. Texts are parts of sentences for the operator.
    """

    kind: str
    available_bytes: int
    source: str
    overhead_bytes: int
    overhead_name: str
    host_note: str
    capability: tuple[int, int] | None = None  # of an NVIDIA GPU

    @property
    def slack_bytes(self) -> int:
        """Bytes that are left for fragmentation."""
        return min(self.available_bytes // SLACK_DIVISOR, MAX_SLACK_BYTES)


def find_device_memory(facts: Facts, settings: Settings, kind: str, gpu: CudaDevice | None) -> DeviceMemory | None:
    """Return the memory of the device; None on a processor. Raises `PlanImpossible`: the host has too little."""
    if kind == "cpu":
        return None
    if kind == "mps":
        return _mac_memory(facts)
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
            gpu.capability,
        )
    if facts.usable_bytes < HOST_BYTES:
        raise PlanImpossible(
            f"With a GPU, the process takes about {format_bytes(HOST_BYTES)} of the host's "
            f"memory, but only {format_bytes(facts.usable_bytes)} are "
            f"available of {format_bytes(facts.memory_limit_bytes)}: give it more memory."
        )
    free = gpu.memory_bytes if gpu.free_bytes is None else gpu.free_bytes
    source = f"free of {format_bytes(gpu.memory_bytes)} on {gpu.name}"
    if facts.share_bytes is not None:
        free, source = min((free, source), (facts.share_bytes, MODEL_SHARE))
    return DeviceMemory(
        kind,
        free,
        source,
        taken,
        "the driver's context, captured steps",
        f"The host only maps the files; the process takes about {format_bytes(HOST_BYTES)} of its {format_bytes(facts.usable_bytes)}.",
        gpu.capability,
    )


def mac_gpu_bytes(facts: Facts) -> int:
    """Return the bytes of the shared memory that macOS lets the GPU use."""
    if facts.mps_limit_bytes:
        return facts.mps_limit_bytes
    memory = facts.memory_bytes
    return memory * 2 // 3 if memory <= _SMALL_MAC_BYTES else memory * 3 // 4


def _mac_memory(facts: Facts) -> DeviceMemory:
    budget = mac_gpu_bytes(facts)
    whose = "iogpu.wired_limit_mb" if facts.mps_limit_bytes else "macOS' own limit"
    source = f"the GPU may use {format_bytes(budget)} of {format_bytes(facts.memory_bytes)}, set by {whose}"
    shared = "Processor and GPU share one memory."
    taken = METAL_BYTES + PROCESS_BYTES
    return DeviceMemory("mps", min(budget, facts.usable_bytes), source, taken, "the process, Metal's pipelines", shared)
