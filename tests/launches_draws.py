"""Launches of the kernel that draws, as serving makes them: what tests/compiled_kernels.py compiles for GPUs that are not here."""

from __future__ import annotations

import torch

from app.kernels.gpu.draws import drawn_rows


def _drawn(dtype: torch.dtype, vocab: int) -> None:
    ones = torch.ones(4)
    filters = (torch.zeros(4, dtype=torch.int32), ones.double(), ones)
    drawn_rows(torch.zeros((4, vocab), dtype=dtype), ones, filters, ones.double())


def launch_draws() -> None:
    _drawn(torch.bfloat16, 128_256)


def launch_wide_draws() -> None:
    _drawn(torch.float32, 151_936)
