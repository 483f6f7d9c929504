"""Decisions about the dtypes of activations and KV cache, about determinism, and about the folder of packed weights.

It also checks that torch can run here at all.
"""

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

# torch imports NumPy, whose wheels (2.4.6) use AVX without a check and refuse processors below x86-64-v2. Under emulation, the import
# stops on Westmere and works on Sandy Bridge. torch alone would run on older processors.
_X86_NEEDS = frozenset({"sse4_2", "popcnt", "avx"})
# torch 2.10's aarch64 wheel uses Armv8.1's atomic instructions without a check, so it dies with SIGILL on Armv8.0 cores.
_ARM_NEEDS = frozenset({"lse"})


def check_torch_can_run(facts: Facts) -> None:
    """Check that importing torch will not crash this process; a plan checks this first.

    Raises:
        PlanImpossible: the system or the processor is not supported.
    """
    if facts.os not in ("linux", "macos"):
        raise PlanImpossible(f"{facts.os} is not supported: use Linux or macOS (on Windows, WSL or a container).")
    if facts.architecture not in _ARCHITECTURES:
        raise PlanImpossible(f"There is no torch for {facts.os} on {facts.architecture}: x86_64 and arm64 are supported.")
    if facts.is_translated:
        raise PlanImpossible(
            "This Python is for Intel Macs and runs by Rosetta, for which there is no torch: use a Python for Apple silicon (arm64)."
        )
    if facts.os == "macos" and facts.architecture == "x86_64":
        raise PlanImpossible(
            "torch 2.2 was the last version for Intel Macs, and a newer one is needed: use an Apple silicon Mac or Linux."
        )
    needs = _X86_NEEDS if facts.architecture == "x86_64" else _ARM_NEEDS
    missing = needs - facts.isa
    if facts.isa and missing:  # a kernel that reports no instruction sets is not refused
        core = facts.cpu.microarchitecture or facts.cpu.name
        wanted = (
            "AVX (Intel Sandy Bridge, AMD Bulldozer or newer)" if facts.architecture == "x86_64" else "Armv8.1's atomics (LSE)"
        )
        raise PlanImpossible(
            f"This processor ({core}) has no {', '.join(sorted(missing))}: importing torch would stop with an illegal instruction. "
            f"torch needs {wanted}."
        )


def dtype(facts: Facts, chosen: str, kind: str = "cpu") -> Decision[Dtype]:
    """Decide the dtype of activations on that kind of device."""
    if chosen == "fp32":
        return Decision("float32", "The dtype of the weights.")
    if chosen == "fp16":
        return Decision("float16", "The dtype of the weights; sums are accumulated in FP32.")
    if chosen in ROUNDED and kind != "cpu":
        name: Dtype = "float16" if exact(facts, kind) == "fp16" else "bfloat16"
        return Decision(name, "Weights are dequantized to it for products; sums are accumulated in FP32.")
    if chosen in ROUNDED:
        needless = "" if bf16_products(facts) else ", which needs no BF16 instructions"
        return Decision("bfloat16", f"Rows are quantized to int8 before each product; between products they are BF16{needless}.")
    return Decision("bfloat16", "The dtype of the weights; sums are accumulated in FP32.")


KV_NAMES: Mapping[Dtype, str] = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def kv_precision(settings: Settings, chosen: Dtype, short: Room | None, kind: str = "cpu") -> Decision[str]:
    """Decide the precision of the KV cache.

    `short` is the memory left for a KV cache in the activations' dtype if that is less than the useful minimum,
    else None.

    Raises:
        PlanImpossible: the requested precision is not available here.
    """
    own = KV_NAMES[chosen]
    if own != "bf16":
        if settings.kv_precision != "auto":
            raise PlanImpossible(
                f"kv_precision is {settings.kv_precision}, but keys and values have the activations' dtype ({own}). "
                "Leave kv_precision at auto, or set precision to bf16, int8 or int4."
            )
        return Decision(own, "The dtype of the activations.")
    if kind != "cpu":
        if settings.kv_precision == "int8":
            raise PlanImpossible(
                f"kv_precision is int8, but on {kind} keys and values have the activations' dtype (bf16): leave it at auto."
            )
        return Decision("bf16", "The dtype of the activations.")
    if settings.kv_precision == "int8":
        return Decision("int8", "Asked for: a little over half the memory, since each head of a token also has a scale.")
    if settings.kv_precision == "bf16" or short is None:
        return Decision("bf16", "Asked for." if settings.kv_precision == "bf16" else "The dtype of the activations.")
    return Decision(
        "int8",
        f"In BF16 the memory would hold less than {USEFUL_SEQS} sequences of {USEFUL_TOKENS:,} tokens ({short.story}); "
        "in int8 it holds nearly twice as many, without a measurable cost in perplexity on the demo model.",
    )


def deterministic(settings: Settings, chosen: str, copy: bool, level: str, generates: bool = True) -> Decision[bool]:
    """Decide if results are bit for bit independent of the other rows of the batch.

    `level` is the level of the native kernels, or the name of the kernels used instead.

    Raises:
        PlanImpossible: deterministic is on, but this configuration cannot provide it.
    """
    if settings.deterministic == "off":
        what = ", and so occasionally a token" if generates else ""
        return Decision(False, f"Not asked for: what else is in the batch may change the last bits{what}.")
    if level in DEVICE_KERNELS.values():
        raise PlanImpossible(
            "deterministic is on, but on a GPU the order of sums depends on what else is in the batch: leave it off, or "
            "serve on the processor (device=cpu)."
        )
    if level == TWINS:
        raise PlanImpossible(
            "deterministic is on, but the native kernels cannot run here, and the order of sums in torch's products depends on "
            "what else is in the batch: leave it off."
        )
    if not adds_in_one_order(chosen, level):
        raise PlanImpossible(
            f"deterministic is on, but precision is {chosen}: set it to int8 or int4 (or, on a processor with AVX512-BF16, bf16), whose "
            "products sum in one order for any number of rows."
        )
    if copy:
        raise PlanImpossible(
            "deterministic and int8_copy are both on, but the weights used for a row then depend on the batch: turn one of them off."
        )
    if not generates:
        return Decision(
            True,
            f"Asked for: products in {chosen} sum in one order for any number of rows, and attention covers each text alone.",
        )
    return Decision(
        True,
        f"Asked for: products in {chosen} sum in one order for any number of rows, and prompts use the attention of decodes; "
        "attention of prompts is slower, and all logits are written for each sampled token.",
    )


def pack_folder(settings: Settings, chosen: str, kind: str = "cpu") -> Decision[str | None]:
    """Decide the folder in which packed weights are kept for the next start; None: they are packed at each start."""
    if kind != "cpu":
        return Decision(None, "The GPU packs the weights at each start, while they are read.")
    if chosen not in ROUNDED:
        return Decision(None, f"Weights in {chosen} are packed at each start, while they are read.")
    folder = settings.cache_directory
    if folder is None:
        return Decision(None, "This user has no home directory, so weights are packed at each start; set cache_dir to keep them.")
    return Decision(
        str(folder),
        f"Quantizing to {chosen} takes most of a start: it is done once, and the next start reads the packed weights from this folder.",
    )
