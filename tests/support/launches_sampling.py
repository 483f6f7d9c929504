"""Launches of the kernels that sample, as serving makes them; tests/support/compiled_kernels.py compiles them."""

from __future__ import annotations

import torch

from armature_kernels.triton.sampling import likeliest_ids, sample_rows


def _drawn(dtype: torch.dtype, vocab: int, filtered: bool = True) -> None:
    """Wherever a step's words lie: one kernel serves them all."""
    logits = torch.zeros((4, vocab), dtype=dtype)
    for first in (0, 1):
        narrow, wide, whole = (
            torch.ones(5, dtype=kind)[first : first + 4] for kind in (torch.float32, torch.float64, torch.int32)
        )
        sample_rows(logits, {"temperature": narrow, "top_k": whole, "top_p": wide, "min_p": narrow}, wide, filtered)


def launch_draws() -> None:
    _drawn(torch.bfloat16, 128_256)


def launch_wide_draws() -> None:
    _drawn(torch.float32, 151_936)


def launch_unfiltered_draws() -> None:
    _drawn(torch.bfloat16, 128_256, filtered=False)


def launch_greedy_rows() -> None:
    likeliest_ids(torch.zeros((4, 128_256), dtype=torch.bfloat16))
