"""How many bytes a way to serve takes, and how many are left of this machine's for keys and values; nothing is decided here."""

from __future__ import annotations

from dataclasses import dataclass

from app.hardware.decision import gib
from app.hardware.device_memory import DeviceMemory
from app.hardware.facts import Facts, Needs
from app.settings import Settings

# Resident without a model, measured on x86-64 Linux: Python, FastAPI and torch 240 MiB, oneDNN's first product 40; a large tokenizer 100.
_PROCESS_BYTES = 400 * 2**20
_SLACK_SHARE = 16  # one part in so many is left to page tables, the allocator and the kernel
_ACTIVATION_WIDTHS = 16  # FP32 values of the hidden size that a token holds at the widest point of a layer
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}
# Of each logit: as computed and while it is picked from. A device picks without the host, for which it holds four more FP32 values of it.
_LOGIT_BYTES, _DEVICE_LOGIT_BYTES = 8, 20
_KV_ALIGNED = 64  # bytes that a token's int8 codes and scales of one layer are padded to a multiple of (kernels/kv_rows.py)
KV_PAGE_TOKENS = 64  # of a page of keys and values on a device (kernels/paged.py); one page is nobody's
MIN_TOKENS = 16  # a context shorter than this serves nobody
LEAST_BATCH_TOKENS = 64  # a step that small still serves: what fits is judged with it
# Keys and values that make a precision worth serving: so many sequences with so many tokens each, less where the model is made for less.
USEFUL_SEQS, USEFUL_TOKENS = 8, 1024


@dataclass(frozen=True, slots=True)
class Demand:
    """What will be held: a checkpoint in a precision, keys and values in theirs, on one memory node or all, or in a device's memory.

    `int8_copy`: the layers' weights in eight bits as well.
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
        copy = self.needs.int8_copy_bytes if self.int8_copy else 0
        held = dict(self.needs.bytes_by_precision)
        if self.device is not None:
            held |= {"fp16": held["bf16"]} if "bf16" in held else {}
            held |= self.needs.device_bytes_by_precision
        return held.get(self.precision, self.needs.weight_bytes) + copy

    @property
    def held_in(self) -> str:
        return f"{self.precision} with an int8 copy" if self.int8_copy else self.precision

    @property
    def kv_bytes_per_token(self) -> int:
        return kv_bytes_per_token(self.needs, self.kv_precision) if self.needs else 0

    def kv_tokens(self, size: int) -> int:
        """Whose keys and values `size` bytes hold; on a device in whole pages."""
        assert self.kv_bytes_per_token, "what keeps nothing is not asked"
        if self.device is None:
            return size // self.kv_bytes_per_token
        return max(0, size // (KV_PAGE_TOKENS * self.kv_bytes_per_token) - 1) * KV_PAGE_TOKENS

    def kv_bytes(self, seqs: int, length: int) -> int:
        """What so many sequences of that length take; on a device in whole pages."""
        if self.device is None:
            return seqs * length * self.kv_bytes_per_token
        return (seqs * -(-length // KV_PAGE_TOKENS) + 1) * KV_PAGE_TOKENS * self.kv_bytes_per_token


def kv_bytes_per_token(needs: Needs, kv_precision: str) -> int:
    """Of all layers; int8 codes have a scale in FP32 for each head of keys and of values beside them."""
    if kv_precision != "int8":
        return needs.kv_elements_per_token * _ELEMENT_BYTES[kv_precision]
    if not needs.kv_elements_per_token:
        return 0
    row = needs.kv_elements_per_token // needs.num_layers + 8 * needs.num_kv_heads
    return needs.num_layers * -(-row // _KV_ALIGNED) * _KV_ALIGNED


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that keys and values may take (none where negative), and a sentence on where they come from."""

    size: int
    headroom: int
    available: int
    source: str
    story: str


def room(facts: Facts, demand: Demand, batch_tokens: int, running: int) -> Room:
    """What is available less the weights less what else the process holds."""
    available, source, taken = _before_weights(facts, demand)
    headroom = taken + _activation_bytes(demand, batch_tokens, running)
    held = f" less {gib(demand.weight_bytes)} of weights" if demand.needs else ""
    return Room(
        available - demand.weight_bytes - headroom,
        headroom,
        available,
        source,
        f"{gib(available)} available ({source}){held} less {gib(headroom)} for {_besides(demand)}",
    )


