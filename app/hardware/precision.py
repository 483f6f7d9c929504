"""In which precision weights are held: from what is built, what fits, and what was measured; a gain that costs quality must be worth it."""

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

# Instruction sets that multiply BF16 by BF16 and add in FP32. AVX-512 without BF16 only converts: slower than FP32.
_BF16_PRODUCTS = {"x86_64": ("amx_bf16", "avx512_bf16"), "arm64": ("bf16",)}

# Precisions whose products can add in one order for any number of rows, and the levels of our kernels that do so; empty: all.
_FIXED_LEVELS = {"bf16": ("avx512bf16",), "int8": (), "int4": ()}

ROUNDED = ("int8", "int4")  # precisions whose weights are codes with scales, from the more exact to the smaller
# More perplexity than in FP32, to be expected: the demo's, with four bits in groups of 64 (docs/quality.md).
QUALITY_COSTS = {"int8": "about +0.02% perplexity", "int4": "about +0.8% perplexity in groups of 64"}
VECTOR_COSTS = {"int8": "a turn of each vector, to a cosine of 0.99 or more with the exact one"}
MIN_PARAMETERS = 100_000_000  # a smaller model is quick in any precision, and rounding costs small models most
MIN_INT8_GAIN = 1.2  # times as quick, at one sequence and at eight: below, even a small cost in quality buys too little
SLOW_TOKENS_PER_SECOND = (
    20.0  # at one sequence: below, who waits for an answer feels each gain (people read about five tokens a second)
)
MIN_INT4_GAIN = 1.3  # times as quick at one sequence: four bits cost forty times the quality that eight do


@dataclass(frozen=True, slots=True)
class Candidates:
    """What a precision is chosen among, and for what."""

    facts: Facts
    settings: Settings
    needs: Needs | None
    numa_node: int | None
    built: Collection[str]
    level: str  # of our kernels, or whose products serve instead
    device: DeviceMemory | None = None  # None: a processor

    @property
    def kind(self) -> str:
        return "cpu" if self.device is None else self.device.kind

    def adding_in_one_order(self, names: Sequence[str]) -> Sequence[str]:
        """Those whose products do, where that is asked for; all where none does, which is refused later."""
        if self.settings.deterministic == "off":
            return names
        return [name for name in names if adds_in_one_order(name, self.level)] or names


def choose(candidates: Candidates, trials: Trials, threads: int) -> Decision[str]:
    """`auto`: the reference precision, or a smaller one where that does not fit or is measured to gain enough."""
    reference = _reference(candidates)
    names = candidates.adding_in_one_order([reference, *(name for name in ROUNDED if name in candidates.built)])
    fitting = _fitting(candidates, names)
    start = _exact(candidates, reference, names, fitting)
    timed = {name: timing for name in fitting if (timing := trials.at(name, threads))}
    if start.value not in timed:
        return start
    if candidates.needs and candidates.needs.num_parameters < MIN_PARAMETERS:
        millions = candidates.needs.num_parameters / 1e6
        return Decision(start.value, f"{start.reason} With {millions:.0f}M parameters rounding would gain nothing that is felt.")
    return _quicker(start, timed)


def choose_for_vectors(candidates: Candidates, trials: Trials, threads: int) -> Decision[str]:
    """`auto` where vectors come out, or labels: as exact as is quick, for vectors are compared with those that an index holds already."""
    reference = _reference(candidates)
    names = candidates.adding_in_one_order([reference, *(name for name in ROUNDED[:1] if name in candidates.built)])
    start = _exact(candidates, reference, names, _fitting(candidates, names))
    now, int8 = trials.at(start.value, threads), trials.at("int8", threads)
    if start.value == "int8" or now is None or int8 is None:
        return start
    return Decision(
        start.value,
        f"{start.reason} int8 was measured {int8.gain_over(now):.2f} times as quick; vectors must stay comparable with those that an index "
        "holds, so that is for you to ask for: precision=int8, for all of an index.",
    )


def forced(candidates: Candidates) -> Decision[str]:
    chosen = candidates.settings.precision
    if chosen == "bf16" and exact(candidates.facts, candidates.kind) != "bf16":
        whose = "processor" if candidates.kind == "cpu" else "chip"
        return Decision(chosen, f"Asked for; slow, since this {whose} does not multiply BF16.")
    return Decision(chosen, "Asked for.")


def built_for(recipes: Collection[RecipeKey], kind: str, architecture: str, settings: Settings) -> frozenset[str]:
    """Precisions that have a recipe there. Raises `NoRecipe` where what is asked for, or all that could be chosen, has none."""
    built = frozenset(name for device, built_for, name in recipes if (device, built_for) == (kind, architecture))
    if settings.precision not in ("auto", *built):
        raise NoRecipe(f"Precision {settings.precision} on {kind} ({architecture}) is not built yet. {what_exists(recipes)}")
    if settings.precision == "auto" and not built & {"bf16", "fp32"}:
        raise NoRecipe(f"Neither bf16 nor fp32 is built on {kind} ({architecture}). {what_exists(recipes)}")
    return built


