"""Quotas in the format of each cgroup version, and the plan against the best number of threads."""

from __future__ import annotations

from pathlib import Path

import pytest

from armature_bench.http.client import StreamTiming
from armature_bench.http.tally import GenerateRun, GenerateTiming
from tools.measure.cpu_quota import Found, Load, ours, share_of_best
from tools.peers.quota import Quota


def test_a_quota_of_either_version(tmp_path: Path) -> None:
    second = Quota.make("a", 1.5, tmp_path)
    assert (second.folder / "cpu.max").read_text() == "150000 100000"
    (second.folder / "cpu.stat").write_text("nr_throttled 3\nthrottled_usec 250000\n")
    assert second.throttled_seconds() == 0.25
    (tmp_path / "cpu").mkdir()
    first = Quota.make("b", 1.5, tmp_path)
    assert (first.folder.parent, first.procs.name) == (tmp_path / "cpu", "cgroup.procs")
    assert (first.folder / "cpu.cfs_quota_us").read_text() == "150000"
    (first.folder / "cpu.stat").write_text("nr_throttled 3\nthrottled_time 250000000\n")
    assert first.throttled_seconds() == 0.25


def test_who_may_not_make_groups_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="cannot create a control group with a quota"):
        Quota.make("a", 1.5, tmp_path / "absent")


def test_the_plan_is_held_against_the_best_that_fits() -> None:
    of = {
        "auto": Found([9.0, 11.0], [0.0, 0.0]),
        "1-threads": Found([10.0, 10.0], [0.01, 0.01]),
        "2-threads": Found([30.0, 30.0], [0.2, 0.3]),
        "peer": Found([50.0, 50.0], [0.0, 0.0]),
    }
    assert share_of_best(of) == (1.0, "1-threads")
    assert share_of_best({"auto": of["auto"], "2-threads": of["2-threads"]}) is None


def test_ours_are_as_planned_and_with_each_number_forced() -> None:
    auto, one, two = ours("m", "--precision int4", (1, 2), "python")
    assert [each.name for each in (auto, one, two)] == ["auto", "1-threads", "2-threads"]
    assert "--threads" not in auto.command
    assert (one.command[-2:], two.command[-2:]) == (("--threads", "1"), ("--threads", "2"))


def test_a_prompts_speed_is_to_its_first_token() -> None:
    run = GenerateRun(0.0, 9.0, answered=[GenerateTiming(0.0, 0, 1, StreamTiming(1.0, ((3.0, 1),)))])
    assert Load("prefill 512", 1, 512, 1).rate(run) == 256.0
