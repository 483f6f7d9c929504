"""The device engine on the simulated device: a request gets the tokens that the CPU computes for it alone, whatever is
captured, padded, launched ahead or delayed. In FP32, where logits of both implementations differ by about 1e-6, far
below the gaps here.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.host_prefixes import HostPrefixes
from app.engine.decoder.kv_cache import KvCache, kv_shape_of
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Sequence
from app.engine.scheduler.kv_allocator import KvSlots, StateCheckpoints
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.engine.scheduler.speculation import NoDrafter, Speculation, ngram_drafter
from app.messages import Abort, Generate, GrammarSource, SamplingParams, SequenceFinished, TokensReady
from app.metrics.steps import StepTimeModel
from device_engine import EOS, MAX_LEN, SLOTS, DelayedSimulatedDevice, DeviceServed, Said, prompt_of, request_of
from engine_simulation import FreeRows
from loaded_models import load
from served_families import SERVED, write_family
from tiny_checkpoints import ARCHITECTURES, OTHERS, RECURRENT, write_checkpoint, write_tokenizer

SHARED = prompt_of(70, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0, max_tokens=50),
    request_of("seeded", prompt_of(50, 2), seed=3),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, min_p=0.01),
    request_of("penalised", SHARED + prompt_of(19, 4), temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    request_of("several", SHARED + prompt_of(3, 5), seed=6, n=3),
    request_of("beams", prompt_of(20, 6), beam_width=3, max_tokens=10),
    request_of("logprobs", prompt_of(9, 9), temperature=0.0, logprobs=3),
    request_of("short", prompt_of(1, 7), temperature=0.0, max_tokens=80),
    request_of(
        "ends", prompt_of(12, 8), seed=19, ignore_eos=False, stop_token_ids=tuple(range(100, 110)), max_tokens=60
    ),
]
SOME = [  # for architectures that differ in what they attend to and how
    request_of("greedy", prompt_of(30, 1), temperature=0.0, max_tokens=40),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, max_tokens=12),
    request_of("penalised", SHARED + prompt_of(5, 4), temperature=0.0, repetition_penalty=1.3, max_tokens=8),
]
ON_DEVICE = [one for one in REQUESTS if one.request_id in ("greedy", "seeded")]


def processor_engine(model: Any) -> DecoderEngine:
    """An engine that computes prompts whole."""
    config = model.config
    cache = KvCache(kv_shape_of(config, SLOTS, MAX_LEN), torch.float32)
    runner = CpuDecoderRunner(model, cache, CpuBackend(torch.float32), Sampler(config.vocab_size))
    limits = EngineLimits(MAX_LEN, SLOTS // 2, MAX_LEN)
    return DecoderEngine(
        Scheduler(
            KvSlots(SLOTS, SLOTS * MAX_LEN, checkpoints=StateCheckpoints(SLOTS, 0, 16) if config.state_sizes else None),
            PrefillBudget(MAX_LEN),
            limits,
            {EOS},
        ),
        runner,
    )


def said_by_a_processor(model: Any, request: Generate) -> Said:
    engine = processor_engine(model)
    engine.add(request)
    said: Said = {}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokensReady | SequenceFinished)
            said.setdefault((event.request_id, event.choice), []).extend(event.token_ids)
    return said


class Pair:
    """A model in a processor's forms and in a device's, and what it says of each request alone."""

    def __init__(self, directory: Path, architecture: str, requests: list[Generate]) -> None:
        write_checkpoint(directory, architecture, seed=11)
        self.plain: Any = load(directory, max_model_len=MAX_LEN)
        self.model: Any = load(directory, max_model_len=MAX_LEN, device="cuda")
        self.runs_alone: Said = {}
        for request in requests:
            self.runs_alone |= said_by_a_processor(self.plain, request)


@pytest.fixture(scope="module", params=(*ARCHITECTURES[1:], *OTHERS))
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("model"), request.param, SOME)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", REQUESTS)


def of(said: Said, requests: list[Generate]) -> Said:
    names = {one.request_id for one in requests}
    return {key: tokens for key, tokens in said.items() if key[0] in names}


@pytest.mark.cases(test=2, ci=7)
def test_together_they_say_what_a_processor_says_of_each_alone(pair: Pair) -> None:
    served = DeviceServed(pair.model).add(*SOME).finish()
    assert served.said == pair.runs_alone
    assert served.runner.graphs.num_replayed > 10 and served.num_ahead > 10


@pytest.mark.cases(test=1, ci=3)
@pytest.mark.parametrize(
    "name", ["Qwen3MoeForCausalLM", "GptOssForCausalLM", "MixtralForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_experts_say_what_they_say_on_a_processor(name: str, tmp_path: Path) -> None:
    write_family(tmp_path, name, SERVED[name])
    write_tokenizer(tmp_path)
    plain, model = (load(tmp_path, max_model_len=MAX_LEN, **place) for place in ({}, {"device": "cuda"}))
    expected: Said = {}
    for request in SOME[:2]:
        expected |= said_by_a_processor(plain, request)
    assert DeviceServed(model).add(*SOME[:2]).finish().said == expected


def test_requests_of_all_kinds_together(llama: Pair) -> None:
    served = DeviceServed(llama.model).add(*REQUESTS).finish()
    assert served.said == llama.runs_alone
    assert any(step.num_prefill_sequences and step.num_decode_sequences for step in served.stats), (
        "prefill rode beside decodes"
    )
    assert served.runner.graphs.num_replayed > 20 and served.num_ahead > 20


def test_keys_and_values_in_int8_say_what_a_processor_says_with_them(llama: Pair) -> None:
    served = DeviceServed(llama.model, kv_dtype=torch.int8).add(*ON_DEVICE).finish()
    kept = DeviceServed(llama.model).add(*ON_DEVICE).finish()
    assert served.cache.bytes_per_token <= kept.cache.bytes_per_token / 2
    assert all(served.said[key][:4] == kept.said[key][:4] for key in kept.said), "int8 changes few tokens"
    served = DeviceServed(llama.model, kv_dtype=torch.int8).add(*REQUESTS).finish()
    assert served.runner.graphs.num_replayed > 20


def test_prefixes_that_left_the_device_come_back_from_the_host(llama: Pair) -> None:
    prompts = [prompt_of(120, seed) for seed in range(20, 24)]
    asked = [
        request_of(f"{turn} {number}", prompt, temperature=0.0, max_tokens=5)
        for turn in range(2)
        for number, prompt in enumerate(prompts)
    ]
    served, without = (DeviceServed(llama.model, pages=5) for _ in range(2))
    store = HostPrefixes(served.cache, StepTimeModel(), 2**20, served.scheduler.take_moves)
    served.scheduler.prefix_store, served.pool.on_cut = store, store.spill
    for request in asked:
        served.add(request).finish()
        without.add(request).finish()
    assert served.said == without.said
    cached = [sum(step.cached_tokens for step in one.stats) for one in (served, without)]
    assert cached[0] >= cached[1] + 4 * 64 and 0 < store.num_bytes <= 2**20
    small = DeviceServed(llama.model, pages=5)
    store = HostPrefixes(small.cache, StepTimeModel(), 100 * small.cache.bytes_per_token, small.scheduler.take_moves)
    small.scheduler.prefix_store, small.pool.on_cut = store, store.spill
    for request in asked:
        small.add(request).finish()
    assert small.said == without.said and 0 < store.num_bytes <= 100 * small.cache.bytes_per_token


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "repetition": {"repetition_penalty": 1.05},
    "frequency": {"frequency_penalty": 0.4, "presence_penalty": 0.2},
    "bias": {"logit_bias": ((7, 4.0), (9, -100.0))},
    "logprobs": {"logprobs": 3},
    "named logprobs": {"logprobs": 0, "logprob_token_ids": (5, 300)},
    "min_tokens": {"min_tokens": 30, "ignore_eos": False, "stop_token_ids": tuple(range(40, 200))},
    "allowed": {"allowed_token_ids": tuple(range(20, 90))},
    "drawn": {"temperature": 0.8, "seed": 5, "top_p": 0.9, "frequency_penalty": 0.3, "logprobs": 2},
    "beams": {"beam_width": 2},
    "regex": {},
    "bad words": {},
}
HOST_MODES = ("beams", "regex", "bad words")  # the host knows each token before it samples the next


def request_in(mode: str, name: str, prompt: list[int]) -> Generate:
    source = GrammarSource("regex", "odd and even", "regex") if mode == "regex" else None
    bad_word_ids = ((50,), (60, 61)) if mode == "bad words" else ()
    params = SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "ignore_eos": True, **MODES[mode]})
    return Generate(name, tuple(prompt), params, 0.0, bad_word_ids=bad_word_ids, grammar=source)


class OddAndEven:
    """A grammar whose tokens are odd and even in turns."""

    finished, error, field = False, "", "regex"

    def __init__(self) -> None:
        self.count = 0

    def start(self) -> OddAndEven:
        return OddAndEven()

    def find(self, source: GrammarSource) -> OddAndEven:
        return self

    def fill_masks(self, address: int, row_bytes: int, draft_ids: Any) -> None:
        pattern = 0x55 if self.count % 2 else 0xAA
        ctypes.memset(address, pattern, row_bytes)

    def advance(self, token_id: int) -> None:
        assert token_id % 2 == (self.count + 1) % 2
        self.count += 1

    def count_valid(self, token_ids: Any) -> int:
        return 0

    def forced_tokens(self) -> tuple[int, ...]:
        return ()


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("mode", MODES)
def test_steps_are_recorded_however_tokens_are_sampled(llama: Pair, mode: str) -> None:
    """Beside a greedy neighbour, whose steps stay recorded and are launched ahead if the host need not know tokens."""
    request, neighbour = request_in(mode, "one", prompt_of(9, 3)), request_in("greedy", "other", prompt_of(12, 4))
    served, first, second = (
        DeviceServed(llama.model, engine=engine)
        for engine in (None, processor_engine(llama.plain), processor_engine(llama.plain))
    )
    for asked, requests in ((served, (request, neighbour)), (first, (request,)), (second, (neighbour,))):
        asked.engine.grammars = OddAndEven()
        asked.add(*requests).finish()
    assert served.said == first.said | second.said
    assert served.logprobs.keys() == first.logprobs.keys()
    for key, rows in first.logprobs.items():
        for one, other in zip(served.logprobs[key], rows, strict=True):
            assert (one.token_id, [name for name, _ in one.top]) == (other.token_id, [name for name, _ in other.top])
            numbers = [one.logprob, *(value for _, value in one.top)]
            assert numbers == pytest.approx([other.logprob, *(value for _, value in other.top)], abs=1e-4)
    steps = len(served.stats)
    assert steps <= 44 and served.runner.graphs.num_replayed >= 0.95 * steps
    assert served.num_ahead >= (0 if mode in HOST_MODES else 36)


REPEATED = [*prompt_of(11, 1), *prompt_of(11, 1), *prompt_of(6, 1)]


@pytest.mark.parametrize("drafter", ["lookup", "oracle"])
def test_draft_tokens_change_no_token(llama: Pair, drafter: str) -> None:
    """Found by prompt lookup, or half of them right; steps without any are still launched ahead."""
    requests = [
        request_of("repeats", REPEATED, temperature=0.0, max_tokens=40),
        request_of("drawn", REPEATED, seed=3, max_tokens=30, logprobs=2),
        request_of("penalised", REPEATED, temperature=0.0, repetition_penalty=1.2, max_tokens=30),
        request_of("short", prompt_of(9, 5), temperature=0.0, max_tokens=40, min_tokens=20),
    ]
    expected = DeviceServed(llama.model).add(*requests).finish()

    def oracle(sequence: Sequence) -> Oracle:
        return Oracle(expected.said[sequence.request_id, sequence.choice], sequence.num_prompt_tokens)

    speculation = Speculation(ngram_drafter if drafter == "lookup" else oracle, FreeRows())
    served = DeviceServed(llama.model, speculation=speculation).add(*requests).finish()
    assert served.said == expected.said
    assert [one.token_id for one in served.logprobs["drawn", 0]] == expected.said["drawn", 0]
    drafted = sum(step.draft_tokens for step in served.stats)
    assert drafted > 10 and (drafter == "lookup" or sum(step.accepted_tokens for step in served.stats) > 10)
    assert served.runner.graphs.num_replayed >= 0.95 * len(served.stats)


def test_steps_without_draft_tokens_are_launched_ahead(llama: Pair) -> None:
    request = request_of("greedy", prompt_of(30, 1), temperature=0.0, max_tokens=50)
    served = DeviceServed(llama.model, speculation=Speculation(lambda sequence: NoDrafter(), FreeRows()))
    assert served.add(request).finish().said == of(llama.runs_alone, [request])
    assert served.num_ahead > 30


class Oracle:
    """Drafts what the sequence will say, and every third time something else."""

    def __init__(self, said: list[int], num_prompt: int) -> None:
        self.said, self.num_prompt = said, num_prompt

    def propose(self, token_ids: list[int], most: int) -> tuple[int, ...]:
        at = len(token_ids) - self.num_prompt
        ids = self.said[at : at + most]
        return tuple(ids if at % 3 else [(one + 1) % 300 for one in ids])


def test_steps_that_nobody_captures_say_the_same(llama: Pair) -> None:
    served = DeviceServed(llama.model, eager="for this test").add(*REQUESTS).finish()
    assert served.said == llama.runs_alone
    assert not served.runner.graphs.captured and served.num_ahead > 20


def test_a_prefix_hit_says_what_a_miss_says(llama: Pair) -> None:
    """One after the other in one engine, then all of them again, almost wholly cached."""
    served, requests = DeviceServed(llama.model), REQUESTS[2:5]
    for request in requests:
        served.add(request).finish()
    assert served.said == of(llama.runs_alone, requests)
    served.said.clear()
    served.stats.clear()
    served.add(*requests).finish()
    assert served.said == of(llama.runs_alone, requests)
    assert sum(step.cached_tokens for step in served.stats) >= 2 * len(SHARED)


def test_preempted_they_say_what_they_say_undisturbed(llama: Pair) -> None:
    """Each fits a page for its first steps only; there are pages for half of them, and none for the beams beside them."""
    requests = [request_of(f"r{seed}", prompt_of(60, seed), seed=seed, max_tokens=40) for seed in range(5)]
    requests.insert(1, REQUESTS[5])
    alone = {
        key: tokens
        for request in requests
        for key, tokens in DeviceServed(llama.model).add(request).finish().said.items()
    }
    for pages in (5, 9):
        some = [one for one in requests if pages == 9 or one.params.beam_width == 1]
        served = DeviceServed(llama.model, pages=pages).add(*some).finish()
        assert served.said == of(alone, some)
        assert sum(step.preempted for step in served.stats) > 0
        assert served.pool.in_use_tokens() == 0 and served.num_ahead > 0


def test_what_is_asked_for_ahead_is_not_overwritten_before_it_is_read(llama: Pair) -> None:
    """A device that is always late: words, replays and ids move when somebody waits for them."""
    with DelayedSimulatedDevice().watching() as late:
        served = DeviceServed(llama.model, late).add(*ON_DEVICE).finish()
    assert served.said == of(llama.runs_alone, ON_DEVICE)
    assert late.queue.most_pending >= 6, "two steps were under way: words there, replay, ids back"


def test_an_aborted_neighbour_changes_nothing(llama: Pair) -> None:
    """Half of them leave, some while a step of theirs is under way."""
    with DelayedSimulatedDevice().watching() as late:
        served = DeviceServed(llama.model, late).add(*REQUESTS)
        for request in REQUESTS[1::2]:
            for _ in range(4):
                served.step()
            served.hear(served.engine.abort(Abort(request.request_id)))
        served.finish()
    stayed = REQUESTS[::2]
    assert of(served.said, stayed) == of(llama.runs_alone, stayed)


def test_a_device_with_little_memory_says_the_same_in_smaller_parts(
    llama: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step of more than 12 tokens wants more memory than there is, when all has been told and before anything is picked."""
    served = DeviceServed(llama.model)
    logits, wanting = served.runner._forward.logits, 0

    def scarce(views: Any, sizes: Any, bounds: Any, *pictures: Any) -> Any:
        nonlocal wanting
        if sizes.tokens > 12:
            wanting += 1
            raise torch.OutOfMemoryError("planted")
        return logits(views, sizes, bounds, *pictures)

    monkeypatch.setattr(served.runner._forward, "logits", scarce)
    assert served.add(*REQUESTS).finish().said == llama.runs_alone
    assert wanting > 0


