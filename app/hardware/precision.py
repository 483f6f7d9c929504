"""Decision about the precision of the weights.

It depends on the recipes that exist, on the memory, and on the measured speed. A faster precision that costs
quality must gain enough.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from app.errors import NoRecipe
from app.hardware.decision import Decision, RecipeKey, gib
from app.hardware.device_memory import DeviceMemory
from app.hardware.facts import Facts, Needs
from app.hardware.native_library import TWINS
from app.hardware.room import MIN_TOKENS, USEFUL_SEQS, USEFUL_TOKENS, Demand, least_room, useful_kv_bytes
from app.hardware.trials import FEW, SEVERAL, Timing, Trials, rate
from app.settings import Settings

# Instruction sets with BF16 products that accumulate in FP32. AVX-512 without BF16 would have to convert, which is slower than FP32.
_BF16_PRODUCTS = {"x86_64": ("amx_bf16", "avx512_bf16"), "arm64": ("bf16",)}

# Precisions whose products can sum in one order for any number of rows, and the kernel levels that do so; empty: all levels.
_FIXED_LEVELS = {"bf16": ("avx512bf16",), "int8": (), "int4": ()}

ROUNDED = ("int8", "int4")  # quantized precisions, from the most exact to the smallest
# Expected increase of perplexity over FP32, measured on the demo model with 4 bits in groups of 64 (docs/quality.md).
QUALITY_COSTS = {"int8": "about +0.02% perplexity", "int4": "about +0.8% perplexity in groups of 64"}
VECTOR_COSTS = {"int8": "vectors with a cosine similarity of 0.99 or more to the exact ones"}
MIN_PARAMETERS = 100_000_000  # smaller models are fast in any precision, and quantization costs them most
MIN_INT8_GAIN = 1.2  # least speedup, at one sequence and at eight, that is worth a small cost in quality
SLOW_TOKENS_PER_SECOND = 20.0  # at one sequence; below this rate users notice each gain (people read about five tokens a second)
MIN_INT4_GAIN = 1.3  # least speedup at one sequence; the quality cost of 4 bits is forty times that of 8 bits


@dataclass(frozen=True, slots=True)
class Candidates:
    """Everything that the choice of a precision depends on."""

    facts: Facts
    settings: Settings
    needs: Needs | None
    numa_node: int | None
    built: Collection[str]
    level: str  # level of the native kernels, or the name of the kernels used instead
    device: DeviceMemory | None = None  # None: a processor

    @property
    def kind(self) -> str:
        """Kind of the device."""
        return "cpu" if self.device is None else self.device.kind

    def adding_in_one_order(self, names: Sequence[str]) -> Sequence[str]:
        """Return the precisions that are batch invariant if `deterministic` is on, else all.

        If none is batch invariant, all are returned, and the setting is refused later.
        """
        if self.settings.deterministic == "off":
            return names
        return [name for name in names if adds_in_one_order(name, self.level)] or names


def choose(candidates: Candidates, trials: Trials, threads: int) -> Decision[str]:
    """Choose a precision for `auto`.

    This is the reference precision, or a smaller one if that does not fit or if the smaller one was measured to
    gain enough.
    """
    reference = _reference(candidates)
    names = candidates.adding_in_one_order([reference, *(name for name in ROUNDED if name in candidates.built)])
    fitting = _fitting(candidates, names)
    start = _exact(candidates, reference, names, fitting)
    timed = {name: timing for name in fitting if (timing := trials.at(name, threads))}
    if start.value not in timed:
        return start
    if candidates.needs and candidates.needs.num_parameters < MIN_PARAMETERS:
        millions = candidates.needs.num_parameters / 1e6
        return Decision(
            start.value, f"{start.reason} With {millions:.0f}M parameters quantization would have no noticeable gain."
        )
    return _quicker(start, timed)


def choose_for_vectors(candidates: Candidates, trials: Trials, threads: int) -> Decision[str]:
    """Choose a precision for `auto` for a model whose results are vectors or labels.

    It is the reference precision if that fits, because new vectors are compared with vectors that an index already
    has.
    """
    reference = _reference(candidates)
    names = candidates.adding_in_one_order([reference, *(name for name in ROUNDED[:1] if name in candidates.built)])
    start = _exact(candidates, reference, names, _fitting(candidates, names))
    now, int8 = trials.at(start.value, threads), trials.at("int8", threads)
    if start.value == "int8" or now is None or int8 is None:
        return start
    return Decision(
        start.value,
        f"{start.reason} int8 was measured {int8.gain_over(now):.2f} times as fast. It is not chosen by itself, since vectors must stay "
        "comparable with those in an index: set precision=int8 and compute the whole index with it.",
    )


def forced(candidates: Candidates) -> Decision[str]:
    """Return the decision for a precision that was set."""
    chosen = candidates.settings.precision
    if chosen == "bf16" and exact(candidates.facts, candidates.kind) != "bf16":
        whose = "processor" if candidates.kind == "cpu" else "chip"
        return Decision(chosen, f"Asked for; slow, since this {whose} has no BF16 products.")
    return Decision(chosen, "Asked for.")


def built_for(recipes: Collection[RecipeKey], kind: str, architecture: str, settings: Settings) -> frozenset[str]:
    """Return the precisions that have a recipe for this device.

    Raises:
        NoRecipe: the requested precision, or every precision that could be chosen, has no recipe.
    """
    built = frozenset(name for device, built_for, name in recipes if (device, built_for) == (kind, architecture))
    if settings.precision not in ("auto", *built):
        raise NoRecipe(f"Precision {settings.precision} on {kind} ({architecture}) is not supported yet. {what_exists(recipes)}")
    if settings.precision == "auto" and not built & {"bf16", "fp32"}:
        raise NoRecipe(f"Neither bf16 nor fp32 is supported on {kind} ({architecture}). {what_exists(recipes)}")
    return built


def what_exists(recipes: Collection[RecipeKey]) -> str:
    """Return a sentence that lists all recipes."""
    listed = ", ".join(f"{name} on {kind} ({architecture})" for kind, architecture, name in sorted(recipes))
    return f"Supported: {listed}." if listed else "There are no recipes."


def adds_in_one_order(name: str, level: str) -> bool:
    """Return true if a row's product is the same in any batch; `level` is the level of the native kernels."""
    levels = _FIXED_LEVELS.get(name)
    return level != TWINS and levels is not None and (not levels or level in levels)


