"""Decisions about the precision of the weights, and of single layers.

They depend on recipes, memory, and measured or estimated speed. A faster precision that costs quality must gain enough.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from app.errors import NoRecipe, PlanImpossible, raise_kernel_errors_as
from app.hardware.decision import Decision, Measurements, RecipeKey, format_bytes
from app.hardware.facts import Facts, Needs
from app.hardware.plan.memory_budget import (
    MIN_CONTEXT_TOKENS,
    USEFUL_SEQS,
    USEFUL_TOKENS,
    DeviceMemory,
    MemoryDemand,
    smallest_step_budget,
    useful_kv_cache_bytes,
)
from app.hardware.plan.speed import (
    FEW_SEQS,
    SEVERAL_SEQS,
    EstimateInputs,
    TrialTiming,
    TrialTimings,
    describe_sources,
    format_rate,
    known_timing,
)
from app.hardware.probe.software import TORCH_KERNELS
from app.settings import Settings, parse_kept_layers
from armature_kernels.linear.torchao_config import KLEIDI_INT4, is_torchao, parse_config

# Instruction sets with BF16 products that accumulate in FP32.
_BF16_PRODUCTS = {"x86_64": ("amx_bf16", "avx512_bf16"), "arm64": ("bf16",)}

# Precisions whose native products can sum in one order for any number of rows.
_BATCH_INVARIANT = frozenset({"fp32", "bf16", "int8", "int4", "int4-small"})

QUANTIZED_PRECISIONS = ("int8", "int4", "int4-small")  # from the most exact to the smallest
INT4_PRECISIONS = ("int4", "int4-small")
_MANY_OPERATIONS = 1e8  # of a row of a program
AUTO_PRECISIONS = ("int8", "int4")  # quantized precisions that `auto` considers
# No other model's figure is quoted: what rounding costs differs from model to model by a factor of a hundred.
UNKNOWN_COST = "its cost in quality is not measured for this model (it is, when the weights are packed)"
MIN_PARAMETERS = 100_000_000  # smaller models are fast in any precision, and quantization costs them most
MIN_INT8_GAIN = 1.2  # least speedup, at one sequence and at eight, that is worth a small cost in quality
# Rate at one sequence below which an answer of 500 tokens takes more than ten seconds, so that users notice each gain.
SLOW_TOKENS_PER_SECOND = 50.0
MIN_INT4_GAIN = 1.3  # least speedup at one sequence; 4 bits cost about ten times as much quality as 8
MIN_INT4_MEAN_GAIN = 1.1  # least geometric mean of the speedups at one sequence and at eight

# What is never rounded of a layer with a recurrent state. Mamba-2 computes its steps in the product of all its inputs.
_STATE_WEIGHTS = (
    "Of layers with a recurrent state, what sets how fast it decays (rates, steps, and the delta rule's products of both "
    "and of betas), convolutions and norms stay exact, since an error there is multiplied at each token."
)
_WIDENED = (
    "this processor has no BF16 products, so weights are widened while they are read: half the bytes of FP32, and at one "
    "sequence nearly twice its speed"
)

_WIDENED_PROGRAM = (
    "this processor has no BF16 products: linear layers take half the bytes of FP32, and convolutions are slower than "
    "in FP32"
)


def describe_cost(kind: str, cost: float) -> str:
    """Return what a precision costs a model of this kind in quality, as a clause."""
    if kind == "encoder":
        return f"vectors have cosines of at least {1 - cost:.4f} with the exact ones"
    return f"it raises perplexity by {100 * cost:.1f}%"


@dataclass(frozen=True, slots=True)
class PrecisionCandidates:
    """Everything that the choice of a precision depends on."""

    facts: Facts
    settings: Settings
    needs: Needs | None
    numa_node: int | None
    available: Collection[str]
    level: str  # level of the native kernels, or the name of the kernels used instead
    device: DeviceMemory | None = None  # None: a processor

    @property
    def kind(self) -> str:
        return "cpu" if self.device is None else self.device.kind

    @property
    def by_library(self) -> bool:
        """True if the library transformers computes the model."""
        return self.needs is not None and self.needs.engine == "transformers"

    def cost_phrase(self, name: str) -> str:
        """Return what a quantized precision costs in quality, as a clause."""
        cost = None if self.needs is None else self.needs.quality_costs.get(name)
        if cost is None:
            return UNKNOWN_COST
        kind = "decoder" if self.needs is None else self.needs.kind
        return f"{describe_cost(kind, cost)} (measured with this model when its weights were packed)"

    def within_budget(self, name: str) -> bool:
        """Return whether `auto` may choose a precision: exact, or not known to cost more than `quality_budget`.

        On a GPU no cost is ever measured, so none is within the budget.
        """
        if name not in QUANTIZED_PRECISIONS:
            return True
        if self.kind != "cpu":
            return False
        cost = 0.0 if self.needs is None else self.needs.quality_costs.get(name, 0.0)
        return 0 < self.settings.quality_budget >= cost

    def batch_invariant_only(self, names: Sequence[str]) -> Sequence[str]:
        """Return the batch-invariant precisions with `deterministic`, else all; all too if none is."""
        if not needs_batch_invariance(self.settings):
            return names
        return [name for name in names if is_batch_invariant(name, self.level)] or names

    def may_follow_speed(self, start: str) -> bool:
        """Return False if a setting that was made suits only some precisions: then speed does not choose another one.

        Otherwise a plan made before the measurement could be served, and the one made after it refused.
        """
        asked = self.settings
        suits_only_quantized = asked.int8_copy == "on" or bool(asked.keep_layers)
        return not (suits_only_quantized or (asked.kv_precision != "auto" and start == "fp32"))

    def estimate_inputs(self, measurements: Measurements | None) -> EstimateInputs:
        return EstimateInputs(self.facts, self.needs, self.level, self.kind, measurements)


def choose_precision(candidates: PrecisionCandidates, measurements: Measurements | None, threads: int) -> Decision[str]:
    """Choose a precision for `auto`: the reference precision, or a smaller one if that fits or gains enough."""
    reference = reference_precision(candidates)
    names = candidates.batch_invariant_only(
        [reference, *(name for name in AUTO_PRECISIONS if name in candidates.available)]
    )
    fitting = fitting_precisions(candidates, names)
    start = reference_or_replacement(candidates, reference, names, fitting)
    affordable = [name for name in fitting if name == start.value or candidates.within_budget(name)]
    inputs = candidates.estimate_inputs(measurements)
    known = {name: timing for name in affordable if (timing := known_timing(inputs, name, threads))}
    chosen = _choose_known(candidates, start, known)
    costly = [name for name in fitting if name not in affordable]
    return Decision(chosen.value, f"{chosen.reason} {_costly_phrase(candidates, costly)}") if costly else chosen


def _choose_known(
    candidates: PrecisionCandidates, start: Decision[str], known: Mapping[str, TrialTiming]
) -> Decision[str]:
    if start.value not in known or len(known) == 1 or not candidates.may_follow_speed(start.value):
        return start
    if candidates.needs and candidates.needs.num_parameters < MIN_PARAMETERS:
        millions = candidates.needs.num_parameters / 1e6
        return Decision(
            start.value, f"{start.reason} With {millions:.0f}M parameters quantization would have no noticeable gain."
        )
    now = known[start.value]
    if now.source == "measured" and now.decode_rate(FEW_SEQS) >= SLOW_TOKENS_PER_SECOND:
        # what is known to be fast enough gives way only to what was measured too
        known = {name: timing for name, timing in known.items() if timing.source != "estimated"}
    return _choose_faster(candidates, start, known)


def _costly_phrase(candidates: PrecisionCandidates, names: Sequence[str]) -> str:
    budget = candidates.settings.quality_budget
    if candidates.kind != "cpu":
        return (
            f"What {' and '.join(names)} would cost in quality is not measured on a GPU, so weights are quantized "
            "only if precision says so, or if others do not fit."
        )
    if budget == 0:
        return "quality_budget is 0, so weights are not quantized."
    said = "; ".join(f"{name}: {candidates.cost_phrase(name)}" for name in names)
    return f"Over the quality_budget of {100 * budget:g}% is {said}."


def forced_precision(candidates: PrecisionCandidates) -> Decision[str]:
    """Return the decision for what was set. Raises `PlanImpossible` for torchao with an exported program."""
    chosen = candidates.settings.weight_format
    if is_torchao(chosen):
        if candidates.needs is not None and candidates.needs.kind == "program":
            raise PlanImpossible(
                f"quantization is {chosen}, but exported programs have no formats of torchao: leave it out."
            )
        return Decision(
            chosen, "Asked for by quantization: torchao quantizes and multiplies; the output layer stays exact."
        )
    if chosen in QUANTIZED_PRECISIONS and candidates.kind == "cpu":
        return Decision(chosen, f"Asked for; {candidates.cost_phrase(chosen)}.")
    if chosen == "bf16" and unquantized_precision(candidates.facts, candidates.kind) != "bf16":
        if candidates.needs is not None and candidates.needs.kind == "program":
            return Decision(chosen, f"Asked for; {_WIDENED_PROGRAM}.")
        if candidates.kind == "cpu" and candidates.level != TORCH_KERNELS:
            return Decision(chosen, f"Asked for; {_WIDENED}.")
        whose = "processor" if candidates.kind == "cpu" else "chip"
        return Decision(chosen, f"Asked for; slow, since this {whose} has no BF16 products.")
    return Decision(chosen, "Asked for.")


def kleidi_candidates(facts: Facts, device: str) -> tuple[str, ...]:
    """Return torchao's formats of four bits that KleidiAI multiplies here: group 32, then per channel.

    Without BF16 products there are none: activations, keys and values would be twice as large as with our int4.
    """
    has_kleidi = facts.torch is not None and bool(facts.torch.kleidiai) and bf16_products(facts) is not None
    return tuple(KLEIDI_INT4.values()) if has_kleidi and device == "cpu" and facts.architecture == "arm64" else ()


def choose_int4_kernels(
    candidates: PrecisionCandidates, chosen: Decision[str], trials: TrialTimings, threads: int
) -> Decision[str]:
    """Choose between our int4 and KleidiAI's through torchao, if int4 was chosen and both were measured.

    torchao rounds to nearest, without a text and without 8-bit layers, so its gain must be worth that. With one scale
    for each output it loses too much to be chosen unasked.
    """
    now, settings = trials.find("int4", threads), candidates.settings
    if chosen.value != "int4" or now is None or "on" in (settings.deterministic, settings.int8_copy, settings.compile):
        return chosen
    timed = {name: trials.find(name, threads) for name in kleidi_candidates(candidates.facts, candidates.kind)}
    gains = {name: timing.speedup_over(now) for name, timing in timed.items() if timing is not None}
    if not gains:
        return chosen
    labels = {KLEIDI_INT4[32]: "in groups of 32", KLEIDI_INT4[None]: "per channel"}
    measured = " and ".join(f"{gain:.2f} times as fast {labels[name]}" for name, gain in gains.items())
    winner = KLEIDI_INT4[32]
    if gains.get(winner, 0.0) < MIN_INT4_GAIN or not _is_useful(candidates, winner):
        return Decision(
            "int4",
            f"{chosen.reason} Our kernels serve it: KleidiAI by torchao, which rounds to nearest, was measured {measured}.",
        )
    return Decision(
        winner,
        f"{chosen.reason} KleidiAI by torchao serves it: it was measured {measured} as our kernels; {UNKNOWN_COST}.",
    )


def available_precisions(
    recipes: Collection[RecipeKey], kind: str, architecture: str, settings: Settings
) -> frozenset[str]:
    """Return the precisions with a recipe for this device. Raises `NoRecipe`, or `PlanImpossible`."""
    built = frozenset(name for device, built_for, name in recipes if (device, built_for) == (kind, architecture))
    if settings.quantization:
        with raise_kernel_errors_as(PlanImpossible):
            parse_config(settings.quantization)
        if settings.precision != "auto":
            raise PlanImpossible(
                f"quantization is {settings.quantization}, which decides the format of the weights, and precision is "
                f"{settings.precision}: leave one of them out."
            )
        return built
    if settings.precision not in ("auto", *built):
        raise NoRecipe(
            f"Precision {settings.precision} on {kind} ({architecture}) is not supported yet. {list_recipes(recipes)}"
        )
    if settings.precision == "auto" and not built & {"bf16", "fp32"}:
        raise NoRecipe(f"Neither bf16 nor fp32 is supported on {kind} ({architecture}). {list_recipes(recipes)}")
    return built


def list_recipes(recipes: Collection[RecipeKey]) -> str:
    """Return a sentence that lists all recipes."""
    listed = ", ".join(f"{name} on {kind} ({architecture})" for kind, architecture, name in sorted(recipes))
    return f"Supported: {listed}." if listed else "There are no recipes."


def needs_batch_invariance(settings: Settings) -> bool:
    return settings.deterministic == "on"


def is_batch_invariant(name: str, level: str) -> bool:
    """Return true if a row's product is the same in any batch; `level` is the level of the native kernels."""
    return level != TORCH_KERNELS and name in _BATCH_INVARIANT


