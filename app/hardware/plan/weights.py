"""Decisions about weight and KV cache precision, activation dtype, determinism and the folder of packed weights.

They share one memory. The module also checks that torch can run here at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from app.errors import PlanImpossible
from app.hardware.decision import ALL_KINDS, Decided, Decision, Dtype, Measurements, PlanPart, format_bytes
from app.hardware.facts import Facts, Needs
from app.hardware.plan import precision
from app.hardware.plan.capacity import decide_step_tokens
from app.hardware.plan.devices import decide_kernel_folder
from app.hardware.plan.engine import decide_engine
from app.hardware.plan.memory_budget import (
    KV_PRECISIONS,
    MIN_BATCH_TOKENS,
    USEFUL_SEQS,
    USEFUL_TOKENS,
    DeviceMemory,
    MemoryBudget,
    MemoryDemand,
    memory_budget,
    smallest_step_budget,
    useful_kv_cache_bytes,
)
from app.hardware.plan.precision import (
    INT4_PRECISIONS,
    QUANTIZED_PRECISIONS,
    PrecisionCandidates,
    bf16_products,
    needs_batch_invariance,
    unquantized_precision,
)
from app.hardware.plan.speed import TrialTiming, TrialTimings, format_rate
from app.hardware.probe.software import TORCH_KERNELS, WIDENING_LEVELS
from app.settings import Settings
from armature_kernels.linear.layout import MAX_CODE_ROWS, MIN_FP8_CAPABILITY
from armature_kernels.linear.torchao_config import is_torchao

MIN_COPY_GAIN = 1.1  # least ratio of prompt rates that justifies one more byte for each weight
MEMORY_DIVISOR = 4  # a copy may take at most 1/4 of the available memory
_ARCHITECTURES = ("x86_64", "arm64")
# torch imports NumPy, whose wheels (2.4.6) use AVX without a check and refuse processors below x86-64-v2. Under
# emulation, the import stops on Westmere and works on Sandy Bridge. torch alone would run on older processors.
_X86_REQUIRED = frozenset({"sse4_2", "popcnt", "avx"})
# torch 2.10's aarch64 wheel uses Armv8.1's atomic instructions without a check, so it dies with SIGILL on Armv8.0
# cores.
_ARM_REQUIRED = frozenset({"lse"})


@dataclass(frozen=True)
class WeightsAndKv(PlanPart):
    """Decisions about precisions and dtypes, about what is kept of the weights, and about kernels.

    Up to `most_few_rows` rows 4-bit weights are used if there is an int8 copy; None: the recipe's value. A folder of
    None is not used.
    """

    engine: Decided[str] = Decided(ALL_KINDS)
    precision: Decided[str] = Decided(ALL_KINDS)
    dtype: Decided[Dtype] = Decided()
    keep_layers: Decided[tuple[tuple[str, str], ...]] = Decided(("decoder",))
    int8_copy: Decided[bool] = Decided(ALL_KINDS)
    most_few_rows: Decided[int | None] = Decided()
    pack_folder: Decided[str | None] = Decided()
    kernel_folder: Decided[str | None] = Decided()
    kv_precision: Decided[str] = Decided(("decoder",))
    kernels: Decided[str] = Decided(ALL_KINDS)


def decide_weights_and_kv(
    candidates: PrecisionCandidates, kernels: Decision[str], measurements: Measurements | None, threads: int
) -> WeightsAndKv:
    """Decide the precision of the weights, activations and KV, and the int8 copy, at `threads` threads."""
    settings, trials = candidates.settings, TrialTimings.from_measurements(measurements)
    auto = settings.weight_format == "auto"
    generates = candidates.needs is None or candidates.needs.generates
    codes = _codes_precision(candidates)
    if candidates.needs is not None and candidates.needs.engine == "onnxruntime":
        chosen = Decision("fp32", "ONNX Runtime computes an ONNX file in the types that it has.")
    elif codes is not None and settings.weight_format in ("auto", codes.value):
        chosen = codes if auto else Decision(codes.value, f"Asked for. {codes.reason}")
    elif not auto:
        chosen = precision.forced_precision(candidates)
    else:
        choose = precision.choose_precision if generates else precision.choose_vector_precision
        chosen = choose(candidates, measurements, threads)
    chosen = precision.choose_int4_kernels(candidates, chosen, trials, threads)
    chosen = _with_stored_type(candidates, chosen)
    kind, node, device = candidates.kind, candidates.numa_node, candidates.device
    dtype = decide_dtype(candidates, chosen.value)
    activation_demand = MemoryDemand(candidates.needs, chosen.value, _kv_precision_of(dtype.value), node, device=device)
    kv_precision = decide_kv_precision(
        settings, dtype.value, _insufficient_budget(candidates, activation_demand) if generates else None, kind
    )
    if not generates:
        kv_precision = Decision(kv_precision.value, "This model keeps no keys and values.")
    if device is not None:
        copy = refuse_on_device(settings, kind)
    else:
        final_demand = MemoryDemand(candidates.needs, chosen.value, kv_precision.value, node)
        copy = decide_int8_copy(settings, chosen.value, _copy_gain(candidates, final_demand, trials, threads))
    engine = decide_engine(settings, candidates.needs, kind)
    return WeightsAndKv(
        engine=engine,
        precision=chosen,
        dtype=dtype,
        keep_layers=precision.decide_kept_layers(
            settings, chosen.value, kind, has_state=candidates.needs is not None and candidates.needs.state_bytes > 0
        ),
        int8_copy=copy,
        most_few_rows=decide_most_few_rows(measurements, copy.value),
        pack_folder=_graph_folder(settings)
        if engine.value in ("auto", "onnxruntime") and chosen.value == "fp32"
        else decide_pack_folder(settings, chosen.value, kind, candidates.by_library),
        kernel_folder=decide_kernel_folder(settings, kind),
        kv_precision=kv_precision,
        kernels=kernels,
    )


def _with_stored_type(candidates: PrecisionCandidates, chosen: Decision[str]) -> Decision[str]:
    stored = candidates.needs.stored_quantization if candidates.needs else ""
    if not stored:
        return chosen
    is_rounded = chosen.value in (*QUANTIZED_PRECISIONS, "fp8") and chosen.value != _kept_precision(candidates)
    how = "; their values are computed and rounded again" if is_rounded else ""
    return Decision(chosen.value, f"{chosen.reason} The checkpoint's weights are {stored}{how}.")


def _kept_precision(candidates: PrecisionCandidates) -> str:
    """Return the precision in which this device keeps the codes of the checkpoint; empty if it does not."""
    needs = candidates.needs
    if needs is None or (candidates.kind == "cpu" and candidates.level == TORCH_KERNELS):
        return ""
    return {"cpu": needs.codes_precision, "cuda": "fp8" if needs.keeps_fp8 else ""}.get(candidates.kind, "")


def _codes_precision(candidates: PrecisionCandidates) -> Decision[str] | None:
    name = _kept_precision(candidates)
    if not name or name not in candidates.available or not candidates.settings.quality_budget:
        return None
    if name == "fp8":
        return Decision(name, "It keeps the codes and scales of the checkpoint as they are.")
    return Decision(
        name, "It keeps the codes of the checkpoint, and rounds types without an equal form more finely than they are."
    )


def _insufficient_budget(candidates: PrecisionCandidates, demand: MemoryDemand) -> MemoryBudget | None:
    """Return the memory left for a KV cache in the activations' dtype if it is too little, else None."""
    if demand.needs is None or candidates.settings.kv_cache_bytes != "auto":
        return None
    left = smallest_step_budget(candidates.facts, candidates.settings, demand)
    return left if left.size < useful_kv_cache_bytes(candidates.settings, demand) else None