@pytest.fixture(scope="module", params=RECURRENT)
def recurrent(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("recurrent"), request.param, REQUESTS)


@pytest.mark.cases(test=1, ci=3)
def test_states_say_what_they_say_on_a_processor(recurrent: Pair) -> None:
    """Steps that are dropped, tried again in smaller parts, or go on from another sequence's state, some far longer than a chunk."""
    served = DeviceServed(recurrent.model).add(*REQUESTS).finish()
    assert served.said == recurrent.runs_alone
    assert served.runner.graphs.num_replayed > 20 and served.num_ahead > 20
    hits, requests = served.pool.checkpoints, REQUESTS[2:5]
    assert hits is not None
    before = hits.hits
    served.said.clear()
    assert served.add(*requests).finish().said == of(recurrent.runs_alone, requests) and hits.hits > before


@pytest.mark.cases(test=1, ci=2)
def test_states_after_preemption_lack_of_memory_and_drafts(recurrent: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [one for one in REQUESTS if one.params.beam_width == 1]

    def oracle(sequence: Sequence) -> Oracle:
        return Oracle(recurrent.runs_alone[sequence.request_id, sequence.choice], sequence.num_prompt_tokens)

    served = DeviceServed(recurrent.model, pages=6, speculation=Speculation(oracle, FreeRows()))
    logits, wanting = served.runner._forward.logits, 0

    def scarce(views: Any, sizes: Any, bounds: Any, *pictures: Any) -> Any:
        nonlocal wanting
        found = logits(views, sizes, bounds, *pictures)
        if sizes.tokens > 12:  # when the states are written
            wanting += 1
            raise torch.OutOfMemoryError("planted")
        return found

    monkeypatch.setattr(served.runner._forward, "logits", scarce)
    served.add(*requests).finish()
    assert served.said == of(recurrent.runs_alone, requests)
    assert wanting > 0 and sum(step.preempted for step in served.stats) > 0
    assert sum(step.accepted_tokens for step in served.stats) > 10
