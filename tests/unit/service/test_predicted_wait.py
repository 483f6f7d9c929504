"""The wait for a first token as it is foretold, against a real scheduler on a machine whose steps take what a table says."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from statistics import median
from time import perf_counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.decoder.engine import DecoderEngine, StepTiming, decoder_step_stats
from app.engine.scheduler.batch import Batch, SampledTokens
from app.engine.scheduler.kv_allocator import KvSlots
from app.engine.scheduler.policy import PrefillBudget
from app.engine.scheduler.scheduler import EngineLimits, Scheduler
from app.hardware.decision import TrialTimes
from app.hardware.step_times import StepTimes, StepTimeTable
from app.messages import Generate, SamplingParams, TokensReady
from app.metrics.steps import EngineSnapshot, StepTimeModel
from app.service.admission import Admission, TypicalRequest, first_token_seconds
from hypothesis_examples import examples
from synchronous_runner import AtOnce

INT4 = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.016, 8: 0.030, 32: 0.075}, {64: 0.100, 512: 0.70}, 8e-7))
HABITS = TypicalRequest(completion_tokens=100.0, max_running=4)
MAX_RUNNING, BATCH = 16, 512


class Machine:
    """A server without tensors in a time of its own: `noise` spreads what steps take, `table` may be wrong about them."""

    def __init__(self, table: StepTimeTable = INT4, noise: float = 0.0, seed: int = 1) -> None:
        self.now, self.noise, self.random = 0.0, noise, Random(seed)
        pace = PrefillBudget(BATCH, model=StepTimeModel(table))
        limits = EngineLimits(2000, MAX_RUNNING, BATCH)
        self.scheduler = Scheduler(KvSlots(2 * MAX_RUNNING, 10**6, 16), pace, limits, clock=lambda: self.now)
        self.engine = DecoderEngine(self.scheduler, AtOnce(self), clock=lambda: self.now)
        self.snapshot = self.engine.snapshot()
        self.admission = Admission(lambda: self.snapshot, clock=lambda: self.now)
        self.admission.max_running = MAX_RUNNING
        self.run_open_loop: list[tuple[float, int, int]] = []  # time, prompt tokens, completion tokens
        self.foretold: dict[str, tuple[float, float]] = {}
        self.waits: list[tuple[float, float]] = []  # foretold and true

    @property
    def model_seconds(self) -> float:
        return 0.0

    def run(self, batch: Batch) -> list[SampledTokens]:
        """Takes its time; who arrives meanwhile is told what the last snapshot says."""
        picked = [SampledTokens((1,)) for span in batch.spans if span.samples]
        stats = decoder_step_stats(batch, picked, StepTiming(0.0))
        behind = stats.prefill_pairs // max(stats.prefill_tokens, 1)
        seconds = INT4.mixed(stats.num_decode_sequences, stats.prefill_tokens, stats.context_tokens, behind)
        ends = self.now + seconds * self.random.uniform(1 - self.noise, 1 + self.noise)
        self.mailbox = list(self._arriving(ends))
        self.now = ends
        return picked

    def serve(self) -> None:
        self.mailbox: list[Generate] = []
        while self.run_open_loop or self.engine.has_work:
            if not self.engine.has_work and not self.mailbox:
                self.mailbox = list(self._arriving(self.run_open_loop[0][0]))
            for request in self.mailbox:
                self.engine.add(request)
            self.mailbox = []
            for event in self.engine.step():
                if isinstance(event, TokensReady) and event.request_id in self.foretold:
                    said_at, foretold = self.foretold.pop(event.request_id)
                    self.waits.append((foretold, self.now - said_at))
            self.snapshot = self.engine.snapshot()

    def _arriving(self, until: float) -> Iterator[Generate]:
        while self.run_open_loop and self.run_open_loop[0][0] <= until:
            self.now, prompt, completion = self.run_open_loop.pop(0)
            foretold = self.admission.send(prompt)
            assert foretold is not None
            name = f"r{len(self.waits)}-{len(self.foretold)}-{self.now}"
            self.foretold[name] = self.now, foretold
            params = SamplingParams(max_tokens=completion, ignore_eos=True)
            tokens = tuple(self.random.choices(range(2, 1000), k=prompt))
            yield Generate(name, tokens, params, self.now)
            self.admission.observe(prompt, 0, completion)

    @property
    def error(self) -> float:
        return median(abs(foretold - true) / true for foretold, true in self.waits)


def poisson(random: Random, per_second: float, number: int) -> list[tuple[float, int, int]]:
    now, arrivals = 1.0, []
    for _ in range(number):
        now += random.expovariate(per_second)
        arrivals.append((now, random.choice([16, 64, 64, 300]), random.randint(20, 90)))
    return arrivals


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("per_second", [0.5, 2.0, 5.0])
def test_waits_are_predicted_under_a_light_a_heavy_and_too_heavy_a_load(per_second: float) -> None:
    machine = Machine(noise=0.1)
    machine.run_open_loop = poisson(Random(3), per_second, 120)
    machine.serve()
    assert len(machine.waits) == 120
    assert machine.error < 0.15


def test_a_table_that_is_wrong_by_half_is_corrected_by_what_is_seen() -> None:
    machine = Machine(table=INT4.scaled(0.5), noise=0.1)
    machine.run_open_loop = poisson(Random(4), 2.0, 120)
    machine.serve()
    assert machine.error < 0.2


def tempo() -> StepTimes:
    return StepTimes(INT4, BATCH)


def test_an_idle_machine_reads_the_prompt_at_once() -> None:
    now = EngineSnapshot(stepped_at=5.0, step_times=tempo())
    assert first_token_seconds(now, [(9.0, 64)], 9.0, HABITS) == pytest.approx(0.1)
    second = first_token_seconds(now, [(8.95, 64), (9.0, 8)], 9.0, HABITS)
    assert second == pytest.approx(0.05 + INT4.mixed(1, 8), rel=0.01), "the one before began when it came"
    assert first_token_seconds(EngineSnapshot(), [(9.0, 64)], 9.0, HABITS) is None


def test_the_step_under_way_is_waited_for_as_long_as_it_still_takes() -> None:
    now = EngineSnapshot(stepped_at=5.0, rows=((1, 50),) * 3, step_times=tempo())
    early = first_token_seconds(now, [(5.001, 8)], 5.001, HABITS)
    late = first_token_seconds(now, [(5.019, 8)], 5.019, HABITS)
    overdue = first_token_seconds(now, [(5.5, 8)], 5.5, HABITS)
    assert early is not None and late is not None
    assert early - late == pytest.approx(0.018)
    assert overdue == pytest.approx(late - (INT4.decode(3) - 0.019), abs=1e-5)


def test_where_all_places_are_taken_a_row_has_to_end_first() -> None:
    now = EngineSnapshot(stepped_at=5.0, rows=((10, 40), (10, 30), (90, 900), (10, 900)), step_times=tempo())
    wait = first_token_seconds(now, [(5.0, 8)], 5.0, HABITS)
    assert wait == pytest.approx(10 * INT4.decode(4) + INT4.mixed(3, 8), rel=0.01), (
        "the third has ten tokens left as completions go"
    )
    queued = first_token_seconds(
        EngineSnapshot(stepped_at=5.0, rows=now.rows, queue=(8,), step_times=tempo()), [(5.0, 8)], 5.0, HABITS
    )
    assert queued == pytest.approx(30 * INT4.decode(4), rel=0.1), "and the one before takes its place"


def test_draft_tokens_make_steps_longer_and_rows_end_sooner() -> None:
    now = EngineSnapshot(
        stepped_at=5.0, rows=((10, 30),) * 4, step_times=StepTimes(INT4, BATCH, draft_tokens=1.0, tokens_per_step=1.5)
    )
    wait = first_token_seconds(now, [(5.0, 8)], 5.0, HABITS)
    assert wait == pytest.approx(20 * INT4.decode(8) + 0.03, rel=0.1)


@settings(max_examples=examples(60))
@given(
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 4000)), max_size=6),
    st.lists(st.tuples(st.integers(0, 3000), st.integers(1, 3000)), max_size=3),
    st.lists(st.integers(1, 8000), max_size=300),
    st.integers(1, 8000),
)
def test_any_line_has_an_end_and_is_longer_behind_one_more(
    rows: list[tuple[int, int]], prompts: list[tuple[int, int]], queue: list[int], own: int
) -> None:
    now = EngineSnapshot(
        stepped_at=1.0,
        rows=tuple(rows),
        context_tokens=500,
        prompts=tuple(prompts),
        queue=tuple(queue),
        step_times=tempo(),
    )
    began = perf_counter()
    wait = first_token_seconds(now, [(1.0, own)], 1.0, HABITS)
    assert perf_counter() - began < 0.5
    assert wait is not None and wait > 0