def bf16_products(facts: Facts) -> str | None:
    """Return the instruction set of this processor with BF16 products, or None."""
    return next((name for name in _BF16_PRODUCTS.get(facts.architecture, ()) if name in facts.isa), None)


def unquantized_precision(facts: Facts, kind: str) -> str:
    """Return the precision of weights that are not quantized: 16 bits if such products are fast, else FP32."""
    if kind == "cuda":
        return "bf16"
    if kind == "mps":
        return "bf16" if "bf16" in facts.isa else "fp16"
    return "bf16" if bf16_products(facts) else "fp32"


def exact_precision(facts: Facts, kind: str, needs: Needs | None, level: str) -> str:
    """Return the precision of weights that are not quantized, for this checkpoint.

    A decoder in BF16 stays so on a processor without BF16 products too, if the native kernels run: they read half the
    bytes of FP32 and widen them. One in eight bits or fewer is widened to BF16. Without a checkpoint, the answer is for
    a decoder in BF16.
    """
    name = unquantized_precision(facts, kind)
    narrow = needs is None or (needs.generates and bool(needs.stored_quantization or needs.stored_dtype == "bfloat16"))
    return "bf16" if name == "fp32" and kind == "cpu" and narrow and level != TORCH_KERNELS else name


def reference_precision(candidates: PrecisionCandidates) -> str:
    """Return the precision that `auto` takes if it fits and no other one gains enough."""
    name = exact_precision(candidates.facts, candidates.kind, candidates.needs, candidates.level)
    return name if name in candidates.available and not _stays_in_fp32(candidates) else "fp32"


