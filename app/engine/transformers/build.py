"""Builds the engine of a model that transformers computes. The library is imported here first, without torchao."""

from __future__ import annotations

from typing import Any

from app.engine.build import BuildRequest, BuiltEngine
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
    """Import the library as if torchao were absent, which it imports for checkpoints that are refused here.

    That takes seconds, and torchao logs messages about extensions.
    """
    from transformers.utils import import_utils

    found = import_utils._is_package_available
    import_utils._is_package_available = lambda name, *rest, **options: (
        (False, "0") if name == "torchao" else found(name, *rest, **options)
    )
    try:
        import_utils.is_torchao_available()  # keeps its answer
    finally:
        import_utils._is_package_available = found
