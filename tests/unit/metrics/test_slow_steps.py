"""Causes of slow steps: each is produced for real where a test can, otherwise from counters."""

from __future__ import annotations

import mmap
import resource
from dataclasses import replace
from pathlib import Path

import pytest

from app.hardware.decision import TrialTimes
from app.hardware.step_times import StepTimeTable
from app.metrics.gauges import throttled_seconds
from app.metrics.step_monitor import GcControl, ProcessCounters, SlowStep, SlowStepDetector, first_touch_seconds
from app.metrics.steps import StepStats, StepTimeModel

TABLE = StepTimeTable.from_trial(TrialTimes("int4", 2, {1: 0.016, 8: 0.030}, {128: 0.2}, context_token_seconds=1e-6))
DECODE = StepStats(0.030, decode_tokens=8, num_decode_sequences=8)
SLOW = replace(DECODE, seconds=0.050)
MIXED = replace(DECODE, prefill_tokens=64, num_prefill_sequences=1, seconds=0.100)
PAGES = 2000


def stalls(table: StepTimeTable | None = TABLE, **parts: object) -> SlowStepDetector:
    return SlowStepDetector(StepTimeModel(table), **({"garbage": GcControl()} | parts))  # type: ignore[arg-type]


def ended(found: SlowStepDetector, step: StepStats) -> str | None:
    found._model.observe(step)  # as the engine does, before the worker reports the end
    return found.end(step)


def after(found: SlowStepDetector, step: StepStats) -> str | None:
    found.begin()
    return ended(found, step)


# ---- what such steps take ----------------------------------------------------------------------------------------------


def test_a_step_that_takes_what_such_steps_take_has_no_cause() -> None:
    found = stalls()
    assert after(found, DECODE) is None
    assert after(found, replace(DECODE, seconds=0.044)) is None
    assert after(found, SLOW) is not None


def test_a_machine_that_has_become_slower_does_not_stall_at_every_step() -> None:
    found = stalls()
    causes = [after(found, replace(DECODE, seconds=0.060)) for _ in range(60)]
    assert causes[0] is not None and causes[-1] is None
    assert after(found, replace(DECODE, seconds=0.150)) is not None


def test_one_slow_step_does_not_change_what_is_usual() -> None:
    usual = StepTimeModel(TABLE)
    usual.observe(replace(DECODE, seconds=10.0))
    told = usual.predict(DECODE)
    assert told is not None and 0.030 <= told < 0.034


def test_without_a_table_steps_of_the_same_size_show_what_is_usual() -> None:
    found = stalls(None)
    first = [after(found, replace(DECODE, seconds=seconds)) for seconds in (0.1, *(15 * [0.030]))]
    assert set(first) == {None}, "nothing is known yet"
    assert after(found, DECODE) is None
    assert after(found, replace(DECODE, seconds=0.2)) is not None
    many = StepStats(1.0, encode_tokens=512, num_encode_sequences=4)
    assert after(found, many) is None, "another kind of step"
    for _ in range(20):
        after(found, many)
    assert after(found, replace(many, encode_tokens=64)) is None, "another size"
    assert after(found, replace(many, seconds=1.6)) is not None


def test_a_step_of_which_nothing_is_known_teaches_nothing() -> None:
    usual = StepTimeModel(TABLE)
    nothing = StepStats(1.0)
    usual.observe(nothing)
    assert usual.predict(nothing) is usual.usual_seconds is None


def test_what_mixed_steps_take_says_nothing_of_prompts_alone() -> None:
    found = stalls()
    prompt = StepStats(TABLE.prefill(64), prefill_tokens=64, num_prefill_sequences=1)
    for _ in range(60):
        after(found, replace(MIXED, seconds=3 * TABLE.mixed(8, 64)))
    assert after(found, replace(prompt, seconds=2 * prompt.seconds)) is not None


# ---- causes ------------------------------------------------------------------------------------------------------------


def test_streams_that_waited_for_a_prompt_are_reported_so() -> None:
    found = stalls()
    assert after(found, replace(MIXED, seconds=TABLE.mixed(8, 64))) == "prefill", "as long as such a step takes"
    assert after(found, replace(MIXED, prefill_tokens=1, seconds=0.035)) is None, "nobody noticed"
    assert after(found, StepStats(0.1, prefill_tokens=64, num_prefill_sequences=1)) is None, (
        "nobody waited for a next token"
    )