def _copy_gain(
    candidates: PrecisionCandidates, demand: MemoryDemand, trials: TrialTimings, threads: int
) -> Int8CopyGain:
    facts, settings, needs = candidates.facts, candidates.settings, candidates.needs
    name = demand.precision if demand.precision in INT4_PRECISIONS else "int4"
    timing = trials.find(name, threads)
    tokens = decide_step_tokens(facts, settings, demand, timing).value
    if needs is None:
        return Int8CopyGain(0, False, tokens)
    demand_with_copy = MemoryDemand(needs, demand.precision, demand.kv_precision, demand.numa_node, int8_copy=True)
    left = memory_budget(facts, demand_with_copy, tokens, MIN_BATCH_TOKENS)
    fits = (
        left.size >= useful_kv_cache_bytes(settings, demand_with_copy)
        and needs.int8_copy_bytes * MEMORY_DIVISOR <= left.available
    )
    with_copy = trials.find(name, threads, int8_copy=True) or trials.find("int8", threads)
    return Int8CopyGain(needs.int8_copy_bytes, fits, tokens, timing, with_copy)


def check_torch_can_run(facts: Facts) -> None:
    """Raise `PlanImpossible` if importing torch would crash this process."""
    if facts.os not in ("linux", "macos"):
        raise PlanImpossible(f"{facts.os} is not supported: use Linux or macOS (on Windows, WSL or a container).")
    if facts.architecture not in _ARCHITECTURES:
        raise PlanImpossible(
            f"There is no torch for {facts.os} on {facts.architecture}: x86_64 and arm64 are supported."
        )
    if facts.is_translated:
        raise PlanImpossible(
            "This Python is for Intel Macs and runs by Rosetta, for which there is no torch: use a Python for Apple silicon (arm64)."
        )
    if facts.os == "macos" and facts.architecture == "x86_64":
        raise PlanImpossible(
            "torch 2.2 was the last version for Intel Macs, and a newer one is needed: use an Apple silicon Mac or Linux."
        )
    needs = _X86_REQUIRED if facts.architecture == "x86_64" else _ARM_REQUIRED
    missing = needs - facts.isa
    if facts.isa and missing:  # a kernel that reports no instruction sets is not refused
        core = facts.cpu.microarchitecture or facts.cpu.name
        wanted = (
            "AVX (Intel Sandy Bridge, AMD Bulldozer or newer)"
            if facts.architecture == "x86_64"
            else "Armv8.1's atomics (LSE)"
        )
        raise PlanImpossible(
            f"This processor ({core}) has no {', '.join(sorted(missing))}: importing torch would stop with an illegal instruction. "
            f"torch needs {wanted}."
        )


