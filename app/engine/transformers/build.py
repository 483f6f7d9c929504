"""Builds the engine of a model that transformers computes. The library is imported here first, without its messages."""

from __future__ import annotations

from typing import Any

from app.engine.build import BuildRequest, BuiltEngine
from app.weights.checkpoint import Checkpoint
from armature_kernels.linear.torchao_linear import torchao_module


def build_transformers_engine(request: BuildRequest[Checkpoint]) -> BuiltEngine[Any, Any, Any]:
    """Load the model with transformers and build its engine. Raises a `StartupError`."""
    request.report("importing transformers")
    torchao_module("transformers.modeling_utils")  # which imports torchao
    if request.checkpoint.kind == "encoder":
        from app.engine.transformers.task_table import build_task_engine

        return build_task_engine(request)
    from app.engine.transformers.generation import build_generation_engine

    return build_generation_engine(request)
