"""Speculative decoding gives the same tokens and log-probabilities, whatever the draft tokens are.

In FP32, logits of one row and of several differ by rounding, far below the gaps here; with deterministic on, they are
equal.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner, DecoderReplay
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Grammars, Sequence
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import NgramDrafter, Speculation
from app.messages import Generate, RequestFailed, SamplingParams, SequenceFinished, TokenLogprob, TokensReady
from app.metrics.steps import StepStats
from app.models.decoders.decoder import Decoder
from armature_kernels.attention.attention import max_decode_queries
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from engine_simulation import FreeRows
from loaded_models import load
from tiny_checkpoints import write_checkpoint

MAX_LEN, SLOTS, EOS, BETWEEN_STATES = 160, 12, 1, 8
Said = dict[tuple[str, int], list[TokenLogprob]]
MakeSpeculation = Callable[[], Speculation]


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def request_of(name: str, prompt: list[int], **params: Any) -> Generate:
    settings = {"max_tokens": 24, "ignore_eos": True, "logprobs": 3, **params}
    return Generate(name, tuple(prompt), SamplingParams(**settings), arrived_at=0.0)


SHARED = prompt_of(40, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0),
    request_of("seeded", prompt_of(50, 2), seed=3),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01),
    request_of("few", SHARED + prompt_of(11, 9), seed=5, top_k=7),
    request_of("penalised", SHARED + prompt_of(19, 4), temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    request_of("several", SHARED + prompt_of(3, 5), seed=6, n=2),
    request_of("short", prompt_of(1, 7), temperature=0.0, max_tokens=60),
    request_of(
        "ends", prompt_of(12, 8), seed=19, ignore_eos=False, stop_token_ids=tuple(range(100, 130)), max_tokens=60
    ),
    request_of("longest", prompt_of(60, 10), temperature=0.0, max_tokens=None),
]


class Engine:
    """An engine over fresh KV memory, what it said, and what its steps were."""

    def __init__(
        self,
        model: torch.nn.Module,
        dtype: torch.dtype,
        fixed: bool = False,
        off: str = "",
        capacity: int = 0,
        grammars: Grammars | None = None,
    ) -> None:
        config: Any = model.config
        rows = 20 if config.state_sizes else 0
        cache = KvCache(kv_shape_of(config, SLOTS, MAX_LEN, rows), dtype)
        self.replay = DecoderReplay(cast(Decoder, model), off)
        few = max_decode_queries(config.num_heads, config.num_kv_heads) if fixed else None
        runner = CpuDecoderRunner(self.replay, cache, CpuBackend(dtype), Sampler(config.vocab_size), few)
        checkpoints = StateCheckpoints(SLOTS, rows, BETWEEN_STATES) if rows else None
        pool = KvSlots(SLOTS, capacity or SLOTS * MAX_LEN, checkpoints=checkpoints)
        ticks = count()  # every step takes as long, so two runs have the same steps
        scheduler = Scheduler(pool, PrefillBudget(64), EngineLimits(MAX_LEN, SLOTS // 2, 64), {EOS})
        self.engine = DecoderEngine(scheduler, runner, clock=lambda: float(next(ticks)))
        self.engine.grammars = grammars
        self.stats: list[StepStats] = []

    def generate(self, requests: list[Generate], make: MakeSpeculation | None = None) -> Said:
        """All at once."""
        self.engine.scheduler.speculation = None if make is None else make()
        said: Said = {}
        events = [event for request in requests for event in self.engine.add(request)]
        while True:
            for event in events:
                assert not isinstance(event, RequestFailed), event
                if isinstance(event, TokensReady):
                    assert len(event.logprobs) == len(event.token_ids)
                    assert [one.token_id for one in event.logprobs] == list(event.token_ids)
                    said.setdefault((event.request_id, event.choice), []).extend(event.logprobs)
                if isinstance(event, SequenceFinished) and event.stop_token_id is not None:
                    said.setdefault((event.request_id, event.choice), []).append(TokenLogprob(event.stop_token_id, 0.0))
            if not self.engine.has_work:
                return said
            assert len(self.stats) < 3000, "it goes on for ever"
            events = self.engine.step()
            assert self.engine.stats is not None
            self.stats.append(self.engine.stats)

    @property
    def guessed(self) -> tuple[int, int]:
        return sum(step.draft_tokens for step in self.stats), sum(step.accepted_tokens for step in self.stats)


class Planted:
    """Knows what the sequence will say, and says each token of it rightly so often."""

    def __init__(self, truth: list[int], num_prompt: int, dice: random.Random, chance: float) -> None:
        self._truth, self._num_prompt, self._rng, self._chance = truth, num_prompt, dice, chance

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        begin = len(token_ids) - self._num_prompt
        ahead = self._truth[begin : begin + most]
        return tuple(token if self._rng.random() < self._chance else (token + 1) % 320 for token in ahead)


def planted(truth: Said, chance: float) -> MakeSpeculation:
    def drafter(sequence: Sequence) -> Planted:
        told = [one.token_id for one in truth[sequence.request_id, sequence.choice]]
        return Planted(told, sequence.num_prompt_tokens, random.Random(sequence.arrival_order), chance)

    return lambda: Speculation(drafter, FreeRows(), 4)


def tokens_of(said: Said) -> dict[tuple[str, int], list[int]]:
    return {key: [one.token_id for one in told] for key, told in said.items()}


@pytest.fixture(
    scope="module",
    params=["LlamaForCausalLM", "Gemma2ForCausalLM", "Lfm2ForCausalLM", "Qwen3NextForCausalLM", "FalconH1ForCausalLM"],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    return load(write_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=11), max_model_len=MAX_LEN)


@pytest.fixture(scope="module")
def plain(model: torch.nn.Module) -> Said:
    said = Engine(model, torch.float32).generate(REQUESTS)
    assert len(said["longest", 0]) == MAX_LEN - 60 and len(said["ends", 0]) < 60
    return said


@pytest.mark.cases(test=2, ci=8)
@pytest.mark.parametrize("chance", [0.0, 0.5, 0.9, 1.0])
def test_whatever_is_drafted_the_text_is_the_same(model: torch.nn.Module, plain: Said, chance: float) -> None:
    engine = Engine(model, torch.float32)
    said = engine.generate(REQUESTS, planted(plain, chance))
    assert tokens_of(said) == tokens_of(plain)
    for key, told in said.items():
        for mine, theirs in zip(told, plain[key], strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-4)
            assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]
    drafted, accepted = engine.guessed
    assert drafted > 50 and (accepted == 0 if chance == 0.0 else accepted > 0.4 * chance * drafted)


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("capacity", [170, 230])
def test_preempted_too(model: torch.nn.Module, plain: Said, capacity: int) -> None:
    requests = [request for request in REQUESTS if request.request_id != "several"]
    engine = Engine(model, torch.float32, capacity=capacity)
    said = tokens_of(engine.generate(requests, planted(plain, 0.7)))
    assert said == {key: told for key, told in tokens_of(plain).items() if key in said} and len(said) == len(requests)
    assert sum(step.preempted for step in engine.stats) > 0 and engine.guessed[1] > 0


@pytest.mark.cases(test=1)
def test_a_cached_prefix_holds_nothing_that_was_drafted_wrong(model: torch.nn.Module, plain: Said) -> None:
    """Everything said is asked for again as a prompt: it lies cached, and what follows it must be what followed it."""
    engine = Engine(model, torch.float32)
    engine.generate(REQUESTS, planted(plain, 0.3))
    told = tokens_of(plain)["longest", 0]
    prompt = list(REQUESTS[-1].token_ids)
    again = [request_of(f"again {cut}", prompt + told[:cut], temperature=0.0, max_tokens=8) for cut in range(20, 80, 7)]
    said = tokens_of(engine.generate(again))
    assert said == {(f"again {cut}", 0): told[cut : cut + 8] for cut in range(20, 80, 7)}
    assert sum(step.cached_tokens for step in engine.stats) > 500


def test_a_text_that_repeats_itself_takes_fewer_steps(model: torch.nn.Module) -> None:
    """Greedy tiny models fall into circles, and lookup finds them."""
    request = [request_of("circle", prompt_of(4, 12), temperature=0.0, max_tokens=150)]
    without, with_guesses = Engine(model, torch.float32), Engine(model, torch.float32)
    lookup: MakeSpeculation = lambda: Speculation(lambda sequence: NgramDrafter(), FreeRows())  # noqa: E731
    assert tokens_of(without.generate(request)) == tokens_of(with_guesses.generate(request, lookup))
    assert len(without.stats) == 150 and len(with_guesses.stats) < 140


@pytest.mark.cases(test=1)
@pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")
@pytest.mark.parametrize(
    ("architecture", "precision"),
    [
        ("LlamaForCausalLM", "int4"),
        ("Gemma3ForCausalLM", "int8"),
        ("MixtralForCausalLM", "int8"),
        ("Qwen3_5ForCausalLM", "int8"),
    ],
)
def test_deterministic_means_to_the_last_bit(architecture: str, precision: str, tmp_path: Path) -> None:
    """Log-probabilities and all, in steps that are run again too."""
    checkpoint = write_checkpoint(tmp_path, architecture, seed=11)
    loaded = load(checkpoint, precision, max_model_len=MAX_LEN, deterministic=True)
    expected = Engine(loaded, torch.bfloat16, fixed=True, off="for this test").generate(REQUESTS)
    for chance in (0.4, 1.0):
        engine = Engine(loaded, torch.bfloat16, fixed=True)
        assert engine.generate(REQUESTS, planted(expected, chance)) == expected
        assert engine.guessed[1] > 0 and engine.replay.num_replays >= 5


@pytest.mark.full
@pytest.mark.skipif(not has_kernel(OpCode.ROPE), reason="no native kernels here")
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3_5ForCausalLM"])
def test_recorded_steps_with_draft_tokens_say_what_eager_ones_do(architecture: str, tmp_path: Path) -> None:
    """A recording is known by its rows alone: how they are shared out among sequences differs from run to run."""
    loaded = load(write_checkpoint(tmp_path, architecture, seed=11), "int4", max_model_len=MAX_LEN)
    plain = Engine(loaded, torch.bfloat16, off="for this test").generate(REQUESTS)
    eager, recorded = Engine(loaded, torch.bfloat16, off="for this test"), Engine(loaded, torch.bfloat16)
    assert eager.generate(REQUESTS, planted(plain, 0.6)) == recorded.generate(REQUESTS, planted(plain, 0.6))
    assert recorded.replay.num_replays > 10 and recorded.replay.reason == "" and recorded.guessed[1] > 0
