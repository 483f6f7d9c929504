"""The widest floating point that a kind of device has: what long sums are made in."""

from __future__ import annotations

import torch


def widest(device: torch.device) -> torch.dtype:
    """Apple's GPUs have no float64."""
    return torch.float32 if device.type == "mps" else torch.float64