def _stays_in_fp32(candidates: PrecisionCandidates) -> bool:
    """Return True for a program that ONNX Runtime may compute, in FP32, unless AMX multiplies a large one in BF16.

    Measured on Zen 4 it has 4 to 7 times the speed of torch's operators in BF16 for a recommender, 0.8 to 0.9 for ResNet-18.
    """
    needs = candidates.needs
    if needs is None or needs.kind != "program" or needs.engine != "auto" or candidates.settings.engine == "native":
        return False
    return bf16_products(candidates.facts) != "amx_bf16" or needs.operations_per_token < _MANY_OPERATIONS


def reference_or_replacement(
    candidates: PrecisionCandidates, reference: str, names: Sequence[str], fitting: Sequence[str]
) -> Decision[str]:
    """Return the reference precision, or its replacement if it does not fit or is not batch invariant."""
    if fitting[0] != names[0]:
        return Decision(fitting[0], _does_not_fit_reason(candidates, names[0], fitting[0]))
    if names[0] != reference:
        return Decision(
            names[0],
            f"Deterministic is on, and on this processor products in {reference} do not sum in one order, but those in {names[0]} do"
            f"{_cost_phrase(candidates, names[0])}.",
        )
    return Decision(reference, _reference_reason(candidates, reference))


def _reference_reason(candidates: PrecisionCandidates, reference: str) -> str:
    multiplier, chip = bf16_products(candidates.facts), candidates.facts.cpu.microarchitecture or "chip"
    if candidates.device is not None and reference != "fp32":
        least = (
            f"{chip}'s GPU has FP16 products, and BF16 only by emulation"
            if reference == "fp16"
            else "The GPU has BF16 products"
        )
        return f"{least}: half the bytes of FP32 and several times its speed."
    if reference == "bf16" and not multiplier:
        if candidates.needs is None:
            return f"For a checkpoint in BF16, as most are: {_WIDENED}."
        return f"The checkpoint is in {candidates.needs.stored_quantization or 'BF16'}; {_WIDENED}."
    if reference == "bf16":
        return f"This processor has BF16 products ({multiplier}): half the bytes of FP32 and several times its speed."
    if _stays_in_fp32(candidates):
        return "The type of the program, which ONNX Runtime computes if that is faster: results stay as they are."
    return "This processor has no BF16 products." if not multiplier else "BF16 is not supported on this device yet."


