"""Loads a checkpoint as the server does, with a plan and a backend of only what the loader reads."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from app.backends.base import BaseBackend
from app.hardware.plan.plan import ServingPlan
from app.weights import form_choice
from app.weights.checkpoint import open_checkpoint
from app.weights.forms import KeptLayers
from app.weights.load import Model, load_model
from app.weights.packs import Progress
from planned_machines import bare_plan


def plan_of(
    dtype: str,
    max_model_len: int,
    device: str = "cpu",
    int8_copy: bool = False,
    deterministic: bool = False,
    keep_layers: KeptLayers = (),
) -> ServingPlan:
    """`dtype` is float32, bfloat16 or float16, and the precision follows; or int8 or int4, and the dtype follows."""
    precision = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(dtype, dtype)
    values: dict[str, Any] = {
        "device": device,
        "precision": precision,
        "max_model_len": max_model_len,
        "int8_copy": int8_copy,
    }
    values["deterministic"] = deterministic
    values["dtype"] = {"fp32": "float32", "fp16": "float16"}.get(precision, "bfloat16")
    values["most_few_rows"] = None  # as the recipe says
    values["keep_layers"] = keep_layers
    return bare_plan(**values)


def load(
    directory: Path,
    dtype: str = "float32",
    max_model_len: int | None = None,
    progress: Progress | None = None,
    int8_copy: bool = False,
    deterministic: bool = False,
    device: str = "cpu",
    keep_layers: KeptLayers = (),
) -> nn.Module:
    """The checkpoint's model on the CPU, ready to run: in a processor's forms, or in those of another kind of device, by their twins."""
    checkpoint = open_checkpoint(directory)
    plan = plan_of(
        dtype,
        max_model_len or checkpoint.model_config.max_model_len,
        device,
        int8_copy=int8_copy,
        deterministic=deterministic,
        keep_layers=keep_layers,
    )
    backend = cast(BaseBackend, SimpleNamespace(device=torch.device("cpu"), dtype=getattr(torch, plan.weights.dtype)))
    return load_model(checkpoint, plan, backend, progress)


def load_on(directory: Path, dtype: str, kind: str = "cuda", place: str = "cpu") -> Model:
    """As on an Arm host that such a device belongs to, whatever this one is; `place`: where torch is to have it."""
    checkpoint = open_checkpoint(directory)
    plan = plan_of(dtype, checkpoint.model_config.max_model_len, kind)
    backend = cast(BaseBackend, SimpleNamespace(device=torch.device(place)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(form_choice, "host_architecture", lambda: "arm64")
        return load_model(checkpoint, plan, backend)
