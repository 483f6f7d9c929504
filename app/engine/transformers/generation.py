"""The engine of models that generate text and that transformers computes, and its runner.

The scheduler and the sampler are those of native decoders. transformers' own continuous batching is not used: it
schedules on a thread of its own, samples itself, and takes only classes with paged attention.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Items
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from app.engine.build import BuildRequest, BuiltEngine
from app.engine.decoder.engine import DecoderEngine
from app.engine.sampling.sampler import Sampler, TokenMasks, beam_candidates, normalized_candidates
from app.engine.scheduler.batch import (
    Batch,
    LogitRow,
    RunsAtOnce,
    SampledTokens,
    ScheduledSpan,
    Sequence,
    logit_rows_of,
)
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.transformers.loading import load_and_try
from app.engine.transformers.sequences import GenerationSteps, Rows, join
from app.engine.transformers.trials import Batching, Trial, try_model
from app.errors import CheckpointInvalid, UnsupportedParameter
from app.hardware.step_times import ThrottleCorrection
from app.messages import Event, Generate, RequestFailed, SetAdapter, TokenScore
from app.models.transformers_config import TransformersConfig
from app.weights.checkpoint import Checkpoint

_LOG = logging.getLogger(__name__)
_LEAST_LENGTH = 256  # rows up to this length are batched; longer ones with rows of the same power of two
# Of a request, which takes the file's values as its defaults.
_OF_REQUESTS: dict[str, Any] = {
    "repetition_penalty": None, "min_length": None, "min_new_tokens": None, "do_sample": False, "guidance_scale": None,
    "watermarking_config": None,
}  # fmt: skip


class TokenRules:
    """Rules of a generation_config.json about which tokens may follow, as the library's own logits processors apply them.

    Among them are forced first and last tokens, tokens and words that are never sampled, and repeated n-grams. A row's
    rules see the tokens of its decoder, and its source if there is an encoder.
    """

    def __init__(self, model: PreTrainedModel, eos_token_ids: Collection[int]) -> None:
        self._model = model
        self._config = deepcopy(model.generation_config)
        for name, value in _OF_REQUESTS.items():
            setattr(self._config, name, value)
        self._config._eos_token_tensor = torch.tensor(sorted(eos_token_ids)) if eos_token_ids else None
        self._own: dict[tuple[str, int], LogitsProcessorList] = {}
        probe = deepcopy(self._config)
        probe.max_length = 2
        self.any = bool(model.config.is_encoder_decoder) or bool(
            model._get_logits_processor(probe, 1, torch.zeros((1, 1), dtype=torch.int64))
        )

    def apply(self, logits: Tensor, rows: Items[LogitRow]) -> Tensor:
        """Return the scores [rows, vocab] of the rows' logits: of beams, log-probabilities."""
        if not self.any:
            return logits
        known, self._own = self._own, {}
        scores = logits.to(torch.float32, copy=True)
        for place, row in enumerate(rows):
            sequence = row.sequence
            key = sequence.request_id, sequence.max_length
            rules = known.get(key) or self._own.get(key) or self._rules_of(sequence)
            self._own[key] = rules
            own = scores[place : place + 1]
            if sequence.is_beam:
                own = torch.log_softmax(own, -1)
            scores[place] = rules(torch.tensor([sequence.token_ids[sequence.num_source_tokens :]]), own)[0]
        return scores

    def _rules_of(self, sequence: Sequence) -> LogitsProcessorList:
        config, start = deepcopy(self._config), sequence.num_source_tokens
        config.max_length = sequence.max_length - start
        if sequence.params.forced_bos_token_id is not None:
            config.forced_bos_token_id = sequence.params.forced_bos_token_id
        source = torch.tensor([sequence.token_ids[:start]]) if start else None
        rules: LogitsProcessorList = self._model._get_logits_processor(
            config, sequence.num_prompt_tokens - start, source
        )
        return rules


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
        with torch.no_grad():
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

    def attempt(model: PreTrainedModel) -> tuple[GenerationSteps, Trial]:
        request.report("warming up")
        steps = GenerationSteps(model, request.checkpoint.needs().vocab_size)
        return steps, try_model(steps, request)

    model, backend, (steps, trial) = load_and_try(request, attempt, "generate with it")
    rules = TokenRules(model, request.eos_token_ids)
    _LOG.info(
        "transformers computes %s: %s, prompts %s",
        type(model).__name__,
        {"padded": "all sequences together", "equal": "sequences of equal lengths together"}.get(
            trial.batches, "one sequence after the other"
        ),
        "in parts" if trial.takes_chunks else "whole",
    )
    runner = GenerationRunner(steps, rules, batches=trial.batches, takes_chunks=trial.takes_chunks)
    limits = EngineLimits(plan.memory.max_model_len, plan.memory.max_running_seqs, plan.memory.max_batch_tokens)
    pool = KvSlots(plan.memory.max_running_seqs + 1, trial.kv_capacity(plan), shares=False)
    budget = PrefillBudget(limits.max_batch_tokens, plan.steps.itl_target_seconds, request.step_time_model)
    scheduler = Scheduler(pool, budget, limits, request.eos_token_ids)
    engine = GenerationEngine(scheduler, runner, throttle_correction=ThrottleCorrection(plan.cpu.throttling_quota))
    engine.batches = trial.batches
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
