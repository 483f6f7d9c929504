"""In which dtypes what is no weight is held, what may not matter to an answer, and whether torch can run here at all."""

from __future__ import annotations

from collections.abc import Mapping

from app.errors import PlanImpossible
from app.hardware.decision import Decision, Dtype
from app.hardware.devices import DEVICE_KERNELS
from app.hardware.facts import Facts
from app.hardware.native_library import TWINS
from app.hardware.precision import ROUNDED, adds_in_one_order, bf16_products, exact
from app.hardware.room import USEFUL_SEQS, USEFUL_TOKENS, Room
from app.settings import Settings

_ARCHITECTURES = ("x86_64", "arm64")

# torch imports NumPy, whose wheels (2.4.6) execute AVX unguarded and refuse anything below x86-64-v2: seen under emulation of
# Westmere (stops at import) and Sandy Bridge (runs). torch alone would run on less.
_X86_NEEDS = frozenset({"sse4_2", "popcnt", "avx"})
# torch 2.10's aarch64 wheel uses the atomic instructions of Armv8.1 without asking and dies with SIGILL on Armv8.0 cores.
_ARM_NEEDS = frozenset({"lse"})


def check_torch_can_run(facts: Facts) -> None:
    """Raises `PlanImpossible` where importing torch would end the process without a word; the first thing that a plan asks."""
    if facts.os not in ("linux", "macos"):
        raise PlanImpossible(f"{facts.os} is not supported: Linux and macOS are (on Windows, inside WSL or a container).")
    if facts.architecture not in _ARCHITECTURES:
        raise PlanImpossible(f"There is no torch for {facts.os} on {facts.architecture}: x86_64 and arm64 are supported.")
    if facts.is_translated:
        raise PlanImpossible(
            "This Python is for Intel Macs, and runs here by Rosetta, for which there is no torch: use a Python for Apple silicon (arm64)."
        )
    if facts.os == "macos" and facts.architecture == "x86_64":
        raise PlanImpossible(
            "torch left Intel Macs after 2.2, which is older than what is needed here: use an Apple silicon Mac or Linux."
        )
    needs = _X86_NEEDS if facts.architecture == "x86_64" else _ARM_NEEDS
    missing = needs - facts.isa
    if facts.isa and missing:  # a kernel that states nothing refuses nothing
        core = facts.cpu.microarchitecture or facts.cpu.name
        wanted = (
            "AVX (Intel Sandy Bridge, AMD Bulldozer or newer)" if facts.architecture == "x86_64" else "Armv8.1's atomics (LSE)"
        )
        raise PlanImpossible(
            f"This processor ({core}) has no {', '.join(sorted(missing))}: importing torch would stop with an illegal instruction. "
            f"torch needs {wanted}."
        )


def dtype(facts: Facts, chosen: str, kind: str = "cpu") -> Decision[Dtype]:
    """What activations are held in, on that kind of device."""
    if chosen == "fp32":
        return Decision("float32", "As the weights.")
    if chosen == "fp16":
        return Decision("float16", "As the weights; sums run in FP32.")
    if chosen in ROUNDED and kind != "cpu":
        name: Dtype = "float16" if exact(facts, kind) == "fp16" else "bfloat16"
        return Decision(name, "What four-bit weights mean is multiplied in it; sums run in FP32.")
    if chosen in ROUNDED:
        needless = "" if bf16_products(facts) else ", which asks for no BF16 instructions"
        return Decision("bfloat16", f"Rows are rounded to int8 before each product; between products they are BF16{needless}.")
    return Decision("bfloat16", "As the weights; sums run in FP32.")


KV_NAMES: Mapping[Dtype, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def kv_precision(settings: Settings, chosen: Dtype, short: Room | None, kind: str = "cpu") -> Decision[str]:
    """`short`: what is left for keys and values as wide as the activations, where that is less than is useful."""
    own = KV_NAMES[chosen]
    if own != "bf16":
        if settings.kv_precision != "auto":
            raise PlanImpossible(
                f"kv_precision is {settings.kv_precision}, but keys and values are held in the activations' dtype ({own}). "
                "Leave kv_precision at auto, or set precision to bf16, int8 or int4."
            )
        return Decision(own, "As the activations.")
    if kind != "cpu":
        if settings.kv_precision == "int8":
            raise PlanImpossible(
                f"kv_precision is int8, but on {kind} keys and values are held in the activations' dtype (bf16): leave it at auto."
            )
        return Decision("bf16", "As the activations.")
    if settings.kv_precision == "int8":
        return Decision("int8", "Asked for: half the memory and a little, for a scale to each head of a token.")
    if settings.kv_precision == "bf16" or short is None:
        return Decision("bf16", "Asked for." if settings.kv_precision == "bf16" else "As the activations.")
    return Decision(
        "int8",
        f"In BF16 there would be room for less than {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens ({short.story}); "
        "eight bits hold nearly twice as many, and cost no perplexity that the demo shows.",
    )


def deterministic(settings: Settings, chosen: str, copy: bool, level: str, generates: bool = True) -> Decision[bool]:
    """Whether neighbours may not matter, not in a bit; `level` of our kernels, or whose products serve instead."""
    if settings.deterministic == "off":
        what = ", and so a word now and then" if generates else ""
        return Decision(False, f"Not asked for: what else is in the batch may change the last bits{what}.")
    if level in DEVICE_KERNELS.values():
        raise PlanImpossible(
            "deterministic is on, but on a GPU the order in which products add depends on what else is in the batch: leave it off, or "
            "serve on the processor (device=cpu)."
        )
    if level == TWINS:
        raise PlanImpossible(
            "deterministic is on, but our native kernels do not serve here, and the order in which torch's products add depends on "
            "what else is in the batch: leave it off."
        )
    if not adds_in_one_order(chosen, level):
        raise PlanImpossible(
            f"deterministic is on, but precision is {chosen}: set it to int8 or int4 (or, on a processor with AVX512-BF16, bf16), whose "
            "products add in one order for any number of rows."
        )
    if copy:
        raise PlanImpossible(
            "deterministic is on, and so is int8_copy, but which copy multiplies depends on what else is in the batch: leave one off."
        )
    if not generates:
        return Decision(
            True, f"Asked for: products in {chosen} add in one order for any number of rows, and each text attends alone."
        )
    return Decision(
        True,
        f"Asked for: products in {chosen} add in one order for any number of rows, and all queries attend as a decode's do; "
        "prompts attend more slowly for it, and every pick writes all its logits.",
    )


def pack_folder(settings: Settings, chosen: str, kind: str = "cpu") -> Decision[str | None]:
    """Where packed weights are kept for the next start; None: they are packed at each."""
    if kind != "cpu":
        return Decision(None, "The device packs its weights itself, while they are read, at each start.")
    if chosen not in ROUNDED:
        return Decision(None, f"Weights in {chosen} are packed while they are read, at each start.")
    folder = settings.cache_directory
    if folder is None:
        return Decision(
            None, "This user has no home; cache_dir would say where packed weights may be kept. They are packed at each start."
        )
    return Decision(
        str(folder), f"Rounding to {chosen} takes longest: it happens once, and the next start reads what is kept there."
    )
