"""The engine of models that generate text and that transformers computes: loading, checks, and its runner.

The scheduler and the sampler are those of native decoders. transformers' own continuous batching is not used: it
schedules on a thread of its own, samples itself, and takes only classes with paged attention.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from collections.abc import Sequence as Items
from dataclasses import replace
from typing import Any, Literal

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from app.backends.base import BaseBackend
from app.backends.selection import HOST_BACKENDS, select_device_backend, select_host_backend
from app.engine.build import BuildRequest, BuiltEngine, prepare_device
from app.engine.decoder.engine import DecoderEngine
from app.engine.sampling.sampler import Sampler, TokenMasks, beam_candidates, normalized_candidates
from app.engine.scheduler.batch import (
    Batch,
    RunsAtOnce,
    SampledTokens,
    ScheduledSpan,
    Sequence,
    logit_rows_of,
    make_sequence,
)
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.transformers.sequences import GenerationSteps, Rows, can_batch, join, kept_bytes
from app.engine.transformers.token_rules import TokenRules
from app.errors import CheckpointInvalid, PlanImpossible, UnsupportedParameter
from app.hardware.decision import format_bytes
from app.hardware.step_times import ThrottleCorrection
from app.messages import Event, Generate, RequestFailed, SamplingParams, SetAdapter, TokenScore
from app.models.transformers_config import TransformersConfig
from app.weights.checkpoint import Checkpoint
from app.weights.files import join_names

_LOG = logging.getLogger(__name__)
# Lengths of the sequences that are compared with themselves in parts and in a batch.
_CHECKED_LENGTHS, _CHECKED_STEPS = (9, 5), 2
_MEASURED_LENGTHS = (16, 48)  # of the sequences whose kept bytes are compared
_NOISE_FACTOR = 4.0  # largest difference, as a multiple of the one between rows that begin together and those alone
# Bounds of the largest difference, as parts of the largest logit.
_LEAST_TOLERANCE, _MOST_TOLERANCE = 1e-5, 0.02
# Raised by classes that do not take a batch, or a prompt in parts.
LIBRARY_ERRORS = (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError)
PADDED = 2  # a batch's rows have at most as much padding as tokens
_LEAST_LENGTH = 256  # rows up to this length are batched; longer ones with rows of the same power of two
# Which rows are one batch: of different lengths, of equal lengths, or each alone.
Batching = Literal["padded", "equal", "alone"]


class GenerationEngine(DecoderEngine):
    """A decoder's engine that refuses what transformers does not compute here.

    The prompt of a model with an encoder is its source; the decoder begins with `start_ids`.
    """

    batches: Batching = "alone"
    start_ids: tuple[int, ...] = ()
    max_target_len = 0  # of a model with an encoder: `start_ids` and the completion

    def add(self, request: Generate | SetAdapter) -> list[Event]:
        assert isinstance(request, Generate), "adapters were refused before"
        params = request.params
        asked = {
            "beam_width": params.beam_width > 1 and self.batches == "alone",
            "prompt_logprobs": params.prompt_logprobs is not None,
        }
        for name, is_asked in asked.items():
            if is_asked:
                message = f"{name} is not offered for this model, which the library transformers computes."
                return [RequestFailed(request.request_id, UnsupportedParameter(message, field=name))]
        if self.start_ids:
            longest = self.max_target_len - len(self.start_ids)
            bounded = replace(params, max_tokens=min(longest, params.max_tokens or longest))
            request = request.with_decoder(self.start_ids, bounded)
        return super().add(request)


class GenerationRunner(RunsAtOnce):
    """Computes batches of the scheduler, each decoder's prompt alone, and the rest in batches.

    `takes_chunks`: a prompt may be computed in parts; otherwise it is computed at once, when its last part is due.
    """

    def __init__(self, steps: GenerationSteps, rules: TokenRules, *, batches: Batching, takes_chunks: bool) -> None:
        self.steps, self._rules = steps, rules
        self.batches, self.takes_chunks = batches, takes_chunks
        self.model_seconds = 0.0
        self.is_first = self.is_native = False
        self.prompt_scores: Items[tuple[TokenScore, ...]] = ()
        self._sampler = Sampler(steps.vocab_size, normalized_candidates if rules.any else beam_candidates)
        self._masks = TokenMasks(steps.vocab_size)
        self._groups: list[Rows] = []

    def run(self, batch: Batch) -> list[SampledTokens]:
        """Compute a batch and return the samples of each row that samples, in order of the spans."""
        with torch.inference_mode():
            rows = logit_rows_of(batch.spans)
            masks = self._masks.for_step(batch.spans, len(rows))
            self._masks = masks or self._masks
            started = time.perf_counter()
            logits = self._compute(batch.spans, {copy.target: copy.source for copy in batch.copies})
            self.model_seconds = time.perf_counter() - started
            if not rows:
                return []
            stacked = torch.stack(logits)
            return self._sampler.sample(self._rules.apply(stacked, rows), rows, masks, reported=stacked)

    def _compute(self, spans: Items[ScheduledSpan], forks: Mapping[int, int]) -> list[Tensor]:
        """Return the logits of the spans that sample, in their order."""
        due = {id(span.sequence): span for span in spans if span.samples or self.takes_chunks}
        logits: dict[int, Tensor] = {}
        kept, self._groups = self._arrange(due, forks), []
        for group in kept:
            computed = [due.get(id(sequence)) for sequence in group.sequences]
            if all(span is not None for span in computed):
                token_ids = [
                    span.sequence.token_ids[group.num_computed(row) : span.end]
                    for row, span in enumerate(computed)
                    if span is not None
                ]
                for sequence, row in zip(group.sequences, self.steps.advance(group, token_ids), strict=True):
                    logits[id(sequence)] = row.to("cpu")
            self._groups.append(group)
        return [logits[id(span.sequence)] for span in spans if span.samples]

    def _arrange(self, due: dict[int, ScheduledSpan], forks: Mapping[int, int]) -> list[Rows]:
        """Return the rows to keep, arranged so that each group is either computed as a whole now or not at all.

        A beam whose slot is one of `forks` continues the rows of the sequence in the slot that it is forked from.
        """
        parts: dict[object, list[Rows]] = {}
        known: set[int] = set()
        forked: dict[int, list[Sequence]] = {}
        for span in due.values():
            if span.slot in forks and span.sequence.is_beam:
                forked.setdefault(forks[span.slot], []).append(span.sequence)
        for group in self._groups:
            chosen: dict[object, list[tuple[int, Sequence]]] = {}
            for row, parent in enumerate(group.sequences):
                if group.is_current(row):
                    for sequence in (parent, *forked.get(parent.slot or 0, ())):
                        known.add(id(sequence))
                        key = self._key(group, row, sequence, due.get(id(sequence)))
                        chosen.setdefault(key, []).append((row, sequence))
            for key, rows in chosen.items():
                is_same = [sequence for _, sequence in rows] == group.sequences
                parts.setdefault(key, []).append(group if is_same else group.select(rows))
        new: dict[object, list[Sequence]] = {}
        for place, span in due.items():
            if place not in known:
                new.setdefault(self._new_key(span), []).append(span.sequence)
        return [each[0] if len(each) == 1 else join(each) for each in parts.values()] + [*map(Rows, new.values())]

    def _key(self, group: Rows, row: int, sequence: Sequence, span: ScheduledSpan | None) -> object:
        """Return what the rows of one group have in common: a decode's lengths, about."""
        decodes = span is not None and span.end - group.num_computed(row) == 1
        return self._size_class(*group.lengths(row)) if decodes and self.batches != "alone" else id(sequence)

    def _new_key(self, span: ScheduledSpan) -> object:
        """Return what sources that are encoded together have in common."""
        source = span.sequence.num_source_tokens
        if self.steps.has_encoder and self.batches != "alone":
            return self._size_class(source, 0), span.end - source
        return id(span.sequence)

    def _size_class(self, *lengths: int) -> tuple[int, ...]:
        """Return the powers of two that bound the lengths, so that padding at most doubles a batch's memory."""
        if self.batches == "equal":
            return lengths
        return tuple(max(_LEAST_LENGTH, 1 << length.bit_length()) for length in lengths)


