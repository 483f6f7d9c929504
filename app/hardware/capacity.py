"""How long a context, how many sequences and how many bytes of keys and values the memory allows; the rest is refused with numbers."""

from __future__ import annotations

from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import Decision, count, gib
from app.hardware.facts import Facts, Needs
from app.settings import Settings

# From 64 rows on products gain little more from company (BF16 on two Zen 5 cores: 19.7 thousand rows a second at 64, 23 at 128, 25 at 512),
# while each sequence waits for all the others.
_RUNNING_SEQS = 64
_BATCH_TOKENS = 512  # where products reach their best rate on a CPU; a larger step only makes others wait longer
_WAITING_ROUNDS = 4  # times the running sequences

# Resident without a model, measured on x86-64 Linux: Python, FastAPI and torch 240 MiB, oneDNN's first product 40; a large tokenizer 100.
_PROCESS_BYTES = 400 * 2**20
_SLACK_SHARE = 16  # one part in so many is left to page tables, the allocator and the kernel
_ACTIVATION_WIDTHS = 16  # FP32 values of the hidden size that a token holds at the widest point of a layer
_MIN_TOKENS = 16  # a context shorter than this serves nobody
_ELEMENT_BYTES = {"fp32": 4, "bf16": 2}


@dataclass(frozen=True, slots=True)
class Demand:
    """What will be held: a checkpoint in a precision, keys and values in theirs, on one memory node or all.

    `int8_copy`: the layers' weights in eight bits as well.
    """

    needs: Needs | None
    precision: str
    kv_precision: str
    numa_node: int | None = None
    int8_copy: bool = False

    @property
    def weight_bytes(self) -> int:
        if self.needs is None:
            return 0
        copy = self.needs.int8_copy_bytes if self.int8_copy else 0
        return self.needs.bytes_by_precision.get(self.precision, self.needs.weight_bytes) + copy

    @property
    def held_in(self) -> str:
        return f"{self.precision} with an int8 copy" if self.int8_copy else self.precision

    @property
    def kv_bytes_per_token(self) -> int:
        return self.needs.kv_elements_per_token * _ELEMENT_BYTES[self.kv_precision] if self.needs else 0


@dataclass(frozen=True, slots=True)
class Capacity:
    weight_bytes: Decision[int]
    kv_cache_bytes: Decision[int]
    max_model_len: Decision[int]
    max_running_seqs: Decision[int]
    max_batch_tokens: Decision[int]
    max_waiting_requests: Decision[int]


@dataclass(frozen=True, slots=True)
class Room:
    """Bytes that keys and values may take, and a sentence on where they come from."""

    size: int
    story: str


def decide(facts: Facts, settings: Settings, demand: Demand) -> Capacity:
    batch = _batch_tokens(settings)
    running = _running_seqs(settings, batch.value)
    room = _room(facts, demand, batch.value, running.value)
    if settings.kv_cache_bytes != "auto":
        room = _forced_room(settings.kv_cache_bytes, room)
    length = _model_len(settings, demand, room)
    if settings.max_running_seqs == "auto":
        running = _fewer_where_tight(running, demand, room)
    waiting = _WAITING_ROUNDS * running.value
    return Capacity(
        weight_bytes=Decision(demand.weight_bytes, f"Resident in {demand.held_in}." if demand.needs else "No model is given."),
        kv_cache_bytes=_kv_cache_bytes(settings, demand, room, length.value * running.value),
        max_model_len=length,
        max_running_seqs=running,
        max_batch_tokens=batch,
        max_waiting_requests=Decision(
            waiting, f"{_WAITING_ROUNDS} times the running sequences: who would wait longer is told when to return."
        )
        if settings.max_waiting_requests == "auto"
        else Decision(settings.max_waiting_requests, "Asked for."),
    )


def _batch_tokens(settings: Settings) -> Decision[int]:
    if settings.max_batch_tokens != "auto":
        return Decision(settings.max_batch_tokens, "Asked for.")
    if settings.max_running_seqs != "auto" and settings.max_running_seqs > _BATCH_TOKENS:
        return Decision(settings.max_running_seqs, "One token for each of the sequences that may run.")
    return Decision(
        _BATCH_TOKENS, "Products reach their best rate there; a longer step would only make the other sequences wait."
    )


def _running_seqs(settings: Settings, batch_tokens: int) -> Decision[int]:
    if settings.max_running_seqs == "auto":
        return Decision(
            min(_RUNNING_SEQS, batch_tokens),
            "Beyond that many rows products gain little, and each sequence waits for the others.",
        )
    if settings.max_running_seqs > batch_tokens:
        raise PlanImpossible(
            f"max_running_seqs is {settings.max_running_seqs}, but a step has room for max_batch_tokens = {batch_tokens}, "
            "and each running sequence needs one token of it."
        )
    return Decision(settings.max_running_seqs, "Asked for.")