def _cost_phrase(candidates: PrecisionCandidates, name: str) -> str:
    return f"; {candidates.cost_phrase(name)}" if name in QUANTIZED_PRECISIONS else ""


# ---- memory ---------------------------------------------------------------------------------------------------------


def fitting_precisions(candidates: PrecisionCandidates, names: Sequence[str]) -> list[str]:
    """Return the precisions that leave memory for a useful KV cache, else the last that serves, else the smallest."""
    needs = candidates.needs
    if needs is None:
        return [names[0]]
    known = [name for name in names if name == names[0] or name in needs.bytes_by_precision]
    demands = {name: _demand(candidates, name) for name in known}
    left = {name: smallest_step_budget(candidates.facts, candidates.settings, demands[name]).size for name in known}
    useful = [name for name in known if left[name] >= useful_kv_cache_bytes(candidates.settings, demands[name])]
    least = [name for name in known if left[name] >= MIN_CONTEXT_TOKENS * demands[name].kv_bytes_per_token]
    return useful or least[-1:] or [min(known, key=lambda name: demands[name].weight_bytes)]


def _is_useful(candidates: PrecisionCandidates, name: str) -> bool:
    demand = _demand(candidates, name)
    left = smallest_step_budget(candidates.facts, candidates.settings, demand).size
    return candidates.needs is not None and left >= useful_kv_cache_bytes(candidates.settings, demand)