def build_generation_engine(
    request: BuildRequest[Checkpoint],
) -> BuiltEngine[GenerationEngine, GenerationRunner, PreTrainedModel]:
    """Load the model with transformers, see what of it can be batched, and build the engine. Raises a `StartupError`."""
    plan = request.plan
    on_host = plan.placement.device in HOST_BACKENDS
    backend: BaseBackend = prepare_device(request, select_host_backend if on_host else select_device_backend)
    request.report("loading weights by transformers")
    model = load_model(request.checkpoint, backend)
    steps = GenerationSteps(model, request.checkpoint.needs().vocab_size)
    rules = TokenRules(model, request.eos_token_ids)
    request.report("warming up")
    try:
        with torch.inference_mode():
            batches, takes_chunks = check_batches(steps), not steps.has_encoder and check_chunks(steps)
            capacity = kv_capacity(steps, request, batches)
    except LIBRARY_ERRORS as error:
        raise CheckpointInvalid(
            f"transformers {transformers.__version__} loads this {type(model).__name__}, but cannot generate with it:"
            f" {first_line(error)}"
        ) from error
    _LOG.info(
        "transformers computes %s: %s, prompts %s",
        type(model).__name__,
        {"padded": "all sequences together", "equal": "sequences of equal lengths together"}.get(
            batches, "one sequence after the other"
        ),
        "in parts" if takes_chunks else "whole",
    )
    runner = GenerationRunner(steps, rules, batches=batches, takes_chunks=takes_chunks)
    limits = EngineLimits(plan.memory.max_model_len, plan.memory.max_running_seqs, plan.memory.max_batch_tokens)
    pool = KvSlots(plan.memory.max_running_seqs + 1, capacity, shares=False)
    budget = PrefillBudget(limits.max_batch_tokens, plan.steps.itl_target_seconds, request.step_time_model)
    scheduler = Scheduler(pool, budget, limits, request.eos_token_ids)
    engine = GenerationEngine(scheduler, runner, throttle_correction=ThrottleCorrection(plan.cpu.throttling_quota))
    engine.batches = batches
    if steps.has_encoder:
        config = request.checkpoint.model_config
        assert isinstance(config, TransformersConfig), "transformers computes the model"
        engine.start_ids, engine.max_target_len = start_ids(model), config.max_target_len
    return BuiltEngine(engine, runner, model, backend)


