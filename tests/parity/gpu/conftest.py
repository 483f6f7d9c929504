"""Triton's kernels against their twins: on the GPU where there is one, else in Triton's interpreter (tests/conftest.py asks for it)."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """Where tensors of these tests are made."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