def bf16_products(facts: Facts) -> str | None:
    """Return the instruction set of this processor with BF16 products, or None."""
    return next((name for name in _BF16_PRODUCTS.get(facts.architecture, ()) if name in facts.isa), None)


def exact(facts: Facts, kind: str) -> str:
    """Return the precision of weights that are not quantized: a 16-bit one if products with it are fast, else FP32.

    An M1 has only FP16.
    """
    if kind == "cuda":
        return "bf16"
    if kind == "mps":
        return "bf16" if "bf16" in facts.isa else "fp16"
    return "bf16" if bf16_products(facts) else "fp32"


def _reference(candidates: Candidates) -> str:
    name = exact(candidates.facts, candidates.kind)
    return name if name in candidates.built else "fp32"


def _exact(candidates: Candidates, reference: str, names: Sequence[str], fitting: Sequence[str]) -> Decision[str]:
    """Return the reference precision, or its replacement if it does not fit or is not batch invariant."""
    cost = _costs(candidates.needs)
    if fitting[0] != names[0]:
        return Decision(fitting[0], _why_not(candidates, names[0], fitting[0]))
    if names[0] != reference:
        return Decision(
            names[0],
            f"Deterministic is on, and on this processor products in {reference} do not sum in one order, but those in {names[0]} do; "
            f"the expected cost is {cost[names[0]]}.",
        )
    return Decision(reference, _why_exact(candidates, reference))


def _why_exact(candidates: Candidates, reference: str) -> str:
    multiplier, chip = bf16_products(candidates.facts), candidates.facts.cpu.microarchitecture or "chip"
    if candidates.device is not None and reference != "fp32":
        least = (
            f"{chip}'s GPU has FP16 products, and BF16 only by emulation" if reference == "fp16" else "The GPU has BF16 products"
        )
        return f"{least}: half the bytes of FP32 and several times its speed."
    if reference == "bf16":
        return f"This processor has BF16 products ({multiplier}): half the bytes of FP32 and several times its speed."
    return "This processor has no BF16 products." if not multiplier else "BF16 is not supported on this device yet."


def _costs(needs: Needs | None) -> Mapping[str, str]:
    return QUALITY_COSTS if needs is None or needs.generates else VECTOR_COSTS