def decide_dtype(candidates: PrecisionCandidates, chosen: str) -> Decision[Dtype]:
    facts, kind = candidates.facts, candidates.kind
    if chosen == "fp32":
        return Decision("float32", "The dtype of the weights.")
    if (
        candidates.by_library
        and kind == "cpu"
        and not bf16_products(facts)
        and not _is_mostly_experts(candidates.needs)
    ):
        return Decision("float32", "Torch computes between the products, and this processor has no BF16 products.")
    if chosen == "fp16":
        return Decision("float16", "The dtype of the weights; sums are accumulated in FP32.")
    if is_torchao(chosen):
        exact: Mapping[str, Dtype] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        return Decision(exact[unquantized_precision(facts, kind)], "The dtype of weights that are not quantized.")
    if chosen == "fp8":
        return Decision("bfloat16", _fp8_products(candidates.device))
    if chosen in QUANTIZED_PRECISIONS and kind != "cpu":
        name: Dtype = "float16" if unquantized_precision(facts, kind) == "fp16" else "bfloat16"
        return Decision(name, "Weights are dequantized to it for products; sums are accumulated in FP32.")
    if chosen in QUANTIZED_PRECISIONS:
        needless = "" if bf16_products(facts) else ", which needs no BF16 instructions"
        products = "Rows are quantized to int8 before each product"
        if candidates.level in WIDENING_LEVELS:
            products = (
                "Few rows are quantized to int8 before each product, and for many rows weights are widened to BF16"
            )
        return Decision("bfloat16", f"{products}; between products rows are BF16{needless}.")
    return Decision("bfloat16", "The dtype of the weights; sums are accumulated in FP32.")


def _fp8_products(device: DeviceMemory | None) -> str:
    multiplies = device is not None and device.capability is not None and device.capability >= MIN_FP8_CAPABILITY
    many = (
        "more are quantized to FP8 too if torch multiplies by the weight's scales here, else it is dequantized for them"
        if multiplies
        else "for more, weights are dequantized, since products of FP8 need compute capability 8.9"
    )
    return f"Up to {MAX_CODE_ROWS} rows are multiplied in BF16 by weights in FP8; {many}."


def _is_mostly_experts(needs: Needs | None) -> bool:
    """Return True for experts, which transformers multiplies itself: in another dtype they would take twice the memory."""
    return needs is not None and 2 * needs.expert_weights > needs.num_parameters


def decide_kv_precision(
    settings: Settings, chosen: Dtype, insufficient_budget: MemoryBudget | None, kind: str = "cpu"
) -> Decision[str]:
    """Decide the precision of the KV cache. Raises `PlanImpossible` if it is not available here.

    `insufficient_budget` is set if a KV cache in the activations' dtype has less than the useful minimum.
    """
    activation_precision = _kv_precision_of(chosen)
    if activation_precision != "bf16":
        if settings.kv_precision != "auto":
            raise PlanImpossible(
                f"kv_precision is {settings.kv_precision}, but keys and values have the activations' dtype ({activation_precision}). "
                "Leave kv_precision at auto, or set precision to bf16, int8 or int4."
            )
        return Decision(activation_precision, "The dtype of the activations.")
    if kind == "mps":
        if settings.kv_precision == "int8":
            raise PlanImpossible(
                f"kv_precision is int8, but on {kind} keys and values have the activations' dtype (bf16): leave it at auto."
            )
        return Decision("bf16", "The dtype of the activations.")
    if settings.kv_precision == "int8":
        return Decision(
            "int8", "Asked for: a little over half the memory, since each head of a token also has a scale."
        )
    if settings.kv_precision == "bf16" or insufficient_budget is None:
        return Decision("bf16", "Asked for." if settings.kv_precision == "bf16" else "The dtype of the activations.")
    return Decision(
        "int8",
        f"In BF16 the memory would hold less than {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens ({insufficient_budget.explanation}); "
        "in int8 it holds nearly twice as many, without a measurable cost in perplexity on the demo model.",
    )


