"""Files of /proc and /sys with contents that no kernel writes: the machine is still probed and planned for."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.errors import PlanImpossible
from app.hardware.facts import Needs
from app.hardware.plan.plan import make_plan
from app.hardware.probe.host_files import HostFiles, parse_cpu_list
from app.hardware.probe.probe import probe
from app.hardware.thermal_sensors import read_thermal
from app.settings import Settings
from app.weights.forms import RECIPES
from recorded_hosts import read_tree, write_tree

CONTENTS = ["", "\x00\xff garbage", "-1", "9" * 5_000, "²", "1.2.3", "0-99999999999", "max", ": : :\n= =", "nan"]
# Files without which a plan may be impossible: they say how much memory there is, and on which CPUs this process runs;
# a recorded host also states its architecture in one.
NEEDED = ("meminfo", "status", "online", "cpuset", "memory.", "kernel/arch")


@pytest.mark.cases(test=6)
@pytest.mark.parametrize("host", ["zen5-vm", "raspberry-pi-5", "cgroup-v1"])
@pytest.mark.parametrize("content", CONTENTS)
def test_no_content_of_all_files_ends_a_probe(host: str, content: str, tmp_path: Path) -> None:
    tree = read_tree(host)
    run = write_tree({name: text if name.startswith("$") else content for name, text in tree.items()}, tmp_path)
    read_thermal(probe(tmp_path, run).thermal, HostFiles(tmp_path))


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("content", CONTENTS)
def test_no_content_of_one_file_ends_a_probe_or_a_plan(content: str, tmp_path: Path, llama_1b: Needs) -> None:
    """Files whose names differ by a number are damaged together."""
    tree = read_tree("zen5-vm")
    run = write_tree(tree, tmp_path)
    groups: dict[str, list[str]] = {}
    for name in tree:
        if not name.startswith("$"):
            groups.setdefault(re.sub(r"\d+", "", name), []).append(name)
    before = probe(tmp_path, run)
    for group, names in groups.items():
        for name in names:
            (tmp_path / name.lstrip("/")).write_text(content, encoding="utf-8")
        facts = probe(tmp_path, run)
        for name in names:
            (tmp_path / name.lstrip("/")).write_text(tree[name], encoding="utf-8")
        if facts == before:
            continue
        read_thermal(facts.thermal, HostFiles(tmp_path))
        try:
            make_plan(facts, None, Settings(), llama_1b, RECIPES)
        except PlanImpossible as error:
            assert any(needed in group for needed in NEEDED), (group, content, error)


def test_a_folder_in_the_place_of_a_file_and_the_reverse(tmp_path: Path) -> None:
    tree = read_tree("zen5-vm")
    run = write_tree(tree, tmp_path)
    for name in ("/proc/self/cgroup", "/proc/self/mountinfo", "/proc/cpuinfo"):
        if name in tree:
            (tmp_path / name.lstrip("/")).unlink()
            (tmp_path / name.lstrip("/")).mkdir()
    (tmp_path / "sys/class").mkdir(parents=True, exist_ok=True)
    (tmp_path / "sys/class/hwmon").write_text("")
    assert probe(tmp_path, run).os == "linux"


def test_a_list_of_cpus_is_bounded() -> None:
    assert len(parse_cpu_list("0-99999999999")) <= 2**13
    assert parse_cpu_list("9" * 5_000) == ()
