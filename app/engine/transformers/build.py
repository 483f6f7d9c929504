"""Builds the engine of a model that transformers computes. The library is imported here first, without what is not used."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from app.engine.build import BuildRequest, BuiltEngine
from app.hardware.imports import collection_paused, compiler_absent, replaced
from app.weights.checkpoint import Checkpoint


def build_transformers_engine(request: BuildRequest[Checkpoint]) -> BuiltEngine[Any, Any, Any]:
    """Load the model with transformers and build its engine. Raises a `StartupError`."""
    request.report("importing transformers")
    import_library()
    if request.checkpoint.kind == "encoder":
        from app.engine.transformers.task_table import build_task_engine

        return build_task_engine(request)
    from app.engine.transformers.generation import build_generation_engine

    return build_generation_engine(request)


def import_library() -> None:
    """Import the library without torchao, torch's compiler and its parts for several machines, which take seconds.

    It imports torchao, which also logs messages, for checkpoints that are refused here.
    """
    with collection_paused():
        from transformers.utils import import_utils

        with replaced(import_utils, "_is_package_available", _lacks_torchao(import_utils._is_package_available)):
            import_utils.is_torchao_available()  # keeps its answer, as does the next one
        with replaced(torch.distributed, "is_available", lambda: False):
            import_utils.is_torch_distributed_available()
        with compiler_absent():
            for name in ("modeling_utils", "generation.utils"):
                import_module(f"transformers.{name}")


def _lacks_torchao(found: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name, *rest, **options: (False, "0") if name == "torchao" else found(name, *rest, **options)