def what_exists(recipes: Collection[RecipeKey]) -> str:
    listed = ", ".join(f"{name} on {kind} ({architecture})" for kind, architecture, name in sorted(recipes))
    return f"What exists: {listed}." if listed else "Nothing is built."


def adds_in_one_order(name: str, level: str) -> bool:
    """Whether a row's product is the same among any others; `level` of our kernels."""
    levels = _FIXED_LEVELS.get(name)
    return level != TWINS and levels is not None and (not levels or level in levels)


def bf16_products(facts: Facts) -> str | None:
    """The instruction set that multiplies BF16 here, or None."""
    return next((name for name in _BF16_PRODUCTS.get(facts.architecture, ()) if name in facts.isa), None)


def exact(facts: Facts, kind: str) -> str:
    """What weights are held in where nothing is rounded: half of FP32's bytes wherever that multiplies well. An M1 has FP16 alone."""
    if kind == "cuda":
        return "bf16"
    if kind == "mps":
        return "bf16" if "bf16" in facts.isa else "fp16"
    return "bf16" if bf16_products(facts) else "fp32"


def _reference(candidates: Candidates) -> str:
    name = exact(candidates.facts, candidates.kind)
    return name if name in candidates.built else "fp32"


def _exact(candidates: Candidates, reference: str, names: Sequence[str], fitting: Sequence[str]) -> Decision[str]:
    """The reference, or what takes its place where that does not fit, or may not be."""
    cost = _costs(candidates.needs)
    if fitting[0] != names[0]:
        return Decision(fitting[0], _why_not(candidates, names[0], fitting[0]))
    if names[0] != reference:
        return Decision(
            names[0],
            f"Deterministic is on, and on this processor products in {reference} do not add in one order, those in {names[0]} do; "
            f"the expected cost is {cost[names[0]]}.",
        )
    return Decision(reference, _why_exact(candidates, reference))


def _why_exact(candidates: Candidates, reference: str) -> str:
    multiplier, chip = bf16_products(candidates.facts), candidates.facts.cpu.microarchitecture or "chip"
    if candidates.device is not None and reference != "fp32":
        least = f"{chip}'s GPU multiplies FP16, and BF16 only in steps" if reference == "fp16" else "The GPU multiplies BF16"
        return f"{least}: half the bytes of FP32 and several times its products."
    if reference == "bf16":
        return f"This processor multiplies BF16 ({multiplier}): half the bytes of FP32 and several times its products."
    return "This processor does not multiply BF16." if not multiplier else "BF16 is not built for this device yet."


def _costs(needs: Needs | None) -> Mapping[str, str]:
    return QUALITY_COSTS if needs is None or needs.generates else VECTOR_COSTS


# ---- memory ------------------------------------------------------------------------------------------------------------


def _fitting(candidates: Candidates, names: Sequence[str]) -> list[str]:
    """Those with room for useful keys and values; else the smallest that serves anybody; else the smallest, for the refusal's numbers."""
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
    kept = f"with keys and values worth having (of {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens) "
    beside = kept if candidates.needs is None or candidates.needs.generates else "with the process itself "
    return (
        f"Weights in {reference} take {takes}: {beside}that is more than the {gib(left.available)} available ({left.source}). "
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
    measured = f"{gains[0]:.2f} and {gains[1]:.2f} times as quick at one sequence and at {SEVERAL}"
    if min(gains) < MIN_INT8_GAIN:
        return Decision(
            start.value,
            f"{start.reason} int8 was measured {measured}, under the {MIN_INT8_GAIN:g} that its cost in quality asks for.",
        )
    return Decision(
        "int8",
        f"Measured {_decodes(int8)}, against {_decodes(now)} in {start.value} ({gains[0]:.1f} and {gains[1]:.1f} times as quick); "
        f"the expected cost is {QUALITY_COSTS['int8']}.",
    )


def _four_bits(chosen: Decision[str], now: Timing, int4: Timing) -> Decision[str]:
    """Only where what was chosen so far is slow for one sequence."""
    own, its = now.decode_rate(FEW), int4.decode_rate(FEW)
    if own >= SLOW_TOKENS_PER_SECOND:
        return chosen
    slow = f"{rate(own)} tokens/s at one sequence in {chosen.value}, which is under {SLOW_TOKENS_PER_SECOND:g}"
    if its < MIN_INT4_GAIN * own:
        return Decision(chosen.value, f"{chosen.reason} int4 would gain too little: {rate(its)} tokens/s at one sequence.")
    return Decision(
        "int4",
        f"Measured {slow}, and {_decodes(int4)} in int4 ({its / own:.1f} times as quick); the expected cost is {QUALITY_COSTS['int4']}.",
    )


def _decodes(timing: Timing) -> str:
    return f"{rate(timing.decode_rate(FEW))} tokens/s at one sequence and {rate(timing.decode_rate(SEVERAL))} at {SEVERAL}"