def _room(facts: Facts, demand: Demand, batch_tokens: int, running: int) -> Room:
    """What is available less the weights less what else the process holds; raises where nothing is left."""
    available, source = _available(facts, demand.numa_node)
    headroom = _PROCESS_BYTES + available // _SLACK_SHARE + _activation_bytes(demand.needs, batch_tokens, running)
    size = available - demand.weight_bytes - headroom
    if demand.needs and size < _MIN_TOKENS * demand.kv_bytes_per_token:
        raise PlanImpossible(
            f"The model does not fit: its weights need {gib(demand.weight_bytes)} in {demand.held_in} and the process beside them "
            f"{gib(headroom)}, but {gib(available)} are available ({source}). Give it more memory or serve a smaller model or precision."
        )
    held = f" less {gib(demand.weight_bytes)} of weights" if demand.needs else ""
    return Room(
        max(0, size), f"{gib(available)} available ({source}){held} less {gib(headroom)} for the process and its activations"
    )


def _available(facts: Facts, node: int | None) -> tuple[int, str]:
    """The least of what the machine, the control group and the memory node could give now, and which of them it is."""
    choices = [(facts.available_bytes, "the machine's memory")]
    if facts.cgroup.memory_available_bytes is not None and facts.cgroup.memory_limit_bytes is not None:
        choices.append(
            (facts.cgroup.memory_available_bytes, f"of the control group's limit of {gib(facts.cgroup.memory_limit_bytes)}")
        )
    choices += [
        (known.available_bytes, f"memory node {node}") for known in facts.numa_nodes if known.id == node and known.available_bytes
    ]
    return min(choices)


def _activation_bytes(needs: Needs | None, batch_tokens: int, running: int) -> int:
    """The widest layer for a full step, and logits of every running sequence twice: as computed and while they are picked from."""
    if needs is None:
        return 0
    return 4 * (batch_tokens * needs.hidden_size * _ACTIVATION_WIDTHS + 2 * running * needs.vocab_size)


def _forced_room(asked: int, room: Room) -> Room:
    if asked > room.size:
        raise PlanImpossible(f"kv_cache_bytes is {gib(asked)}, but there is room for {gib(room.size)}: {room.story}.")
    return Room(asked, f"{gib(asked)} were asked for")


def _model_len(settings: Settings, demand: Demand, room: Room) -> Decision[int]:
    needs, asked = demand.needs, settings.max_model_len
    if needs is None:
        return Decision(0 if asked == "auto" else asked, "Known when a model is given." if asked == "auto" else "Asked for.")
    if asked != "auto" and asked > needs.max_model_len:
        raise PlanImpossible(f"max_model_len is {asked}, but the model was made for {needs.max_model_len} tokens at the most.")
    wanted = needs.max_model_len if asked == "auto" else asked
    fits = room.size // demand.kv_bytes_per_token if demand.kv_bytes_per_token else wanted
    if fits >= wanted:
        return Decision(wanted, "As long as the model was made for." if asked == "auto" else "Asked for.")
    if asked != "auto" or fits < _MIN_TOKENS:
        raise PlanImpossible(
            f"A context of {wanted if asked != 'auto' else _MIN_TOKENS} tokens needs "
            f"{gib((wanted if asked != 'auto' else _MIN_TOKENS) * demand.kv_bytes_per_token)} of keys and values, "
            f"but there is room for {gib(room.size)}: {room.story}."
        )
    return Decision(fits, f"The model was made for {wanted} tokens; the memory holds keys and values of {fits}: {room.story}.")


def _fewer_where_tight(running: Decision[int], demand: Demand, room: Room) -> Decision[int]:
    """A sequence that has no room for a few tokens cannot run; it waits."""
    if not demand.kv_bytes_per_token:
        return running
    fits = max(1, room.size // (_MIN_TOKENS * demand.kv_bytes_per_token))
    if fits >= running.value:
        return running
    return Decision(fits, f"The memory holds keys and values of {count(fits, 'short sequence')}: {room.story}.")


def _kv_cache_bytes(settings: Settings, demand: Demand, room: Room, running_tokens: int) -> Decision[int]:
    """No more than could be used: every running sequence at its longest, and as much again for prefixes worth keeping."""
    if settings.kv_cache_bytes != "auto":
        return Decision(settings.kv_cache_bytes, "Asked for.")
    if demand.needs is None:
        return Decision(room.size, f"{room.story}; the weights of a model will come off that.")
    if not demand.kv_bytes_per_token:
        return Decision(0, "This model keeps no keys and values.")
    useful = 2 * running_tokens * demand.kv_bytes_per_token
    if useful <= room.size:
        return Decision(useful, "Every running sequence at its longest, and as much again for prefixes that may come back.")
    return Decision(room.size, f"{room.story}. Pages are taken when they are first written.")
