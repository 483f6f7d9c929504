"""Rows of many requests share a step, each request gets its rows, and a request that cannot be computed fails alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from app.engine.encoder.batching import BatchingDelay
from app.engine.program import DTYPES, ProgramEngine, RunnableProgram, _tensor, to_array
from app.errors import InvalidRequest, ServiceStopping, StepFailed
from app.hardware.step_times import StepTimeTable, ThrottleCorrection
from app.messages import Abort, Array, ArraysReady, Event, Infer, RequestFailed, Signature, TensorSpec
from app.metrics.steps import StepTimeModel

SIGNATURE = Signature(
    (TensorSpec("ids", "INT64", (-1, -1)),), (TensorSpec("sum", "FP32", (-1,)), TensorSpec("twice", "INT64", (-1, -1)))
)


def to_tensor(array: Array) -> Tensor:
    return _tensor(bytearray(array.data), array.datatype, array.shape)


class Table:
    """A program of one table of ten rows: an id beyond it is refused as torch's own operators do."""

    def __init__(self) -> None:
        self.batches: list[tuple[int, ...]] = []
        self.broken = False

    def run(self, given: Mapping[str, Tensor]) -> list[Any]:
        ids = given["ids"]
        self.batches.append(tuple(ids.shape))
        if self.broken:
            raise RuntimeError("no memory")
        if bool((ids > 90).any()):
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        if bool((ids < 0).any()):
            raise RuntimeError("index -1 is out of bounds")
        values = torch.arange(10.0)[ids]
        return [values.sum(1), ids * 2]


def engine_of(table: Table, max_rows: int = 8) -> ProgramEngine:
    return ProgramEngine(RunnableProgram(table, SIGNATURE, (0, 1)), BatchingDelay(max_rows))  # type: ignore[arg-type]


def order(name: str, rows: list[list[int]], outputs: tuple[str, ...] = ("sum",)) -> Infer:
    return Infer(name, {"ids": to_array(torch.tensor(rows), "INT64")}, outputs, arrived_at=0.0)


def finished(engine: ProgramEngine) -> dict[str, Event]:
    events: list[Event] = []
    while engine.has_work:
        events += engine.step()
    assert len({event.request_id for event in events}) == len(events)
    return {event.request_id: event for event in events}


def sums(event: Event) -> list[float]:
    assert isinstance(event, ArraysReady)
    values: list[float] = to_tensor(event.arrays["sum"]).tolist()
    return values


def test_requests_share_a_step() -> None:
    table = Table()
    engine = engine_of(table)
    engine.add(order("a", [[1, 2], [3, 4]]))
    engine.add(order("b", [[5, 6]], ("sum", "twice")))
    told = finished(engine)
    assert table.batches == [(3, 2)]
    assert (sums(told["a"]), sums(told["b"])) == ([3.0, 7.0], [11.0])
    assert isinstance(told["b"], ArraysReady)
    assert to_tensor(told["b"].arrays["twice"]).tolist() == [[10, 12]]
    assert engine.stats is not None
    assert (engine.stats.encode_tokens, engine.stats.num_sequences) == (3, 2)


def test_a_step_reports_what_a_quota_makes_of_it() -> None:
    engine = engine_of(Table())
    engine.throttle_correction = ThrottleCorrection(
        0.25, iter([1.0, 1e6]).__next__
    )  # so much of the CPU, however short it was
    engine.add(order("a", [[1, 2]]))
    finished(engine)
    assert engine.stats is not None
    assert engine.stats.corrected_seconds == pytest.approx(4 * (1e6 - 1.0))


def test_only_rows_of_one_shape_share_a_step_and_the_oldest_is_in_it() -> None:
    table = Table()
    engine = engine_of(table)
    for name, rows in (("a", [[1]]), ("b", [[1, 2]]), ("c", [[3]])):
        engine.add(order(name, rows))
    told = finished(engine)
    assert table.batches == [(2, 1), (1, 2)]
    assert [sums(told[name]) for name in "abc"] == [[1.0], [3.0], [3.0]]


def test_a_large_request_spans_steps() -> None:
    table = Table()
    engine = engine_of(table, max_rows=4)
    engine.add(order("large", [[row] for row in range(10)]))
    engine.add(order("small", [[7]]))
    assert engine.step() == []
    snapshot = engine.snapshot()
    assert (snapshot.num_running, snapshot.num_waiting, snapshot.queue) == (1, 1, (6, 1))
    told = finished(engine)
    assert table.batches == [(4, 1), (4, 1), (3, 1)]
    assert sums(told["large"]) == [float(row) for row in range(10)]
    assert sums(told["small"]) == [7.0]


def test_rows_whose_shape_changes_between_steps_are_refused_once() -> None:
    class Growing(Table):
        def run(self, given: Mapping[str, Tensor]) -> list[Any]:
            values, twice = super().run(given)
            return [values, twice[:, : len(self.batches)]]

    engine = engine_of(Growing(), max_rows=2)
    engine.add(order("two steps", [[1, 2]] * 3, ("twice",)))
    (event,) = finished(engine).values()
    assert isinstance(event, RequestFailed) and isinstance(event.error, InvalidRequest)
    assert "rows of an output differ in shape" in event.error.message