def start_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the tokens with which the decoder begins. Raises `CheckpointInvalid` if the checkpoint has none."""
    for config in (model.generation_config, model.config, model.config.get_text_config(decoder=True)):
        for name in ("decoder_start_token_id", "bos_token_id"):
            if isinstance(getattr(config, name, None), int):
                return (getattr(config, name),)
    raise CheckpointInvalid("config.json has no decoder_start_token_id, with which the decoder begins.")


def load_model(checkpoint: Checkpoint, backend: BaseBackend) -> PreTrainedModel:
    """Load the weights into the library's own class; no code of a checkpoint is looked at.

    Raises `CheckpointInvalid` if they cannot be loaded, or some are missing.
    """
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    try:
        model, info = getattr(transformers, checkpoint.model_config.architecture).from_pretrained(
            checkpoint.directory,
            dtype=backend.dtype,
            use_safetensors=True,
            local_files_only=True,
            output_loading_info=True,
        )
    except (ValueError, TypeError, KeyError, AttributeError, ImportError, RuntimeError) as error:
        raise CheckpointInvalid(
            f"transformers {transformers.__version__} cannot load this checkpoint: {first_line(error)}"
        ) from error
    for what, names in (("are missing in", info["missing_keys"]), ("have another shape in", info["mismatched_keys"])):
        if names:
            listed = join_names(sorted(str(name) for name in names))
            raise CheckpointInvalid(
                f"{len(names)} weights of the {type(model).__name__} {what} the checkpoint: {listed}."
            )
    if info["unexpected_keys"]:
        _LOG.warning(
            "weights that %s does not use: %s", type(model).__name__, join_names(sorted(info["unexpected_keys"]))
        )
    model.eval().to(backend.device)
    return model


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


# ---- what can be batched, and what it takes --------------------------------------------------------------------------


def _sequence(steps: GenerationSteps, length: int, seed: int) -> tuple[Rows, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    token_ids = torch.randint(0, steps.vocab_size, (length + _CHECKED_STEPS,), generator=generator).tolist()
    source = length // 2 if steps.has_encoder else 0
    params = SamplingParams(max_tokens=1)
    request = Generate("warm-up", tuple(token_ids), params, arrived_at=0.0, num_source_tokens=source)
    return Rows([make_sequence(request)]), token_ids


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
    started = [_sequence(steps, length, seed) for seed in range(len(_CHECKED_LENGTHS))]
    batch = Rows([rows.sequences[0] for rows, _ in started])
    steps.advance(batch, [token_ids[:length] for _, token_ids in started])
    return _decode(steps, batch, [token_ids for _, token_ids in started])


def _decode(steps: GenerationSteps, batch: Rows, texts: Items[list[int]]) -> Tensor:
    following = zip(*(token_ids[-_CHECKED_STEPS:] for token_ids in texts), strict=True)
    return torch.stack([steps.advance(batch, [[token_id] for token_id in token_ids]) for token_ids in following])


def check_batches(steps: GenerationSteps) -> Batching:
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


def check_chunks(steps: GenerationSteps) -> bool:
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


def kv_capacity(steps: GenerationSteps, request: BuildRequest[Any], batches: Batching) -> int:
    """Return how many tokens the planned memory holds, from what two sequences were measured to keep.

    Raises `PlanImpossible` if it holds no useful context.
    """
    memory = request.plan.memory
    kept = []
    lengths = [min(length, memory.max_model_len) for length in _MEASURED_LENGTHS]
    for length in lengths:
        rows, token_ids = _sequence(steps, length, 0)
        steps.advance(rows, [token_ids[:length]])
        kept.append(kept_bytes(rows.kwargs))
    each = max(0, kept[1] - kept[0]) // max(1, lengths[1] - lengths[0])
    fixed = max(0, kept[0] - lengths[0] * each)
    most = memory.max_running_seqs * memory.max_model_len
    if not each:
        return most
    fits = (memory.kv_cache_bytes - fixed * memory.max_running_seqs) // (each * (PADDED if batches == "padded" else 1))
    if fits < lengths[1]:
        raise PlanImpossible(
            f"kv_cache_bytes is {format_bytes(memory.kv_cache_bytes)}, but a sequence keeps {format_bytes(fixed)} and each of its tokens"
            f" {format_bytes(each)}: lower max_running_seqs ({memory.max_running_seqs}) or give the server more memory."
        )
    return min(most, fits)
