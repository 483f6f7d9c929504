"""Finds out why a model computes values that are not finite: a weight, or a number of its configuration.

Nothing is searched as long as the model computes. A warm-up step that is not finite, or a quantization that breaks off,
leads here, and then all weights are read once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import torch

from app.errors import CheckpointInvalid, StepFailed
from app.weights.checkpoint import Checkpoint
from app.weights.safetensors import TensorEntry
from app.weights.tensor_reader import TensorReader, largest_magnitude, weight_not_finite


@contextmanager
def explaining_values_not_finite(checkpoint: Checkpoint) -> Iterator[None]:
    """Turn the failure of a step or of a quantization into the reason that the checkpoint has for it.

    Raises:
        CheckpointInvalid: A step failed, or a quantization because a weight is not finite.
    """
    try:
        yield
    except StepFailed:
        name = _tensor_not_finite(checkpoint.tensors)
        raise _numbers_unusable(checkpoint) if name is None else weight_not_finite(name) from None
    except torch.linalg.LinAlgError:  # type: ignore[attr-defined]
        name = _tensor_not_finite(checkpoint.tensors)
        if name is None:
            raise
        raise weight_not_finite(name) from None


def _numbers_unusable(checkpoint: Checkpoint) -> CheckpointInvalid:
    file = checkpoint.gguf or checkpoint.directory / "config.json"
    return CheckpointInvalid(
        f"The model computes values that are not finite, although all its weights are: a number in {file} does not suit it "
        "(such as rope_theta, the epsilon of the norms, or a scale)."
    )


def _tensor_not_finite(tensors: Mapping[str, TensorEntry]) -> str | None:
    """Return the name of the first tensor with a NaN or an infinite value; None if there is none."""
    with closing(TensorReader(tensors)) as reader:
        for name, entry in tensors.items():
            blocks = (
                (rows for _, rows in reader.row_blocks((entry,))) if len(entry.shape) == 2 else (reader.stored(entry),)
            )
            if any(rows.is_floating_point() and not largest_magnitude(rows) < torch.inf for rows in blocks):
                return name
    return None