def _before_weights(facts: Facts, demand: Demand) -> tuple[int, str, int]:
    """What is available, where it comes from, and what is taken of it whatever is served."""
    device = demand.device
    if device is not None:
        return device.available_bytes, device.source, device.taken_bytes + device.slack_bytes
    available, source = available_bytes(facts, demand.numa_node)
    return available, source, _PROCESS_BYTES + available // _SLACK_SHARE


def _besides(demand: Demand) -> str:
    return "the process and its activations" if demand.device is None else f"{demand.device.taken_by} and activations"


def least_room(facts: Facts, settings: Settings, demand: Demand) -> Room:
    """With the smallest steps that are served with, where nobody asked for larger ones: whether something fits at all."""
    running = LEAST_BATCH_TOKENS if settings.max_running_seqs == "auto" else settings.max_running_seqs
    tokens = max(running, LEAST_BATCH_TOKENS) if settings.max_batch_tokens == "auto" else settings.max_batch_tokens
    return room(facts, demand, tokens, min(running, tokens))


def arithmetic(settings: Settings, demand: Demand, left: Room) -> str:
    """Of a model that does not fit: what one request of a usual length would take, and what there is."""
    needs = demand.needs
    assert needs is not None, "what needs nothing fits"
    longest = needs.max_model_len if settings.max_model_len == "auto" else settings.max_model_len
    tokens = min(longest, USEFUL_TOKENS)
    if needs.generates:
        one, words = tokens * demand.kv_bytes_per_token, f"keys and values of one sequence of {tokens:,} tokens"
    else:
        one, words = tokens * token_bytes(needs), f"one text of {tokens:,} tokens"
    return (
        f"The model does not fit: {gib(demand.weight_bytes)} of weights in {demand.held_in}, {gib(one)} for {words} and "
        f"{gib(left.headroom)} for {_besides(demand)} make {gib(demand.weight_bytes + one + left.headroom)}, but "
        f"{gib(left.available)} are available ({left.source}). Give it more memory or serve a smaller model or precision."
    )


def available_bytes(facts: Facts, node: int | None) -> tuple[int, str]:
    """The least of what the machine, the control group and the memory node could give now, and which of them it is."""
    choices = [(facts.available_bytes, "the machine's memory")]
    if facts.cgroup.memory_available_bytes is not None and facts.cgroup.memory_limit_bytes is not None:
        choices.append(
            (
                facts.cgroup.memory_available_bytes,
                f"of the control group's limit of {gib(facts.cgroup.memory_limit_bytes)}, the rest is in use",
            )
        )
    choices += [
        (known.available_bytes, f"memory node {node}") for known in facts.numa_nodes if known.id == node and known.available_bytes
    ]
    allowed = [known.available_bytes or 0 for known in facts.numa_nodes if known.id in facts.memory_node_ids]
    given = sum(allowed)
    if given and len(allowed) < len(facts.numa_nodes):
        choices.append((given, f"memory nodes {', '.join(map(str, facts.memory_node_ids))}, as the cpuset allows"))
    if facts.commit_left_bytes is not None:
        choices.append((facts.commit_left_bytes, "what vm.overcommit_memory=2 lets be reserved"))
    return min(choices)


def _activation_bytes(demand: Demand, batch_tokens: int, running: int) -> int:
    """The widest layer for a full step, and the logits of every running sequence."""
    needs = demand.needs
    if needs is None:
        return 0
    each = _LOGIT_BYTES if demand.device is None else _DEVICE_LOGIT_BYTES
    logits = each * running * needs.vocab_size if needs.generates else 0
    return batch_tokens * token_bytes(needs) + logits


def token_bytes(needs: Needs) -> int:
    """Of activations, for each token of a step."""
    return 4 * needs.hidden_size * _ACTIVATION_WIDTHS


def useful_kv_bytes(settings: Settings, demand: Demand) -> int:
    """Keys and values that are worth serving with: what was asked for, else some sequences of some length."""
    needs = demand.needs
    if needs is None:
        return 0
    if settings.kv_cache_bytes != "auto":
        return settings.kv_cache_bytes
    length = needs.max_model_len if settings.max_model_len == "auto" else settings.max_model_len
    seqs = USEFUL_SEQS if settings.max_running_seqs == "auto" else min(USEFUL_SEQS, settings.max_running_seqs)
    tokens = seqs * min(length, USEFUL_TOKENS)
    return max(tokens, 0 if settings.max_model_len == "auto" else length) * demand.kv_bytes_per_token
