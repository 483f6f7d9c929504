"""The log of the last steps in columns: its content, its order, and the number of lost steps."""

from __future__ import annotations

from typing import get_args

import pytest

from app.metrics.steps import Cause, StepLog, StepStats

DECODE = StepStats(0.0300001, decode_tokens=8, num_decode_sequences=8)


def filled(count: int, kept: int = 8) -> StepLog:
    """Step number n began at n seconds."""
    log = StepLog(kept)
    for number in range(count):
        log.add(float(number), DECODE, None)
    return log


def test_a_step_is_reported_as_it_was() -> None:
    log = StepLog()
    log.add(1_700_000_000.123456, DECODE, None)
    log.add(1_700_000_001.5, StepStats(0.25, prefill_tokens=100, decode_tokens=3, draft_tokens=2), "prefill")
    log.add(1_700_000_002.5, StepStats(0.5, encode_tokens=77), "unknown")
    told = log.since(0)
    assert (told["next"], told["dropped"]) == (3, 0)
    assert told["steps"] == {
        "at": [1_700_000_000.123456, 1_700_000_001.5, 1_700_000_002.5],
        "seconds": [0.0300001, 0.25, 0.5],
        "phase": ["decode", "prefill", "encode"],
        "tokens": [8, 103, 77],
        "cause": ["", "prefill", "unknown"],
    }


def test_every_cause_has_a_number_of_its_own() -> None:
    log = StepLog()
    for cause in get_args(Cause):
        log.add(0.0, DECODE, cause)
    assert log.since(0)["steps"]["cause"] == list(get_args(Cause))


@pytest.mark.parametrize("count", [0, 3, 8, 9, 21])
@pytest.mark.parametrize("after", [0, 2, 7, 20, 10**15])
def test_what_came_after_is_reported_and_what_is_gone_is_counted(count: int, after: int) -> None:
    told = filled(count).since(after)
    expected = [number for number in range(count) if number >= after and number >= count - 8]
    assert told["steps"]["at"] == expected
    assert told["next"] == count
    assert told["dropped"] == (count - 8 - after if count - 8 > after else 0)


def test_an_answer_is_not_too_long_and_the_next_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.metrics.steps.MAX_STEPS", 3)
    log, after, heard = filled(13), 0, []
    while steps := (told := log.since(after))["steps"]["at"]:
        assert len(steps) <= 3
        heard += steps
        after = told["next"]
    assert heard == list(range(5, 13))


def test_what_is_overwritten_while_it_is_read_is_not_reported() -> None:
    """The worker goes on adding: rows of other steps may lie where the oldest lay."""
    log = filled(8)
    cut, cuts = log._slice_ring, iter(range(5))

    def slow(*place: int) -> list[object]:
        column = cut(*place)  # type: ignore[arg-type]
        if next(cuts) == 1:  # between two columns come two steps
            log.add(8.0, DECODE, None)
            log.add(9.0, DECODE, None)
        return column

    log._slice_ring = slow  # type: ignore[assignment, method-assign]
    told = log.since(0)
    assert told["steps"]["at"] == [2, 3, 4, 5, 6, 7]
    assert (told["next"], told["dropped"]) == (8, 2)
