"""Precision of weights, activations and KV cache, decided together because they share one memory."""

from __future__ import annotations

from dataclasses import dataclass

from app.hardware import int8_copy, numerics, precision
from app.hardware.capacity import chunk
from app.hardware.decision import Decision, Dtype
from app.hardware.int8_copy import Copy
from app.hardware.precision import Candidates
from app.hardware.room import LEAST_BATCH_TOKENS, Demand, Room, least_room, room, useful_kv_bytes
from app.hardware.trials import Trials


@dataclass(frozen=True, slots=True)
class Holding:
    """Decisions about precisions and dtypes."""

    precision: Decision[str]
    dtype: Decision[Dtype]
    kv_precision: Decision[str]
    int8_copy: Decision[bool]


def decide(candidates: Candidates, trials: Trials, threads: int) -> Holding:
    """Decide the precision of the weights, the dtype of activations, the KV precision and the int8 copy.

    Precisions are compared with the step times at `threads` threads.
    """
    settings = candidates.settings
    auto = settings.precision == "auto"
    generates = candidates.needs is None or candidates.needs.generates
    choose = precision.choose if generates else precision.choose_for_vectors
    chosen = choose(candidates, trials, threads) if auto else precision.forced(candidates)
    kind, node, device = candidates.kind, candidates.numa_node, candidates.device
    dtype = numerics.dtype(candidates.facts, chosen.value, kind)
    wide = Demand(candidates.needs, chosen.value, numerics.KV_NAMES[dtype.value], node, device=device)
    kv_precision = numerics.kv_precision(settings, dtype.value, _short(candidates, wide) if generates else None, kind)
    if not generates:
        kv_precision = Decision(kv_precision.value, "This model keeps no keys and values.")
    if device is not None:
        return Holding(chosen, dtype, kv_precision, int8_copy.on_device(settings, kind))
    lean = Demand(candidates.needs, chosen.value, kv_precision.value, node)
    copy = int8_copy.decide(settings, chosen.value, _copy(candidates, lean, trials, threads))
    return Holding(chosen, dtype, kv_precision, copy)


def _short(candidates: Candidates, wide: Demand) -> Room | None:
    """Return the memory left for a KV cache in the activations' dtype if it is less than the useful minimum.

    None if there is enough, or if `kv_cache_bytes` was set.
    """
    if wide.needs is None or candidates.settings.kv_cache_bytes != "auto":
        return None
    left = least_room(candidates.facts, candidates.settings, wide)
    return left if left.size < useful_kv_bytes(candidates.settings, wide) else None


def _copy(candidates: Candidates, lean: Demand, trials: Trials, threads: int) -> Copy:
    """Return the memory and the measured gain of an 8-bit copy in addition to 4-bit weights."""
    facts, settings, needs = candidates.facts, candidates.settings, candidates.needs
    timing = trials.at("int4", threads)
    tokens = chunk(facts, settings, lean, timing).value
    if needs is None:
        return Copy(0, False, tokens)
    both = Demand(needs, lean.precision, lean.kv_precision, lean.numa_node, int8_copy=True)
    left = room(facts, both, tokens, LEAST_BATCH_TOKENS)
    fits = left.size >= useful_kv_bytes(settings, both) and needs.int8_copy_bytes * int8_copy.ROOM_SHARE <= left.available
    fast = trials.at("int4", threads, int8_copy=True) or trials.at("int8", threads)
    return Copy(needs.int8_copy_bytes, fits, tokens, timing, fast)
