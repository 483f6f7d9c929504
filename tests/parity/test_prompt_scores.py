"""Scores of prompts equal those of transformers, in one chunk or many, beside other requests and after preemptions.

Tolerance 1e-3 on log-probabilities in FP32: orders of sums differ, and errors of them are about 1e-5.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.sampling.sampler import MAX_SCORED_ROWS, Sampler
from app.engine.scheduler.batch import Batch, ScheduledSpan, Sequence
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import NgramDrafter, Speculation
from app.messages import (
    Event,
    Generate,
    PromptScored,
    RequestFailed,
    SamplingParams,
    SequenceFinished,
    TokenScore,
    TokensReady,
)
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import max_decode_queries
from device_engine import DelayedSimulatedDevice, DeviceServed, prompt_of, request_of
from engine_simulation import FreeRows
from loaded_models import load
from reference_models import reference_logits
from tiny_checkpoints import ARCHITECTURES, write_checkpoint

MAX_LEN, SLOTS, CHUNK = 160, 8, 24
SHARED = prompt_of(60, 0)
SCORED = [
    request_of("long", prompt_of(100, 1), prompt_logprobs=5, temperature=0.0, logprobs=2),
    request_of("alone", SHARED + prompt_of(30, 2), prompt_logprobs=0, max_tokens=0),
    request_of("again", SHARED + prompt_of(30, 2), prompt_logprobs=3, seed=4, n=3),
    request_of("short", prompt_of(1, 3), prompt_logprobs=2, temperature=0.0),
    request_of("pair", prompt_of(2, 4), prompt_logprobs=20, temperature=0.0),
    request_of("beams", prompt_of(40, 5), prompt_logprobs=1, beam_width=2, max_tokens=6),
]
UNSCORED = [
    request_of("plain", SHARED + prompt_of(9, 6), temperature=0.0, max_tokens=40),
    request_of("seeded", prompt_of(33, 7), seed=3, max_tokens=30),
    request_of("penalised", SHARED + prompt_of(19, 8), temperature=0.0, repetition_penalty=1.3),
]
MIXED = [SCORED[0], UNSCORED[0], SCORED[1], UNSCORED[1], SCORED[2], UNSCORED[2], *SCORED[3:]]


@dataclass
class Heard:
    """What the clients of an engine were told."""

    scores: dict[str, list[TokenScore]] = field(default_factory=dict)
    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    endings: dict[tuple[str, int], SequenceFinished] = field(default_factory=dict)
    num_preempted: int = 0

    def take(self, events: list[Event]) -> None:
        for event in events:
            assert not isinstance(event, RequestFailed), event
            if isinstance(event, PromptScored):
                assert not any(name == event.request_id for name, _ in self.tokens), "scores come before tokens"
                self.scores.setdefault(event.request_id, []).extend(event.scores)
                continue
            assert isinstance(event, TokensReady | SequenceFinished)
            self.tokens.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
            if isinstance(event, SequenceFinished):
                self.endings[event.request_id, event.choice] = event


def served(
    model: torch.nn.Module,
    requests: list[Generate],
    dtype: torch.dtype = torch.float32,
    capacity: int = SLOTS * MAX_LEN,
    off: str = "",
    fixed: bool = False,
    speculation: Speculation | None = None,
    chunk: int = CHUNK,
) -> tuple[Heard, DecoderReplay]:
    """All of them at once; steps have up to `chunk` tokens."""
    config: Any = model.config
    cache = KvCache(KvShape(config.num_layers, SLOTS, MAX_LEN, config.cache_heads, config.cache_head_dim), dtype)
    replay = DecoderReplay(cast(Decoder, model), off, record_after=0)
    few = max_decode_queries(config.num_heads, config.num_kv_heads) if fixed else None
    runner = CpuDecoderRunner(replay, cache, CpuBackend(dtype), Sampler(config.vocab_size), few)
    limits = EngineLimits(MAX_LEN, SLOTS - 2, chunk)
    scheduler = Scheduler(KvSlots(SLOTS, capacity), PrefillBudget(chunk), limits, {1}, speculation=speculation)
    engine, heard = DecoderEngine(scheduler, runner, clock=count().__next__), Heard()
    for request in requests:
        heard.take(engine.add(request))
    while engine.has_work:
        heard.take(engine.step())
        assert engine.stats is not None
        heard.num_preempted += engine.stats.preempted
    return heard, replay


def check(heard: Heard, logits: dict[str, Tensor], requests: list[Generate], tolerance: float = 1e-3) -> None:
    for request in requests:
        params, scores = request.params, heard.scores.get(request.request_id, [])
        if params.prompt_logprobs is None:
            assert not scores
            continue
        assert [one.token_id for one in scores] == list(request.token_ids[1:])
        for place, score in enumerate(scores):
            expected = torch.log_softmax(logits[request.request_id][place].double(), -1)
            assert abs(score.logprob - float(expected[score.token_id])) < tolerance
            assert len(score.top) == params.prompt_logprobs
            near = (expected > expected[score.token_id] - tolerance).sum() + 1
            assert int((expected > expected[score.token_id] + tolerance).sum()) + 1 <= score.rank <= int(near)
            best = expected.topk(max(params.prompt_logprobs, 1)).values
            for (token_id, logprob), value in zip(score.top, best.tolist(), strict=False):
                assert abs(logprob - value) < tolerance and abs(logprob - float(expected[token_id])) < tolerance


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    directory = write_checkpoint(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", seed=21)
    return directory, logits_of(directory, SCORED)


def logits_of(directory: Path, requests: list[Generate]) -> dict[str, Tensor]:
    return {request.request_id: reference_logits(directory, list(request.token_ids)) for request in requests}


@pytest.mark.cases(test=3)
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "Qwen3MoeForCausalLM"])
def test_scores_equal_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, architecture, seed=21)
    requests = [SCORED[0], SCORED[4]]
    heard, _ = served(load(directory, max_model_len=MAX_LEN), requests)
    check(heard, logits_of(directory, requests), requests)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("off", ["", "for this test"])
@pytest.mark.parametrize("capacity", [SLOTS * MAX_LEN, 260])
def test_scored_and_unscored_requests_mix(llama: tuple[Path, dict[str, Tensor]], off: str, capacity: int) -> None:
    """Recorded or not, in plenty of memory or preempting each other; no other request says anything else."""
    directory, logits = llama
    model = load(directory, max_model_len=MAX_LEN)
    heard, replay = served(model, MIXED, capacity=capacity, off=off)
    check(heard, logits, MIXED)
    assert bool(replay.recorded) == (not off)
    assert bool(heard.num_preempted) == (capacity == 260)
    plain, _ = served(model, [one for one in MIXED if one.params.prompt_logprobs is None])
    assert plain.tokens.items() <= heard.tokens.items()


def test_a_mixture_of_experts_is_scored_while_sequences_are_preempted(tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path, "Qwen3MoeForCausalLM", seed=21)
    logits, model = logits_of(directory, SCORED), load(directory, max_model_len=MAX_LEN)
    plain, _ = served(model, MIXED)
    drafts = Speculation(lambda sequence: NgramDrafter(), FreeRows())
    for speculation in (None, drafts):
        heard, replay = served(model, MIXED, capacity=260, speculation=speculation)
        check(heard, logits, MIXED)
        assert heard.num_preempted and replay.num_replays and heard.tokens == plain.tokens


def test_a_request_without_a_completion_has_no_token(llama: tuple[Path, dict[str, Tensor]]) -> None:
    heard, _ = served(load(llama[0], max_model_len=MAX_LEN), [SCORED[1]])
    ending = heard.endings["alone", 0]
    assert heard.tokens == {("alone", 0): []}
    assert (ending.reason, ending.num_completion_tokens, ending.token_ids) == ("length", 0, ())


def test_a_stop_token_has_its_log_probability(llama: tuple[Path, dict[str, Tensor]]) -> None:
    prompt = prompt_of(20, 9)
    stops = request_of("stops", prompt, temperature=0.0, logprobs=1, stop_token_ids=tuple(range(320)))
    heard, _ = served(load(llama[0], max_model_len=MAX_LEN), [stops])
    ending, expected = heard.endings["stops", 0], torch.log_softmax(reference_logits(llama[0], prompt)[-1], -1)
    assert ending.stop_logprob is not None and not ending.token_ids
    assert ending.stop_logprob.token_id == ending.stop_token_id == int(expected.argmax())
    assert abs(ending.stop_logprob.logprob - float(expected.max())) < 1e-3


def test_a_cached_prompt_is_scored_all_the_same(llama: tuple[Path, dict[str, Tensor]]) -> None:
    """The second request finds all of its prompt in the cache, and computes it again."""
    directory, logits = llama
    first = request_of("first", list(SCORED[0].token_ids), max_tokens=1)
    last = request_of("last", list(SCORED[0].token_ids), max_tokens=1)
    model = load(directory, max_model_len=MAX_LEN)
    config: Any = model.config
    cache = KvCache(
        KvShape(config.num_layers, SLOTS, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.float32
    )
    runner = CpuDecoderRunner(DecoderReplay(cast(Decoder, model)), cache, CpuBackend(torch.float32), Sampler(320))
    limits = EngineLimits(MAX_LEN, SLOTS - 2, CHUNK)
    engine = DecoderEngine(
        Scheduler(KvSlots(SLOTS, SLOTS * MAX_LEN), PrefillBudget(CHUNK), limits, {1}), runner, clock=count().__next__
    )
    heard = Heard()
    for request in (first, SCORED[0], last):
        heard.take(engine.add(request))
        while engine.has_work:
            heard.take(engine.step())
    check(heard, logits, [SCORED[0]])
    assert heard.endings["long", 0].timings.cached_tokens == 0
    assert heard.endings["last", 0].timings.cached_tokens == len(last.token_ids) - 1


def test_with_draft_tokens_and_with_determinism(llama: tuple[Path, dict[str, Tensor]]) -> None:
    directory, logits = llama
    model = load(directory, max_model_len=MAX_LEN)
    expected, _ = served(model, SCORED)
    drafts = Speculation(lambda sequence: NgramDrafter(), FreeRows())
    for heard in (served(model, SCORED, speculation=drafts)[0], served(model, SCORED, fixed=True)[0]):
        check(heard, logits, SCORED)
        assert heard.tokens == expected.tokens


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("precision", ["bfloat16", "int8", "int4"])
def test_in_every_precision_scores_are_those_of_the_logits(precision: str, tmp_path: Path) -> None:
    """The logits of the same model, all at once; rounding of a step depends on its number of rows."""
    model: Any = load(write_checkpoint(tmp_path, "LlamaForCausalLM", seed=21), precision, max_model_len=MAX_LEN)
    requests = [SCORED[0], SCORED[2]]
    whole: dict[str, Tensor] = {}
    for request in requests:
        whole[request.request_id] = logits_of_served(model, list(request.token_ids))
    heard, replay = served(model, requests, torch.bfloat16)
    check(heard, whole, requests, tolerance=0.1)
    assert not replay.reason and replay.num_replays


def logits_of_served(model: Any, token_ids: list[int]) -> Tensor:
    """Logits [tokens, vocab] of a served model, from a sampler that keeps one row at a time."""
    rows = []

    class Kept:
        vocab_size = 320

        def sample(self, logits: Tensor, sampled: Any, masks: Any = None) -> Any:
            rows.append(logits[-1].float().clone())
            return [None] * len(sampled)

    config = model.config
    cache = KvCache(KvShape(config.num_layers, 2, MAX_LEN, config.cache_heads, config.cache_head_dim), torch.bfloat16)
    runner = CpuDecoderRunner(model, cache, CpuBackend(torch.bfloat16), cast(Sampler, Kept()), 4)
    for end in range(1, len(token_ids) + 1):
        sequence = Sequence("r", 0, SamplingParams(), token_ids[:end], end)
        runner.run(Batch((ScheduledSpan(sequence, end - 1, 1, 0, None, 0, True),)))
    return torch.stack(rows)


def test_a_device_scores_prompts_too(llama: tuple[Path, dict[str, Tensor]]) -> None:
    directory, logits = llama
    device = DelayedSimulatedDevice()
    model: Any = load(directory, max_model_len=MAX_LEN, device="cuda")
    with device.watching():
        served_by_device = DeviceServed(model, device, max_batch_tokens=CHUNK)
        heard = Heard()
        for request in MIXED:
            heard.take(served_by_device.engine.add(request))
        while served_by_device.engine.has_work:
            heard.take(served_by_device.engine.step())
    check(heard, logits, MIXED)
    expected, _ = served(load(directory, max_model_len=MAX_LEN), MIXED)
    assert heard.tokens == expected.tokens
    assert served_by_device.num_ahead > 0


def test_few_rows_of_logits_exist_at_once(
    llama: tuple[Path, dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model: Any = load(llama[0], max_model_len=MAX_LEN)
    counts: list[int] = []
    whole = model.logits

    def counted(hidden: Tensor, wanted: Any = None) -> Any:
        counts.append(len(hidden))
        return whole(hidden, wanted)

    monkeypatch.setattr(model, "logits", counted)
    heard, _ = served(model, [SCORED[0]], off="for this test", chunk=128)
    check(heard, llama[1], [SCORED[0]])
    assert counts == [MAX_SCORED_ROWS, 99 - MAX_SCORED_ROWS, 1]  # and the row that is sampled