def test_who_sends_an_id_beyond_the_table_ends_alone() -> None:
    engine = engine_of(Table())
    engine.add(order("good", [[1]]))
    engine.add(order("bad", [[10]]))
    engine.add(order("other", [[2]]))
    told = finished(engine)
    assert (sums(told["good"]), sums(told["other"])) == ([1.0], [2.0])
    assert isinstance(told["bad"], RequestFailed)
    assert isinstance(told["bad"].error, InvalidRequest)
    assert "out of" in told["bad"].error.message


@pytest.mark.parametrize(
    ("token", "kind", "said"), [(-1, InvalidRequest, "cannot compute these inputs: index -1"), (91, StepFailed, "log")]
)
def test_whose_mistake_it_is_follows_from_what_else_can_be_computed(token: int, kind: type, said: str) -> None:
    """Whatever torch raises; but a lack of memory is the server's."""
    engine = engine_of(Table())
    engine.add(order("good", [[1]]))
    engine.add(order("bad", [[token]]))
    told = finished(engine)
    assert sums(told["good"]) == [1.0]
    assert isinstance(told["bad"], RequestFailed)
    assert isinstance(told["bad"].error, kind)
    assert said in str(told["bad"].error)


def test_what_is_not_the_clients_fault_is_not_reported_so_and_ends_no_engine() -> None:
    table = Table()
    table.broken = True
    engine = engine_of(table)
    for number in range(5):  # more than a worker bears of failed steps
        engine.add(order(str(number), [[1]]))
        (event,) = engine.step()
        assert isinstance(event, RequestFailed)
        assert isinstance(event.error, StepFailed)
    table.broken = False
    engine.add(order("after", [[1]]))
    assert sums(finished(engine)["after"]) == [1.0]


def test_a_request_that_nobody_waits_for_is_forgotten() -> None:
    table = Table()
    engine = engine_of(table)
    engine.add(order("gone", [[1]]))
    engine.add(order("here", [[2]]))
    engine.abort(Abort("gone"))
    assert finished(engine).keys() == {"here"}
    assert table.batches == [(1, 1)]


def test_all_are_reported_at_the_end() -> None:
    engine = engine_of(Table())
    engine.add(order("a", [[1]]))
    engine.add(order("b", [[1, 2]]))
    error = ServiceStopping("stopping")
    assert [event.request_id for event in engine.fail_all(error)] == ["a", "b"]
    assert not engine.has_work


@given(
    st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3), st.booleans()), min_size=1, max_size=8),
    st.integers(1, 7),
)
def test_everybody_ends_once_with_their_own_rows(requests: list[tuple[int, int, bool]], max_rows: int) -> None:
    table = Table()
    engine = engine_of(table, max_rows)
    wanted: dict[str, list[float] | None] = {}
    for number, (rows, width, bad) in enumerate(requests):
        ids = [[(number + row + column) % 10 for column in range(width)] for row in range(rows)]
        wanted[str(number)] = None if bad else [float(sum(row)) for row in ids]
        engine.add(order(str(number), [[11] * width, *ids[1:]] if bad else ids))
    told = finished(engine)
    assert told.keys() == wanted.keys()
    for name, event in told.items():
        if wanted[name] is None:
            assert isinstance(event, RequestFailed)
        else:
            assert sums(event) == wanted[name]
    assert all(rows <= max_rows for rows, _ in table.batches)


@pytest.mark.parametrize("datatype", sorted(DTYPES))
def test_arrays_become_tensors_and_back(datatype: str) -> None:
    tensor = torch.tensor([[0, 1, 1], [1, 0, 2]]).to(DTYPES[datatype])
    array = to_array(tensor, datatype)
    assert (array.datatype, array.shape, len(array.data)) == (datatype, (2, 3), tensor.nbytes)
    assert torch.equal(to_tensor(array), tensor)


def test_an_array_without_rows() -> None:
    assert to_tensor(to_array(torch.empty(0, 4))).shape == (0, 4)
    assert to_array(torch.empty(0, 4)) == Array("FP32", (0, 4), b"")


def test_what_steps_take_is_reported_and_corrected() -> None:
    now = [0.0]

    class Slow(Table):
        def run(self, given: Mapping[str, Tensor]) -> list[Any]:
            now[0] += 3.0
            return super().run(given)

    steps = StepTimeTable((), (), encode_points=((1, 1.0), (8, 2.0)))
    served = RunnableProgram(Slow(), SIGNATURE, (0, 1))  # type: ignore[arg-type]
    engine = ProgramEngine(served, BatchingDelay(8, StepTimeModel(steps), oldest_first=True), lambda: now[0])
    before = engine.snapshot().step_times
    assert before is not None and (before.max_tokens, before.oldest_first, before.encode(1)) == (8, True, 1.0)
    engine.add(order("a", [[1]]))
    finished(engine)
    assert engine.stats is not None and engine.stats.model_seconds == engine.stats.seconds == 3.0
    after = engine.snapshot().step_times
    assert after is not None and after.encode(1) == 3.0, "the step took three seconds"
    assert engine_of(Table()).snapshot().step_times is None, "nothing was measured"