# ---- memory ------------------------------------------------------------------------------------------------------------


def _fitting(candidates: Candidates, names: Sequence[str]) -> list[str]:
    """Return the precisions that leave memory for a useful KV cache.

    Without any, the last one that can serve at all; without any of those, the smallest, for the numbers in the
    refusal.
    """
    needs = candidates.needs
    if needs is None:
        return [names[0]]
    known = [name for name in names if name == names[0] or name in needs.bytes_by_precision]
    demands = {name: _demand(candidates, name) for name in known}
    left = {name: least_room(candidates.facts, candidates.settings, demands[name]).size for name in known}
    useful = [name for name in known if left[name] >= useful_kv_bytes(candidates.settings, demands[name])]
    least = [name for name in known if left[name] >= MIN_TOKENS * demands[name].kv_bytes_per_token]
    return useful or least[-1:] or [min(known, key=lambda name: demands[name].weight_bytes)]


def _demand(candidates: Candidates, name: str) -> Demand:
    plain = "fp32" if name == "fp32" else "bf16"
    kv_precision = "int8" if candidates.settings.kv_precision == "int8" and plain == "bf16" else plain
    return Demand(candidates.needs, name, kv_precision, candidates.numa_node, device=candidates.device)


def _why_not(candidates: Candidates, reference: str, chosen: str) -> str:
    left = least_room(candidates.facts, candidates.settings, _demand(candidates, reference))
    takes, instead = (gib(_demand(candidates, name).weight_bytes) for name in (reference, chosen))
    kept = f"with the keys and values of {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens "
    beside = kept if candidates.needs is None or candidates.needs.generates else "with the process itself "
    return (
        f"Weights in {reference} take {takes}; {beside}that is more than the {gib(left.available)} available ({left.source}). "
        f"In {chosen} they take {instead}; the expected cost is {_costs(candidates.needs)[chosen]}."
    )


# ---- speed -------------------------------------------------------------------------------------------------------------


def _quicker(start: Decision[str], timed: dict[str, Timing]) -> Decision[str]:
    chosen = start
    if start.value != "int8" and "int8" in timed and start.value not in ROUNDED:
        chosen = _eight_bits(start, timed[start.value], timed["int8"])
    if chosen.value != "int4" and "int4" in timed:
        chosen = _four_bits(chosen, timed[chosen.value], timed["int4"])
    return chosen


def _eight_bits(start: Decision[str], now: Timing, int8: Timing) -> Decision[str]:
    gains = [int8.decode_rate(rows) / now.decode_rate(rows) for rows in (FEW, SEVERAL)]
    measured = f"{gains[0]:.2f} and {gains[1]:.2f} times as fast at one sequence and at {SEVERAL}"
    if min(gains) < MIN_INT8_GAIN:
        return Decision(
            start.value,
            f"{start.reason} int8 was measured {measured}, under the {MIN_INT8_GAIN:g} that would justify its cost in quality.",
        )
    return Decision(
        "int8",
        f"Measured {_decodes(int8)}, against {_decodes(now)} in {start.value} ({gains[0]:.1f} and {gains[1]:.1f} times as fast); "
        f"the expected cost is {QUALITY_COSTS['int8']}.",
    )


def _four_bits(chosen: Decision[str], now: Timing, int4: Timing) -> Decision[str]:
    """Choose int4 if the precision chosen so far is slow for one sequence and int4 gains enough."""
    own, its = now.decode_rate(FEW), int4.decode_rate(FEW)
    if own >= SLOW_TOKENS_PER_SECOND:
        return chosen
    slow = f"{rate(own)} tokens/s at one sequence in {chosen.value}, which is under {SLOW_TOKENS_PER_SECOND:g}"
    if its < MIN_INT4_GAIN * own:
        return Decision(chosen.value, f"{chosen.reason} int4 would gain too little: {rate(its)} tokens/s at one sequence.")
    return Decision(
        "int4",
        f"Measured {slow}, and {_decodes(int4)} in int4 ({its / own:.1f} times as fast); the expected cost is {QUALITY_COSTS['int4']}.",
    )


def _decodes(timing: Timing) -> str:
    return f"{rate(timing.decode_rate(FEW))} tokens/s at one sequence and {rate(timing.decode_rate(SEVERAL))} at {SEVERAL}"
