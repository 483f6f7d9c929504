"""A shared prompt is stored once: a second request, further choices and beams only add their tails."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from app.backends.cpu import CpuBackend
from app.engine.decoder.cpu_runner import CpuDecoderRunner
from app.engine.decoder.engine import DecoderEngine
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.sampling.sampler import Sampler
from app.engine.scheduler.batch import Batch, InFlightStep, KvCopy
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.messages import Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from armature_kernels.attention.attention import QkvHeads
from armature_kernels.attention.context import AttentionSpec, StepContext

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 64, 50
PROMPT, ANSWER = 1000, 30
SHAPE = KvShape(num_layers=LAYERS, num_slots=16, max_len=1200, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)


class Scribe:
    """A model that writes keys and values, attends, and finds any token as good as any other."""

    def __call__(self, context: StepContext) -> Tensor:
        tokens, width = len(context.token_ids), (HEADS + 2 * KV_HEADS) * HEAD_DIM
        for layer in range(LAYERS):
            heads = QkvHeads(torch.randn(tokens, width).bfloat16(), HEADS, KV_HEADS, HEAD_DIM)
            context.attend(layer, heads, AttentionSpec(HEAD_DIM**-0.5))
        return torch.randn(tokens if context.logit_rows is None else len(context.logit_rows), VOCABULARY)


@dataclass
class Watching:
    """The runner's face: the most pages that were resident after a step, and all copies."""

    runner: CpuDecoderRunner
    most: int = 0
    copies: list[KvCopy] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def launch(self, batch: Batch) -> InFlightStep:
        flight = self.runner.launch(batch)
        self.copies += batch.copies
        self.most = max(self.most, self.runner.kv_cache.resident_bytes())
        return flight


@dataclass
class House:
    cache: KvCache
    watching: Watching
    engine: DecoderEngine

    def serve(self, *prompts: list[int], **params: Any) -> int:
        """Serves requests to their end, each coming when the one before it has begun to answer; the most bytes resident meanwhile."""
        self.watching.most, self.watching.copies, events = 0, [], []
        asked = SamplingParams(max_tokens=ANSWER, ignore_eos=True, **params)
        for number, prompt in enumerate(prompts):
            events += self.engine.add(Generate(str(number), tuple(prompt), asked, arrived_at=0.0))
            while not any(isinstance(event, TokensReady) and event.request_id == str(number) for event in events):
                if not self.engine.has_work:
                    break
                events += self.engine.step()
        while self.engine.has_work:
            events += self.engine.step()
        assert not any(isinstance(event, RequestFailed) for event in events)
        assert sum(isinstance(event, SequenceFinished) for event in events) == len(prompts) * params.get("n", 1)
        return self.watching.most

    def step_tables(self, count: int) -> int:
        """Bytes of so many answers in slots of their own: a page more at each end, in every layer."""
        return count * (ANSWER * self.cache.bytes_per_token + LAYERS * 2 * mmap.PAGESIZE)


@pytest.fixture(params=[torch.bfloat16, torch.int8], ids=str)
def house(request: pytest.FixtureRequest) -> Iterator[House]:
    torch.manual_seed(0)
    cache = KvCache(SHAPE, request.param)
    watching = Watching(CpuDecoderRunner(Scribe(), cache, CpuBackend(torch.bfloat16), Sampler(VOCABULARY)))
    pool = KvSlots(SHAPE.num_slots, SHAPE.num_slots * cache.stride, cache.tokens_per_page)
    scheduler = Scheduler(pool, PrefillBudget(256), EngineLimits(SHAPE.max_len, 8, 256), {VOCABULARY + 1})
    yield House(cache, watching, DecoderEngine(scheduler, watching))  # type: ignore[arg-type]


SYSTEM = torch.randint(0, VOCABULARY, (PROMPT,), generator=torch.Generator().manual_seed(7)).tolist()


def test_a_second_request_takes_its_own_tail_alone(house: House) -> None:
    """While the first still runs: of one that has ended it would take the very slot."""
    bytes_per_token = house.cache.bytes_per_token
    most = house.serve([*SYSTEM, *range(20)], [*SYSTEM, *range(20, 40)])
    assert (PROMPT + 40) * bytes_per_token < most <= (PROMPT + 40) * bytes_per_token + house.step_tables(2)
    assert house.watching.copies == []


@pytest.mark.parametrize("params", [{"n": 4}, {"beam_width": 4}], ids=str)
def test_choices_and_beams_take_their_own_tails_alone(house: House, params: dict[str, int]) -> None:
    most = house.serve(SYSTEM, **params)
    assert most <= PROMPT * house.cache.bytes_per_token + house.step_tables(
        9
    )  # beams: the old and the new ones, and the prompt's own end
    for copy in house.watching.copies:
        assert "beam_width" in params and copy.start >= PROMPT - 1 and copy.end <= PROMPT + ANSWER


@pytest.mark.parametrize("params", [{"n": 4}, {"beam_width": 4}], ids=str)
def test_behind_a_prefix_that_is_there_already_the_rest_of_the_prompt_is_theirs(
    house: House, params: dict[str, int]
) -> None:
    """A context has two segments: the choices share what the first one leaned on, or its whole prompt."""
    before = house.serve([*SYSTEM, *range(30)], temperature=0.0)
    most = house.serve([*SYSTEM, *range(30, 50)], **params)
    assert most <= before + 9 * 20 * house.cache.bytes_per_token + house.step_tables(9)
