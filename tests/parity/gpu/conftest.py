"""Fixtures for comparing Triton kernels with their references, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from armature_kernels.elementwise import activations, embedding, norms, rope
from armature_kernels.triton import support

HERE = Path(__file__).resolve().parent


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as `nightly` all cases of a test but the first, where Triton's interpreter runs them: it takes seconds per launch."""
    if torch.cuda.is_available():
        return
    seen: set[str] = set()
    for item in items:
        if HERE in item.path.parents:
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.nightly)
            seen.add(test)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """Where tensors of these tests are made."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def _kernels_serve() -> Iterator[None]:
    """A kernel that differs from its reference does not serve, and tests would compare the reference with itself."""
    agreed = support._agreed  # a test of a wrong kernel replaces it
    yield
    assert all(agreed.values()), agreed


@pytest.fixture(scope="session", autouse=True)
def _numbers_as_on_a_gpu() -> Iterator[None]:
    """The interpreter computes by NumPy, which warns of infinities."""
    with np.errstate(all="ignore"):
        yield


@pytest.fixture(scope="module")
def served_by_triton() -> Iterator[None]:
    """What picks a kernel picks Triton's, for the processor's tensors too."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (activations, norms, embedding, rope):
            patch.setattr(module, "triton_usable", lambda tensor: True)
            patch.setattr(module, "has_kernel", lambda code: False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _products_of_bf16() -> Iterator[None]:
    """Triton's interpreter (3.7) keeps bf16 as the integers of its bits, and multiplies those; here products get what they mean."""
    try:
        import triton.language as tl
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    except ImportError:
        yield
        return
    plain = InterpreterBuilder.create_dot

    def wide(block: Any) -> Any:
        if block.data.dtype != np.uint16:
            return block
        return TensorHandle((block.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        return plain(self, wide(a), wide(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