def test_a_sequence_that_lost_its_place_is_computed_again() -> None:
    found = stalls()
    alone = StepStats(0.1, prefill_tokens=64, num_prefill_sequences=1, recomputed_tokens=64)
    assert after(found, alone) == "preempted"
    assert after(found, replace(MIXED, recomputed_tokens=64)) == "preempted"
    assert after(found, replace(SLOW, preempted=1)) == "preempted"
    assert SlowStep(replace(MIXED, recomputed_tokens=8), 0.02, ProcessCounters(switches=1)).cause() == "preempted"


def test_a_first_step_of_its_shape_is_slow_for_that() -> None:
    assert after(stalls(), replace(SLOW, is_first=True)) == "compiled"


def touch(pages: int) -> None:
    """Memory that nobody has touched: each page is a fault."""
    with mmap.mmap(-1, pages * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        if (small_pages := getattr(mmap, "MADV_NOHUGEPAGE", None)) is not None:
            memory.madvise(small_pages)
        for place in range(0, len(memory), mmap.PAGESIZE):
            memory[place] = 1


def test_new_memory_is_seen_as_page_faults() -> None:
    found = stalls(fault_seconds=1e-5)
    found.begin()
    touch(PAGES)
    assert ended(found, replace(SLOW, seconds=0.030 + PAGES * 1e-5)) == "page_fault"
    assert after(found, SLOW) != "page_fault", "those of an earlier step are not this one's"


def test_a_few_faults_explain_no_long_step() -> None:
    assert SlowStep(SLOW, 1.0, ProcessCounters(minor_faults=100), fault_seconds=1e-6).cause() == "unknown"
    assert SlowStep(SLOW, 1e-4, ProcessCounters(minor_faults=100), fault_seconds=1e-6).cause() == "page_fault"
    assert SlowStep(SLOW, 1.0, ProcessCounters(major_faults=1)).cause() == "page_fault", (
        "nobody knows how long a disk takes"
    )


def test_a_page_costs_something_to_touch_first() -> None:
    assert 0.0 < first_touch_seconds() < 1e-3


def test_garbage_of_that_step_counts_and_earlier_garbage_does_not() -> None:
    garbage = GcControl()
    garbage.seconds = 5.0
    found = stalls(garbage=garbage)
    found.begin()
    garbage.seconds += 0.015
    assert ended(found, SLOW) == "garbage_collection"
    assert after(found, SLOW) != "garbage_collection"
    found.begin()
    garbage.seconds += 0.005
    assert ended(found, SLOW) != "garbage_collection", "the lesser part of it"


@pytest.mark.parametrize("line, unit", [("throttled_usec", 1e6), ("throttled_time", 1e9)])
def test_a_quota_that_is_used_up_is_read_from_the_control_group(line: str, unit: float, tmp_path: Path) -> None:
    stat = tmp_path / "cpu.stat"

    def write(seconds: float) -> None:
        stat.write_text(f"nr_throttled 3\n{line} {round(seconds * unit)}\n")

    write(7.0)
    found = stalls(throttled_seconds=lambda: throttled_seconds(stat))
    found.begin()
    write(7.015)
    assert ended(found, SLOW) == "throttled"
    assert after(found, SLOW) != "throttled"
    write(8.0)
    found.update_throttled()  # it happened while nothing was computed, or spread over many steps
    assert after(found, SLOW) != "throttled"


def test_without_a_quota_nothing_is_throttled() -> None:
    assert after(stalls(throttled_seconds=lambda: None), SLOW) != "throttled"


def test_a_thread_that_lost_its_core_is_the_last_but_one_cause() -> None:
    lost = ProcessCounters(switches=1)
    assert SlowStep(SLOW, 0.02, lost).cause() == "descheduled"
    assert SlowStep(MIXED, 0.02, lost).cause() == "descheduled", "it took longer than a prompt explains"
    assert SlowStep(MIXED, 0.02, ProcessCounters()).cause() == "prefill"
    assert SlowStep(SLOW, 0.02, ProcessCounters()).cause() == "unknown"


def test_counters_are_of_the_time_between() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF)
    touch(PAGES)
    during = ProcessCounters.between(before, resource.getrusage(resource.RUSAGE_SELF), 0.5)
    assert PAGES <= during.minor_faults < before.ru_minflt + PAGES
    assert during.major_faults >= 0 and during.switches >= 0 and during.garbage_seconds == 0.5
