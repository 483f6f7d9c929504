"""Steps launched on a device and waited for, by a model that says of every token the next number: what goes ahead, is dropped, or fails."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from app.engine.decoder import device_runner
from app.engine.decoder.cuda_graphs import GraphShape
from app.engine.decoder.device_runner import DeviceDecoderRunner
from app.engine.decoder.kv_cache import KvShape
from app.engine.decoder.paged_kv_cache import PagedKvCache
from app.engine.scheduler.batch import NOT_FINITE, Batch, KvCopy, SampledTokens, ScheduledSpan, Sequence
from app.engine.scheduler.scheduler import EngineLimits
from app.messages import SamplingParams
from armature_kernels.attention.context import StepContext
from device_engine import DelayedSimulatedDevice
from simulated_device import SimulatedDeviceBackend

SHAPE = KvShape(num_layers=1, num_slots=4, max_len=200, num_kv_heads=1, head_dim=4)
VOCABULARY = 50
GREEDY = SamplingParams(temperature=0.0)


class Counts:
    """Says the next number; `broken` says NaN of it, and `wanting` how often it finds no memory."""

    config = SimpleNamespace(vocab_size=VOCABULARY, hidden_size=8, has_sinks=False, alibi_slopes=())

    def __init__(self) -> None:
        self.broken: int | None = None
        self.wanting = 0

    def __call__(self, context: StepContext) -> Tensor:
        if self.wanting:
            self.wanting -= 1
            raise torch.OutOfMemoryError("planted")
        ids = context.token_ids if context.logit_rows is None else context.token_ids[context.logit_rows]
        logits = torch.nn.functional.one_hot((ids + 1) % VOCABULARY, VOCABULARY).float() * 9
        return logits if self.broken is None else logits.masked_fill_((ids == self.broken)[:, None], torch.nan)


def runner_on(backend: Any = None, model: Any = None, eager: str = "") -> DeviceDecoderRunner:
    backend = backend or SimulatedDeviceBackend(torch.float32)
    cache = PagedKvCache(SHAPE, torch.float32, 12, backend.device)
    return DeviceDecoderRunner(model or Counts(), cache, backend, EngineLimits(200, 4, 100), eager)


def sequence_of(token_ids: list[int], slot: int, params: SamplingParams = GREEDY) -> Sequence:
    return Sequence(f"r{slot}", 0, params, token_ids, 1, seed=slot, slot=slot, num_admitted=1)


def span_of(sequence: Sequence, start: int, end: int) -> ScheduledSpan:
    assert sequence.slot is not None
    return ScheduledSpan(sequence, start, end - start, sequence.slot, None, 0, samples=end >= len(sequence.token_ids))


def decode_of(*sequences: Sequence) -> Batch:
    return Batch(tuple(span_of(one, len(one.token_ids) - 1, len(one.token_ids)) for one in sequences))


def ahead_of(batch: Batch, *left_out: Sequence) -> Batch:
    return Batch(tuple(span.next_position() for span in batch.spans if span.sequence not in left_out), ahead=True)


def ids(picked: list[SampledTokens]) -> list[int]:
    return [one.token_ids[0] for one in picked]


@pytest.mark.parametrize("eager", ["", "for this test"])
def test_a_step_ahead_reads_what_the_one_before_it_sampled(eager: str) -> None:
    """Whoever ended leaves: the next step is of another bucket, captured while those ids are waited for."""
    first, second, third = (sequence_of([number], slot) for slot, number in enumerate((10, 20, 30)))
    runner = runner_on(eager=eager)
    batch = decode_of(first, second, third)
    flight = runner.launch(batch)
    following = ahead_of(batch, second)
    then = runner.launch(following, flight)
    assert runner.is_first is (eager == "")
    last = runner.launch(ahead_of(following, first), then)
    assert [ids(runner.wait(one)) for one in (flight, then, last)] == [[11, 21, 31], [12, 32], [33]]
    assert len(runner.graphs.captured) == (0 if eager else 3)


def test_steps_in_flight_that_are_not_waited_for_end_before_their_buffers_are_reused() -> None:
    with DelayedSimulatedDevice().watching() as late:
        runner = runner_on(late)
        flights = [runner.launch(decode_of(sequence_of([number], number % 4))) for number in range(5, 12)]
        assert [ids(runner.wait(one)) for one in reversed(flights)] == [
            [number + 1] for number in reversed(range(5, 12))
        ]


def test_log_probabilities_of_a_step_outlive_the_capture_of_the_next_one() -> None:
    """The step ahead is of another bucket, so it takes the buffer of the one that nobody has waited for."""
    params = SamplingParams(temperature=0.0, logprobs=2)
    first, second, third = (sequence_of([number], slot, params) for slot, number in enumerate((10, 20, 30)))
    runner = runner_on()
    batch = decode_of(first, second, third)
    flight = runner.launch(batch)
    then = runner.launch(ahead_of(batch, first), flight)
    assert [one.top[0][0] for one in runner.wait(flight)] == [11, 21, 31]
    assert [one.top[0][0] for one in runner.wait(then)] == [22, 32]


def test_a_shape_is_captured_once() -> None:
    runner = runner_on()
    assert ids(runner.run(decode_of(sequence_of([7], 0)))) == [8] and runner.is_first
    assert ids(runner.run(decode_of(sequence_of([8], 0)))) == [9] and not runner.is_first
    assert set(runner.graphs.captured) == {GraphShape(1, 200)} and runner.graphs.num_replayed == 2
    assert runner.model_seconds > 0


def test_steps_that_serving_may_meet_are_captured_in_pauses() -> None:
    runner = runner_on()
    assert runner.use_idle_time(lambda: False) and not runner.graphs.captured, "a device that captured nothing may not"
    runner.run(decode_of(sequence_of([7], 0)))
    asked = iter((False, False, True))
    assert not runner.use_idle_time(lambda: next(asked)) and len(runner.graphs.captured) == 3
    assert runner.use_idle_time(lambda: False)
    assert set(runner.shapes.in_pauses()) == set(runner.graphs.captured)
    replayed = runner.graphs.num_replayed
    prompt = span_of(sequence_of([5] * 70, 2), 0, 70)
    assert ids(runner.run(Batch((*decode_of(sequence_of([9], 1)).spans, prompt)))) == [10, 6]
    assert runner.graphs.num_replayed == replayed + 1 and not runner.is_first


def test_a_row_that_is_not_finite_is_not_sampled_and_changes_no_other() -> None:
    model = Counts()
    runner, first, second = runner_on(model=model), sequence_of([10], 0), sequence_of([20], 1)
    model.broken = 21
    batch = decode_of(first, second)
    flight = runner.launch(batch)
    following = runner.launch(ahead_of(batch), flight)
    assert ids(runner.wait(flight)) == [11, 21]
    assert ids(runner.wait(following)) == [12, NOT_FINITE]
    model.broken = 20
    assert ids(runner.run(batch)) == [11, NOT_FINITE]


@pytest.mark.parametrize("room", [0, 1, 4096])
def test_tables_are_up_to_date_however_much_is_new(room: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_runner, "MAX_TABLE_UPDATES", room)
    runner, sequence = runner_on(), sequence_of([5] * 190, 2)
    for start, end in ((0, 90), (90, 190)):
        runner.run(Batch((span_of(sequence, start, end),)))
    pages = [runner.kv_cache.row(2, position) // 64 for position in (0, 64, 128)]
    assert runner.kv_cache.tables[2, :3].tolist() == pages and len(set(pages)) == 3


def test_a_step_that_wanted_memory_is_launched_again_and_nothing_is_lost() -> None:
    model = Counts()
    runner, sequence = runner_on(model=model, eager="for this test"), sequence_of([5] * 70, 2)
    model.wanting = 1
    batch = Batch((span_of(sequence, 0, 70),))
    with pytest.raises(torch.OutOfMemoryError) as raised:
        runner.launch(batch)
    assert runner.survives(raised.value) and not runner.survives(ValueError("another"))
    assert ids(runner.run(batch)) == [6]
    assert runner.kv_cache.tables[2, :2].tolist() == [runner.kv_cache.row(2, place) // 64 for place in (0, 64)]


def test_copies_that_were_not_made_are_not_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    runner, sequence = runner_on(), sequence_of([5], 2)
    batch = replace(decode_of(sequence), copies=(KvCopy(0, 2, 0, 0),))

    def scarce(*_: object) -> None:
        raise torch.OutOfMemoryError("planted")

    with monkeypatch.context() as patch:
        patch.setattr(runner.kv_cache, "apply_copies", scarce)
        with pytest.raises(torch.OutOfMemoryError) as raised:
            runner.launch(batch)
    assert not runner.survives(raised.value)
    runner.run(decode_of(sequence))
    assert runner.survives(raised.value)


@pytest.mark.parametrize(
    ("params", "here", "without_float64"),
    [
        (GREEDY, True, True),
        (SamplingParams(top_p=0.5), True, False),
        (SamplingParams(logprobs=1), True, False),
        (SamplingParams(presence_penalty=1.0), True, False),
        (SamplingParams(temperature=0.0, min_tokens=9), True, False),
        (SamplingParams(beam_width=2), False, False),
    ],
)
def test_what_may_go_ahead(
    params: SamplingParams, here: bool, without_float64: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_on()
    sequence = sequence_of([5, 6], 0, params)
    assert runner.can_run_ahead(decode_of(sequence)) is here
    assert not runner.can_run_ahead(Batch((span_of(sequence, 0, 2),))), "a prompt's last part"
    monkeypatch.setattr(runner.backend, "can_sample", False)
    assert runner.can_run_ahead(decode_of(sequence)) is without_float64
    prompt = span_of(sequence_of([5, 6], 0, replace(params, top_k=1)), 0, 2)
    assert ids(runner.run(Batch((prompt,)))) == [7]


def test_more_than_a_step_has_room_for_is_our_own_fault() -> None:
    runner, sequence = runner_on(), sequence_of([5] * 150, 2)
    with pytest.raises(AssertionError, match="exceeds the limits on tokens or sequences"):
        runner.launch(Batch((span_of(sequence, 0, 150),)))