def _demand(candidates: PrecisionCandidates, name: str) -> MemoryDemand:
    plain = "fp32" if name == "fp32" else "bf16"
    kv_precision = "int8" if candidates.settings.kv_precision == "int8" and plain == "bf16" else plain
    return MemoryDemand(candidates.needs, name, kv_precision, candidates.numa_node, device=candidates.device)


def _does_not_fit_reason(candidates: PrecisionCandidates, reference: str, chosen: str) -> str:
    left = smallest_step_budget(candidates.facts, candidates.settings, _demand(candidates, reference))
    takes, instead = (format_bytes(_demand(candidates, name).weight_bytes) for name in (reference, chosen))
    kv_phrase = f"with the keys and values of {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens "
    overhead_phrase = (
        kv_phrase if candidates.needs is None or candidates.needs.generates else "with the process itself "
    )
    return (
        f"Weights in {reference} take {takes}; {overhead_phrase}that is more than the "
        f"{format_bytes(left.available)} available ({left.source}). "
        f"In {chosen} they take {instead}{_cost_phrase(candidates, chosen)}."
    )


# ---- speed ----------------------------------------------------------------------------------------------------------


def _choose_faster(
    candidates: PrecisionCandidates, start: Decision[str], known: Mapping[str, TrialTiming]
) -> Decision[str]:
    chosen = start
    if start.value != "int8" and "int8" in known and start.value not in QUANTIZED_PRECISIONS:
        chosen = _consider_int8(start, known[start.value], known["int8"], candidates.cost_phrase("int8"))
    if chosen.value != "int4" and "int4" in known:
        chosen = _consider_int4(chosen, known[chosen.value], known["int4"], candidates.cost_phrase("int4"))
    return chosen