def _kv_precision_of(dtype: Dtype) -> str:
    return next(name for name, (kv_dtype, _) in KV_PRECISIONS.items() if kv_dtype == dtype)


def decide_pack_folder(
    settings: Settings, chosen: str, kind: str = "cpu", by_library: bool = False
) -> Decision[str | None]:
    """Decide the folder in which packed weights are kept for the next start; None: they are packed at each start."""
    if kind != "cpu" and not by_library:
        return Decision(None, "The GPU packs the weights at each start, while they are read.")
    if chosen not in QUANTIZED_PRECISIONS and not by_library:
        return Decision(None, f"Weights in {chosen} are packed at each start, while they are read.")
    folder = settings.cache_directory
    if folder is None:
        return Decision(
            None, "This user has no home directory, so weights are packed at each start; set cache_dir to keep them."
        )
    if by_library:
        return Decision(
            str(folder), "What can be batched of a model that transformers computes is tried once and kept here."
        )
    return Decision(
        str(folder),
        f"Quantizing to {chosen} takes most of a start: it is done once, and the next start reads the packed weights from this folder.",
    )


def _graph_folder(settings: Settings) -> Decision[str | None]:
    folder = settings.cache_directory
    if folder is None:
        return Decision(
            None, "This user has no home directory, so a program is converted at each start; set cache_dir."
        )
    return Decision(str(folder), "A program's ONNX graph is made once, and the next start reads it from this folder.")


@dataclass(frozen=True, slots=True)
class Int8CopyGain:
    """Cost and gain of a copy for prompts in steps of `tokens`, with step times, if measured."""

    nbytes: int
    has_room: bool
    tokens: int
    without_copy: TrialTiming | None = None
    with_copy: TrialTiming | None = None


def refuse_on_device(settings: Settings, kind: str) -> Decision[bool]:
    """Decide against a copy on a GPU. Raises `PlanImpossible` if int8_copy is on."""
    if settings.int8_copy == "on":
        raise PlanImpossible(f"int8_copy is on, but on {kind} 4-bit weights have no 8-bit copy: leave it at auto.")
    return Decision(False, "Only processors use an int8 copy.")


def decide_int8_copy(settings: Settings, chosen: str, candidate: Int8CopyGain) -> Decision[bool]:
    """Decide if layers also have an 8-bit copy. Raises `PlanImpossible` if it is on without int4."""
    if chosen not in INT4_PRECISIONS:
        if settings.int8_copy == "on":
            raise PlanImpossible(
                f"int8_copy is on, but precision is {chosen}, and only int4 weights have a copy: set precision to int4."
            )
        return Decision(False, "Only int4 weights have an int8 copy.")
    more = f"{format_bytes(candidate.nbytes)} more" if candidate.nbytes else "one more byte for each weight"
    if settings.int8_copy == "on":
        return Decision(True, f"Asked for: prompts and large batches use 8-bit weights, for {more} of memory.")
    if settings.int8_copy == "off":
        return Decision(False, "Asked for.")
    if needs_batch_invariance(settings):
        return Decision(
            False, "Deterministic is on, and the weights used for a row would depend on what else is in the batch."
        )
    return _measured_decision(candidate, more)


def _measured_decision(candidate: Int8CopyGain, more: str) -> Decision[bool]:
    intro = "The 4-bit weights serve every number of rows."
    if candidate.without_copy is None or candidate.with_copy is None:
        return Decision(
            False, f"{intro} An 8-bit copy would take {more}; whether it makes prompts faster was not measured."
        )
    tokens = candidate.with_copy.compared_tokens(candidate.without_copy, candidate.tokens)
    rate_without, rate_with = candidate.without_copy.prefill_rate(tokens), candidate.with_copy.prefill_rate(tokens)
    gain = (
        f"prompts measured {format_rate(rate_with)} tokens/s with 8 bits, {format_rate(rate_without)} "
        f"with 4 bits ({rate_with / rate_without:.2f} times as fast)"
    )
    if rate_with < MIN_COPY_GAIN * rate_without:
        return Decision(False, f"{intro} A copy would gain too little: {gain}.")
    if not candidate.has_room:
        return Decision(
            False,
            f"{intro} A copy would take {more}: over a quarter of the available memory, or memory that keys and values need. But {gain}.",
        )
    return Decision(True, f"For {more} of memory {gain}.")


def decide_most_few_rows(measurements: Measurements | None, copy: bool) -> Decision[int | None]:
    """Decide up to how many rows the 4-bit weights are used if there is an 8-bit copy."""
    if not copy:
        return Decision(None, "There is no 8-bit copy.")
    if measurements is None or measurements.most_few_rows is None:
        return Decision(None, "Not measured: the value of the recipe is used.")
    return Decision(measurements.most_few_rows, "Measured: with more rows, products with 8-bit weights are faster.")
