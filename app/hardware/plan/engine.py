"""Decides which engine computes the model, this package's own or the library transformers, and what the latter lacks."""

from __future__ import annotations

from app.errors import PlanImpossible
from app.hardware.decision import Decision
from app.hardware.facts import Needs
from app.settings import Settings
from armature_kernels.linear.torchao_config import is_torchao

# Settings of the native engine, with the values that ask for nothing.
_NATIVE_SETTINGS: tuple[tuple[str, tuple[object, ...]], ...] = (
    ("lora", ((),)),
    ("lora_root", (None,)),
    ("draft_model", (None,)),
    ("prompt_cache", (None,)),
    ("compile", ("auto", "off")),
    ("int8_copy", ("auto", "off")),
    ("keep_layers", ("",)),
    ("kv_precision", ("auto", "bf16")),
    ("deterministic", ("off",)),
)
_EXACT = ("auto", "fp32", "bf16", "fp16")
ONNX_EXTRA = "pip install 'armature-serve[onnx]'"
_ROUNDED = ("int8", "int4")  # on processors
BY_TRANSFORMERS = "transformers computes this model"
_MISSING = (
    "Missing there: GPTQ and a measured cost for weights in int8 and int4, which `auto` therefore does not choose, shared"
    " prefixes, speculation, prompt_logprobs and LoRA adapters; it is not measured, so its expected speed is an estimate from"
    " bytes and operations"
)


def decide_engine(settings: Settings, needs: Needs | None, device: str = "cpu") -> Decision[str]:
    """Decide the engine of a model. Raises `PlanImpossible` for a setting that transformers' engine does not have."""
    if needs is not None and needs.kind == "program":
        return _decide_program_engine(settings, needs)
    if settings.engine == "onnxruntime":
        raise PlanImpossible("engine is onnxruntime, which computes exported programs only: leave it at auto.")
    if needs is None or needs.engine == "native":
        asked = "Asked for." if settings.engine == "native" else "This package has the model's architecture."
        return Decision("native", asked if needs else "No model is given.")
    for name, neutral in _NATIVE_SETTINGS:
        value = getattr(settings, name)
        if value not in neutral:
            raise PlanImpossible(
                f"{name} is {value}, but {BY_TRANSFORMERS} ({needs.architecture}), which has no such thing here: leave it out."
            )
    chosen = settings.weight_format
    rounded = _ROUNDED if device == "cpu" else ()
    if not is_torchao(chosen) and chosen not in (*_EXACT, *rounded):
        raise PlanImpossible(
            f"Weights in {chosen} are not offered on {device} for a model that transformers computes ({needs.architecture}):"
            f" leave precision at auto, or set it to {', '.join((*_EXACT[1:3], *rounded))}."
        )
    why = "Asked for" if settings.engine == "transformers" else f"{needs.architecture} is not native here"
    return Decision("transformers", f"{why}: the library transformers computes it. {_MISSING}.")


def _decide_program_engine(settings: Settings, needs: Needs) -> Decision[str]:
    """Decide what computes an exported program; auto: the start times both, and uses the faster one."""
    asked = settings.engine
    if asked == "transformers":
        raise PlanImpossible("engine is transformers, but the model is an exported program: leave it at auto.")
    if needs.engine == "onnxruntime":
        if asked == "native":
            raise PlanImpossible("engine is native, but only ONNX Runtime computes an ONNX file: leave it at auto.")
        if settings.weight_format not in ("auto", "fp32"):
            raise PlanImpossible(
                f"Weights in {settings.weight_format} are not offered for an ONNX file, which is computed in its own types:"
                " leave precision at auto, or export the model in that type."
            )
        return Decision("onnxruntime", "The model is an ONNX file.")
    if asked == "onnxruntime":
        if needs.engine == "native":
            raise PlanImpossible(f"engine is onnxruntime, which is not installed: {ONNX_EXTRA}.")
        if settings.weight_format not in ("auto", "fp32"):
            raise PlanImpossible(f"engine is onnxruntime, which computes in FP32, not in {settings.weight_format}.")
        return Decision("onnxruntime", "Asked for.")
    if asked == "native" or needs.engine == "native":
        why = "Asked for." if asked == "native" else f"ONNX Runtime is not installed ({ONNX_EXTRA})."
        return Decision("native", why)
    return Decision(
        "auto", "In FP32 both torch and ONNX Runtime are timed at the start; the faster one computes the program."
    )