def _consider_int8(start: Decision[str], now: TrialTiming, int8: TrialTiming, cost: str) -> Decision[str]:
    gains = [int8.decode_rate(rows) / now.decode_rate(rows) for rows in (FEW_SEQS, SEVERAL_SEQS)]
    if min(gains) < MIN_INT8_GAIN:
        how = "measured" if now.source == int8.source == "measured" else "estimated"
        return Decision(
            start.value,
            f"{start.reason} int8 was {how} {gains[0]:.2f} and {gains[1]:.2f} times as fast at one sequence and at {SEVERAL_SEQS}, "
            f"under the {MIN_INT8_GAIN:g} that would justify its cost in quality.",
        )
    return Decision(
        "int8",
        f"{_word(int8)} {_decode_rates(int8)}, against {_against(now, int8)}{_decode_rates(now)} in {start.value} "
        f"({gains[0]:.1f} and {gains[1]:.1f} times as fast); {cost}.{describe_sources({start.value: now, 'int8': int8})}",
    )


def _consider_int4(chosen: Decision[str], now: TrialTiming, int4: TrialTiming, cost: str) -> Decision[str]:
    """Choose int4 if the precision chosen so far is slow for one sequence and int4 gains enough."""
    present_rate, int4_rate = now.decode_rate(FEW_SEQS), int4.decode_rate(FEW_SEQS)
    if present_rate >= SLOW_TOKENS_PER_SECOND:
        return chosen
    slow = f"{format_rate(present_rate)} tokens/s at one sequence in {chosen.value}, which is under {SLOW_TOKENS_PER_SECOND:g}"
    if int4_rate < MIN_INT4_GAIN * present_rate:
        return Decision(
            chosen.value,
            f"{chosen.reason} int4 would gain too little: {_against(int4, now)}{format_rate(int4_rate)} tokens/s at one sequence.",
        )
    several = int4.decode_rate(SEVERAL_SEQS) / now.decode_rate(SEVERAL_SEQS)
    if math.sqrt(several * int4_rate / present_rate) < MIN_INT4_MEAN_GAIN:
        return Decision(
            chosen.value,
            f"{chosen.reason} int4 would be slower at {SEVERAL_SEQS} sequences: {_against(int4, now)}{_decode_rates(int4)}.",
        )
    return Decision(
        "int4",
        f"{_word(now)} {slow}, and {_against(int4, now)}{_decode_rates(int4)} in int4 ({int4_rate / present_rate:.1f} times as fast); "
        f"{cost}.{describe_sources({chosen.value: now, 'int4': int4})}",
    )


def _word(timing: TrialTiming) -> str:
    return "Estimated" if timing.source == "estimated" else "Measured"


def _against(timing: TrialTiming, other: TrialTiming) -> str:
    return "" if _word(timing) == _word(other) else "an estimated " if timing.source == "estimated" else "a measured "


