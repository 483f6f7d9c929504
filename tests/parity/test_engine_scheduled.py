"""The real scheduler with a real model: a request's result does not depend on sharing, chunking, preemption or aborts.
In FP32, with greedy, seeded and beam requests. Logits of two batch compositions differ by about 1e-6, far below the
gaps here.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import Any

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.messages import Abort, Event, Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from app.metrics.steps import StepStats
from loaded_models import load
from tiny_checkpoints import write_checkpoint

MAX_LEN, SLOTS, EOS = 160, 12, 1
Said = dict[tuple[str, int], list[int]]


class Served:
    """One model's engine over fresh KV memory, and what its clients were told."""

    def __init__(
        self,
        model: torch.nn.Module,
        capacity: int = SLOTS * MAX_LEN,
        max_batch_tokens: int = 24,
        checkpoints: int = 40,
        checkpoint_tokens: int = 8,
    ) -> None:
        config: Any = model.config
        checkpoints = checkpoints if config.state_sizes else 0
        cache = KvCache(kv_shape_of(config, SLOTS, MAX_LEN, checkpoints), torch.float32)
        runner = CpuDecoderRunner(model, cache, CpuBackend(torch.float32), Sampler(config.vocab_size))
        self.pool = KvSlots(
            SLOTS,
            capacity,
            checkpoints=StateCheckpoints(SLOTS, checkpoints, checkpoint_tokens, cache.state_bytes)
            if config.state_sizes
            else None,
        )
        limits = EngineLimits(MAX_LEN, SLOTS // 2, max_batch_tokens)
        self.engine = DecoderEngine(
            Scheduler(self.pool, PrefillBudget(max_batch_tokens), limits, {EOS}), runner, clock=count().__next__
        )
        self.said: Said = {}
        self.stats: list[StepStats] = []
        self.endings: dict[tuple[str, int], SequenceFinished] = {}

    def add(self, request: Generate) -> None:
        self.hear(self.engine.add(request))

    def step(self) -> None:
        self.hear(self.engine.step())
        assert self.engine.stats is not None
        self.stats.append(self.engine.stats)

    def finish(self) -> Served:
        while self.engine.has_work:
            self.step()
        return self

    def hear(self, events: Iterable[Event]) -> None:
        for event in events:
            assert not isinstance(event, RequestFailed), event
            said = self.said.setdefault((event.request_id, event.choice), [])
            if isinstance(event, TokensReady | SequenceFinished):
                said.extend(event.token_ids)
            if isinstance(event, SequenceFinished):
                self.endings[event.request_id, event.choice] = event


@pytest.fixture(
    scope="module", params=["LlamaForCausalLM", "Gemma2ForCausalLM", "MixtralForCausalLM", "Qwen3NextForCausalLM"]
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    directory = write_checkpoint(tmp_path_factory.mktemp("model"), request.param, seed=11)
    return load(directory, max_model_len=MAX_LEN)


def prompt_of(length: int, seed: int) -> list[int]:
    ids: list[int] = torch.randint(4, 320, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
    return ids


def request_of(name: str, prompt: list[int], **params: Any) -> Generate:
    return Generate(
        name, tuple(prompt), SamplingParams(**{"max_tokens": 24, "ignore_eos": True, **params}), arrived_at=0.0
    )


SHARED = prompt_of(40, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0),
    request_of("seeded", prompt_of(50, 2), seed=3),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01),
    request_of("penalised", SHARED + prompt_of(19, 4), temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    request_of("several", SHARED + prompt_of(3, 5), seed=6, n=3),
    request_of("beams", prompt_of(20, 6), beam_width=3, max_tokens=10),
    request_of("short", prompt_of(1, 7), temperature=0.0, max_tokens=60),
    request_of(
        "ends", prompt_of(12, 8), seed=19, ignore_eos=False, stop_token_ids=tuple(range(100, 110)), max_tokens=60
    ),
]


@pytest.fixture(scope="module")
def alone(model: torch.nn.Module) -> Said:
    """Each request in an engine of its own, its prompt computed whole."""
    said: Said = {}
    for request in REQUESTS:
        served = Served(model, max_batch_tokens=MAX_LEN)
        served.add(request)
        said |= served.finish().said
    assert all(said.values())
    return said


@pytest.mark.cases(test=1)
def test_together_they_say_what_each_says_alone(model: torch.nn.Module, alone: Said) -> None:
    served = Served(model)
    for request in REQUESTS:
        served.add(request)
    assert served.finish().said == alone
    assert any(step.num_prefill_sequences and step.num_decode_sequences for step in served.stats), (
        "prefill rode beside decodes"
    )


@pytest.mark.cases(test=1)
def test_a_prefix_hit_says_what_a_miss_says(model: torch.nn.Module, alone: Said) -> None:
    """One after the other in one engine: later ones find what earlier ones left; then all of them again, almost wholly cached."""
    served = Served(model)
    for request in REQUESTS:
        served.add(request)
        served.finish()
    assert served.said == alone
    least = 2 * len(SHARED)
    assert sum(step.cached_tokens for step in served.stats) >= least
    served.said.clear()
    served.stats.clear()
    for request in REQUESTS:
        served.add(request)
    assert served.finish().said == alone
    assert sum(step.cached_tokens for step in served.stats) >= least


@pytest.mark.cases(test=2, ci=6)
@pytest.mark.parametrize("capacity", [110, 170, 230])
def test_preempted_they_say_what_they_say_undisturbed(model: torch.nn.Module, alone: Said, capacity: int) -> None:
    """KV memory for about two of them: they lose it to each other and compute again."""
    served = Served(model, capacity)
    for request in REQUESTS:
        served.add(request)
    assert served.finish().said == alone
    assert sum(step.preempted for step in served.stats) > 0
    assert served.pool.in_use_tokens() == 0


def test_an_aborted_neighbour_changes_nothing(model: torch.nn.Module, alone: Said) -> None:
    """Half of them leave at different steps, some while they prefill; those that stay are not disturbed."""
    served = Served(model)
    for request in REQUESTS:
        served.add(request)
    for request in REQUESTS[1::2]:
        served.step()
        served.hear(served.engine.abort(Abort(request.request_id)))
    served.finish()
    stayed = {request.request_id for request in REQUESTS[::2]}
    assert {key: said for key, said in served.said.items() if key[0] in stayed} == {
        key: said for key, said in alone.items() if key[0] in stayed
    }


def test_choices_of_a_request_differ_and_the_first_is_that_of_a_single_one(model: torch.nn.Module, alone: Said) -> None:
    several = [alone["several", choice] for choice in range(3)]
    assert len({tuple(said) for said in several}) == 3
    served = Served(model)
    served.add(request_of("one", list(REQUESTS[4].token_ids), seed=6))
    assert served.finish().said["one", 0] == several[0]


@pytest.fixture(scope="module", params=["Qwen3_5ForCausalLM", "Mamba2ForCausalLM"])
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> torch.nn.Module:
    directory = write_checkpoint(tmp_path_factory.mktemp("recurrent"), request.param, seed=11)
    return load(directory, max_model_len=MAX_LEN)


@pytest.mark.parametrize("checkpoints", [40, 3])
def test_a_prefix_of_any_length_goes_on_from_the_last_checkpoint(recurrent: torch.nn.Module, checkpoints: int) -> None:
    """Beside the owner, and after it; with few checkpoints most of them are dropped for others."""
    owner, alone = prompt_of(40, 20), Served(recurrent)
    served = Served(recurrent, checkpoints=checkpoints)
    served.add(request_of("owner", owner, temperature=0.0, max_tokens=60))
    for _ in range(4):
        served.step()
    lengths = (1, 7, 16, 17, 24, 39)
    for shared in lengths:
        one = request_of(f"{shared}", owner[:shared] + prompt_of(5, shared), temperature=0.0, max_tokens=4)
        served.add(one)
        served.step()
        alone.add(one)
        alone.pool.shares = False
        alone.finish()
    served.finish()
    assert {key: said for key, said in served.said.items() if key[0] != "owner"} == alone.said
    found = [served.endings[f"{shared}", 0].timings.cached_tokens for shared in lengths]
    assert all(cached <= shared and cached % 8 == 0 for cached, shared in zip(found, lengths, strict=True))
    assert checkpoints < 40 or found[2:] == [16, 16, 24, 32]
    assert served.pool.checkpoints is not None and served.pool.checkpoints.num_used <= checkpoints


def test_a_second_turn_goes_on_from_the_end_of_the_answer(recurrent: torch.nn.Module) -> None:
    first = prompt_of(70, 30)
    served = Served(recurrent, checkpoints=4, checkpoint_tokens=512)
    served.add(request_of("first", first, temperature=0.0, max_tokens=10))
    said = served.finish().said["first", 0]
    second = request_of("second", first + said + prompt_of(6, 31), temperature=0.0, max_tokens=10)
    again = request_of("again", first, temperature=0.0, max_tokens=10)
    served.add(second)
    served.finish()
    served.add(again)
    served.finish()
    cold = Served(recurrent)
    cold.add(second)
    assert served.said["second", 0] == cold.finish().said["second", 0]
    assert served.said["again", 0] == said
    cached = {name: served.endings[name, 0].timings.cached_tokens for name in ("first", "second", "again")}
    assert cached == {"first": 0, "second": len(first) + len(said) - 1, "again": len(first) - 16}
    states = served.engine.snapshot().states
    assert states is not None and (states.hits, states.recomputed_tokens) == (2, 15)
    assert states.bytes == (states.checkpoints + 2) * 4 * sum(recurrent.config.state_sizes)  # type: ignore[arg-type, union-attr]


def test_a_preempted_sequence_goes_on_from_a_state(recurrent: torch.nn.Module) -> None:
    """The end of its keys and values is taken, and with it the state after them."""
    requests = [request_of(str(seed), prompt_of(60, seed), temperature=0.0, max_tokens=40) for seed in (40, 41)]
    alone, served = Served(recurrent), Served(recurrent, capacity=170)
    for one in (alone, served):
        for request in requests:
            one.add(request)
        one.finish()
    assert served.said == alone.said and sum(step.preempted for step in served.stats) == 1
    assert 0 < sum(step.recomputed_tokens for step in served.stats) < 60


def test_choices_share_the_state_before_the_last_token(recurrent: torch.nn.Module) -> None:
    served = Served(recurrent)
    served.add(request_of("choices", prompt_of(20, 50), seed=1, n=3))
    assert len({tuple(said) for said in served.finish().said.values()}) == 3
    assert sum(step.prefill_tokens for step in served.stats) == 20 + 2


def test_a_prefix_without_a_state_counts_as_recomputed(recurrent: torch.nn.Module) -> None:
    served, shared = Served(recurrent, checkpoint_tokens=512), prompt_of(50, 60)
    for name, own in (("one", 61), ("two", 62)):
        served.add(request_of(name, shared + prompt_of(9, own), temperature=0.0, max_tokens=4))
        served.finish()
    states = served.engine.snapshot().states
    assert states is not None and (states.hits, states.recomputed_tokens) == (0, len(shared))
