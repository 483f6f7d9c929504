"""What of a model can be batched, and what its sequences keep: tried once with each configuration, and kept in a file."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Sequence as Items
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch
import transformers
from torch import Tensor

from app.engine.build import BuildRequest
from app.engine.scheduler.batch import make_sequence
from app.engine.transformers.loading import LIBRARY_ERRORS
from app.engine.transformers.sequences import GenerationSteps, Rows, can_batch, join, kept_bytes
from app.errors import PlanImpossible
from app.hardware.decision import format_bytes
from app.hardware.plan.plan import ServingPlan
from app.messages import Generate, SamplingParams
from app.version import VERSION
from app.weights.cache_file import FileUnusable, atomic_write, log_not_kept, open_trusted
from app.weights.checkpoint import Checkpoint

# Lengths of the sequences that are compared with themselves in parts and in a batch.
_CHECKED_LENGTHS, _CHECKED_STEPS = (9, 5), 2
_MEASURED_LENGTHS = (16, 48)  # of the sequences whose kept bytes are compared
_NOISE_FACTOR = 4.0  # largest difference, as a multiple of the one between rows that begin together and those alone
# Bounds of the largest difference, as parts of the largest logit.
_LEAST_TOLERANCE, _MOST_TOLERANCE = 1e-5, 0.02
PADDED = 2  # a batch's rows have at most as much padding as tokens
# Which rows are one batch: of different lengths, of equal lengths, or each alone.
Batching = Literal["padded", "equal", "alone"]
_FOLDER, _MAX_BYTES = "trials", 2**12
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Trial:
    """What was tried of a model: which rows are one batch, whether a prompt may be computed in parts, and what is kept.

    A sequence keeps `fixed_bytes` and `token_bytes` for each of its tokens.
    """

    batches: Batching
    takes_chunks: bool
    token_bytes: int
    fixed_bytes: int

    def kv_capacity(self, plan: ServingPlan) -> int:
        """Return how many tokens the planned memory holds. Raises `PlanImpossible` if it holds no useful context."""
        memory, each = plan.memory, self.token_bytes * (PADDED if self.batches == "padded" else 1)
        most = memory.max_running_seqs * memory.max_model_len
        if not each:
            return most
        fits = (memory.kv_cache_bytes - self.fixed_bytes * memory.max_running_seqs) // each
        if fits < min(_MEASURED_LENGTHS[1], memory.max_model_len):
            raise PlanImpossible(
                f"kv_cache_bytes is {format_bytes(memory.kv_cache_bytes)}, but a sequence keeps {format_bytes(self.fixed_bytes)} and each"
                f" of its tokens {format_bytes(each)}: lower max_running_seqs ({memory.max_running_seqs}) or give the server more memory."
            )
        return min(most, fits)


def try_model(steps: GenerationSteps, request: BuildRequest[Checkpoint]) -> Trial:
    """Return what an earlier start found, after one sequence, or try the model. Raises one of `LIBRARY_ERRORS`."""
    file = _file_of(request)
    known = None if file is None else _read(file)
    with torch.no_grad():
        if known is not None:
            _alone(steps, _CHECKED_LENGTHS[1], 0)
            return known
        lengths = [min(length, request.plan.memory.max_model_len) for length in _MEASURED_LENGTHS]
        kept = [_kept(steps, length) for length in lengths]
        each = max(0, kept[1] - kept[0]) // max(1, lengths[1] - lengths[0])
        fixed = max(0, kept[0] - lengths[0] * each)
        trial = Trial(_check_batches(steps), not steps.has_encoder and _check_chunks(steps), each, fixed)
    if file is not None:
        try:
            with atomic_write(file) as stream:
                stream.write(json.dumps(asdict(trial)).encode())
        except OSError as error:
            log_not_kept(file, "what can be batched of this model", error)
    return trial


def _file_of(request: BuildRequest[Checkpoint]) -> Path | None:
    """Return the file of a configuration as it is computed here; None: nothing is kept."""
    weights, folder = request.plan.weights, request.plan.weights.pack_folder
    if folder is None:
        return None
    versions = [VERSION, transformers.__version__, torch.__version__]
    held = [weights.precision, weights.dtype, weights.kernels, request.plan.placement.device]
    key = [versions, held, request.plan.memory.max_model_len, dict(request.checkpoint.config)]
    return Path(folder) / _FOLDER / f"{hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]}.json"


def _read(file: Path) -> Trial | None:
    try:
        with os.fdopen(open_trusted(file), encoding="utf-8") as stream:
            return Trial(**json.loads(stream.read(_MAX_BYTES)))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, FileUnusable, RecursionError) as error:
        _LOG.warning("%s cannot be used (%s): what can be batched is tried again", file, error)
        return None


def _kept(steps: GenerationSteps, length: int) -> int:
    """Return the bytes that a sequence of this length keeps."""
    rows, token_ids = _sequence(steps, length, 0)
    steps.advance(rows, [token_ids[:length]])
    return kept_bytes(rows.kwargs)


def _sequence(steps: GenerationSteps, length: int, seed: int) -> tuple[Rows, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, steps.vocab_size, (length + _CHECKED_STEPS,), generator=generator).tolist()
    source = length // 2 if steps.has_encoder else 0
    params = SamplingParams(max_tokens=1)
    request = Generate("warm-up", tuple(token_ids), params, arrived_at=0.0, num_source_tokens=source)
    return Rows([make_sequence(request)]), token_ids


def trial_rows(steps: GenerationSteps, number: int, length: int) -> tuple[Rows, list[list[int]]]:
    """Return rows that are a batch from the start, and their random tokens [number, length and some more]."""
    started = [_sequence(steps, length, seed) for seed in range(number)]
    return Rows([rows.sequences[0] for rows, _ in started]), [token_ids for _, token_ids in started]


def _alone(steps: GenerationSteps, length: int, seed: int) -> Tensor:
    rows, token_ids = _sequence(steps, length, seed)
    first = steps.advance(rows, [token_ids[:length]])
    return torch.stack([first, *(steps.advance(rows, [[token_id]]) for token_id in token_ids[length:])])


def _together(steps: GenerationSteps, lengths: Items[int]) -> Tensor | None:
    """Return the logits of prompts that are computed alone and then decoded as a batch; None if they cannot be."""
    started = [_sequence(steps, length, seed) for seed, length in enumerate(lengths)]
    for (rows, token_ids), length in zip(started, lengths, strict=True):
        steps.advance(rows, [token_ids[:length]])
    if not all(can_batch(steps.model, rows) for rows, _ in started):
        return None
    return _decode(steps, join([rows for rows, _ in started]), [token_ids for _, token_ids in started])


def _from_the_start(steps: GenerationSteps, length: int) -> Tensor:
    """Return the logits of prompts of one length that are a batch from the start."""
    batch, texts = trial_rows(steps, len(_CHECKED_LENGTHS), length)
    steps.advance(batch, [token_ids[:length] for token_ids in texts])
    return _decode(steps, batch, texts)


def _decode(steps: GenerationSteps, batch: Rows, texts: Items[list[int]]) -> Tensor:
    following = zip(*(token_ids[-_CHECKED_STEPS:] for token_ids in texts), strict=True)
    return torch.stack([steps.advance(batch, [[token_id] for token_id in token_ids]) for token_ids in following])


def _check_batches(steps: GenerationSteps) -> Batching:
    """Return which rows have the same logits in a batch as alone, up to rounding.

    Rounding is what differs between rows that are a batch from the start and rows that are alone.
    """
    if _is_same(steps, _CHECKED_LENGTHS):
        return "padded"
    return "equal" if _is_same(steps, (max(_CHECKED_LENGTHS),) * len(_CHECKED_LENGTHS)) else "alone"


def _is_same(steps: GenerationSteps, lengths: Items[int]) -> bool:
    length = max(lengths)
    seeds = range(len(lengths))
    try:
        joined = _together(steps, lengths)
        if joined is None:
            return False
        alone = [_alone(steps, each, seed)[1:] for seed, each in enumerate(lengths)]
        as_long = torch.cat([_alone(steps, length, seed)[1:] for seed in seeds], 1)
        noise = float((_from_the_start(steps, length) - as_long).abs().max())
    except LIBRARY_ERRORS as error:
        _LOG.debug("rows cannot be batched: %s", error)
        return False
    return float((joined - torch.cat(alone, 1)).abs().max()) <= _tolerance(steps, noise, float(as_long.abs().max()))


def _tolerance(steps: GenerationSteps, noise: float, largest: float) -> float:
    least = max(_LEAST_TOLERANCE, 2 * torch.finfo(steps.model.dtype).eps)
    return min(max(_NOISE_FACTOR * noise, least * largest), _MOST_TOLERANCE * largest)


def _check_chunks(steps: GenerationSteps) -> bool:
    """Return True if a prompt that is computed in parts has the same logits as one that is computed at once."""
    length = max(_CHECKED_LENGTHS)
    whole = _alone(steps, length, 0)
    rows, token_ids = _sequence(steps, length, 0)
    try:
        for start in range(0, length, 4):
            logits = steps.advance(rows, [token_ids[start : min(start + 4, length)]])
    except LIBRARY_ERRORS as error:
        _LOG.debug("prompts cannot be computed in parts: %s", error)
        return False
    return float((logits - whole[0]).abs().max()) <= _tolerance(steps, 0.0, float(whole.abs().max()))