def _decode_rates(timing: TrialTiming) -> str:
    return (
        f"{format_rate(timing.decode_rate(FEW_SEQS))} tokens/s at one sequence and "
        f"{format_rate(timing.decode_rate(SEVERAL_SEQS))} at {SEVERAL_SEQS}"
    )


def decide_kept_layers(
    settings: Settings, chosen: str, kind: str, has_state: bool = False
) -> Decision[tuple[tuple[str, str], ...]]:
    """Decide which layers have another precision. Raises `PlanImpossible` if the rest is not quantized by us."""
    kept = parse_kept_layers(settings.keep_layers)
    if kept and (chosen not in QUANTIZED_PRECISIONS or kind != "cpu"):
        raise PlanImpossible(
            f"keep_layers is {settings.keep_layers}, but the weights are in {chosen} on {kind}: it needs "
            f"precision {', '.join(QUANTIZED_PRECISIONS)} on a processor."
        )
    reason = "Asked for." if kept else "No layers were named."
    if has_state and chosen in QUANTIZED_PRECISIONS:
        reason += f" {_STATE_WEIGHTS}"
    return Decision(kept, reason)


def choose_vector_precision(
    candidates: PrecisionCandidates, measurements: Measurements | None, threads: int
) -> Decision[str]:
    """Choose a precision for `auto` for a model whose results are vectors, labels or arrays.

    It is the reference precision if that fits, or int8 if it was measured fast enough and the cosine of the model's
    vectors, measured when the weights are packed, is within `quality_budget`. Labels and arrays stay exact.
    """
    reference = reference_precision(candidates)
    names = candidates.batch_invariant_only(
        [reference, *(name for name in AUTO_PRECISIONS[:1] if name in candidates.available)]
    )
    fitting = fitting_precisions(candidates, names)
    start = reference_or_replacement(candidates, reference, names, fitting)
    inputs = candidates.estimate_inputs(measurements)
    now, int8 = known_timing(inputs, start.value, threads), known_timing(inputs, "int8", threads)
    if start.value == "int8" or now is None or int8 is None:
        return start
    how = "measured" if now.source == int8.source == "measured" else "estimated"
    said = f"int8 was {how} {int8.speedup_over(now):.2f} times as fast"
    objection = (
        "it does not suit the other settings"
        if "int8" not in fitting
        else _objection(candidates, start.value, now, int8)
    )
    if objection:
        return Decision(start.value, f"{start.reason} {said}. It is not chosen by itself, since {objection}.")
    return Decision(
        "int8",
        f"{how.capitalize()} {int8.speedup_over(now):.2f} times as fast as {start.value}; {candidates.cost_phrase('int8')}. "
        "Vectors of an index that was made in another precision stay comparable as far as that; "
        f"precision={start.value} computes them exactly.",
    )


def _objection(candidates: PrecisionCandidates, start: str, now: TrialTiming, int8: TrialTiming) -> str:
    """Return why int8 is not chosen, as a clause that follows "since"; empty if it is."""
    needs = candidates.needs
    if needs is None or not needs.has_vectors or candidates.device is not None:
        return "what it costs is measured only for vectors on a processor: set precision=int8 after comparing results"
    if needs.num_parameters < MIN_PARAMETERS:
        return f"a model of {needs.num_parameters / 1e6:.0f}M parameters is fast in any precision"
    if not {now.source, int8.source} <= {"measured", "noisy"}:
        return "vectors should stay comparable with those in an index, and that speed was not measured"
    if int8.speedup_over(now) < MIN_INT8_GAIN:
        return f"that is under the {MIN_INT8_GAIN:g} that would justify its cost in quality"
    if not candidates.within_budget("int8"):
        budget = 100 * candidates.settings.quality_budget
        return f"{candidates.cost_phrase('int8')}, which is over the quality_budget of {budget:g}%"
    return "" if candidates.may_follow_speed(start) else "it does not suit the other settings"
