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
_ROUNDED = ("int8", "int4")  # on processors
BY_TRANSFORMERS = "transformers computes this model"
_MISSING = (
    "Missing there: GPTQ and a measured cost for weights in int8 and int4, which `auto` therefore does not choose, shared"
    " prefixes, speculation, prompt_logprobs and LoRA adapters; it is not measured, so its expected speed is an estimate from"
    " bytes and operations"
)


def decide_engine(settings: Settings, needs: Needs | None, device: str = "cpu") -> Decision[str]:
    """Decide the engine of a model. Raises `PlanImpossible` for a setting that transformers' engine does not have."""
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
