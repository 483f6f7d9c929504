"""Control groups: every mount that is met in the field, and that the tightest level wins whatever the tree looks like."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.hardware.facts import Cgroup
from app.hardware.probe import cgroup
from app.hardware.probe.cgroup import parse_cpu_max, parse_groups, parse_mounts
from app.hardware.probe.host_files import HostFiles

V2_MOUNT = "30 23 0:26 / /sys/fs/cgroup rw shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"


def group(root: Path, files: dict[str, str]) -> Cgroup:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return cgroup.read_cgroup(HostFiles(root))


def test_no_control_groups_no_limits(tmp_path: Path) -> None:
    assert group(tmp_path, {}) == Cgroup()
    assert group(tmp_path, {"/proc/self/cgroup": "0::/", "/proc/self/mountinfo": "garbage\n\n1 2 3"}) == Cgroup()


def test_the_namespace_of_a_container(tmp_path: Path) -> None:
    """Its own group is `/`, and the mount shows it: cgroup v2 in Docker and Kubernetes today."""
    files = {
        "/proc/self/cgroup": "0::/\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/cpu.max": "250000 100000\n",
        "/sys/fs/cgroup/memory.max": "1073741824\n",
        "/sys/fs/cgroup/cpuset.cpus.effective": "0-3,8\n",
    }
    found = group(tmp_path, files)
    assert (found.version, found.quota_cores, found.cpuset, found.memory_limit_bytes) == (
        2,
        2.5,
        (0, 1, 2, 3, 8),
        2**30,
    )


def test_a_path_that_the_mount_does_not_show(tmp_path: Path) -> None:
    """The host's path in /proc/self/cgroup, only the container's group mounted, under a top that does not name it."""
    files = {
        "/proc/self/cgroup": "0::/docker/abc\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/cpu.max": "50000 100000",
    }
    assert group(tmp_path, files).quota_cores == 0.5
    files["/proc/self/cgroup"] = "0::/../../docker/abc\n"  # a namespace that the process lies outside of
    assert group(tmp_path, files).quota_cores == 0.5


def test_both_versions_at_once(tmp_path: Path) -> None:
    """systemd's hybrid layout: controllers in v1, an empty v2 beside them."""
    files = {
        "/proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a/b\n0::/a/b\n",
        "/proc/self/mountinfo": (
            "1 0 0:1 / /cg/cpu,cpuacct rw - cgroup cgroup rw,cpu,cpuacct\n"
            "2 0 0:2 / /cg/memory rw - cgroup cgroup rw,memory\n"
            "3 0 0:3 / /cg/unified rw - cgroup2 cgroup2 rw\n"
        ),
        "/cg/cpu,cpuacct/a/b/cpu.cfs_quota_us": "-1",
        "/cg/cpu,cpuacct/a/b/cpu.cfs_period_us": "100000",
        "/cg/cpu,cpuacct/a/cpu.cfs_quota_us": "75000",
        "/cg/cpu,cpuacct/a/cpu.cfs_period_us": "50000",
        "/cg/memory/a/memory.limit_in_bytes": "4096",
        "/cg/memory/memory.limit_in_bytes": "9223372036854771712",
        "/cg/unified/a/b/cpu.max": "1000 100000",  # no controller is there: not to be believed
    }
    found = group(tmp_path, files)
    assert (found.version, found.quota_cores, found.memory_limit_bytes) == (1, 1.5, 4096)


def test_above_memory_high_a_group_is_slowed_down(tmp_path: Path) -> None:
    files = {
        "/proc/self/cgroup": "0::/pod\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/pod/memory.max": "2000",
        "/sys/fs/cgroup/pod/memory.high": "1500",
        "/sys/fs/cgroup/pod/memory.current": "900",
        "/sys/fs/cgroup/pod/memory.stat": "anon 500\ninactive_file 300\nactive_file 200\n",
    }
    found = group(tmp_path, files)
    assert (found.memory_limit_bytes, found.memory_available_bytes) == (1500, 1100)


def test_a_mount_point_with_a_space() -> None:
    mount = parse_mounts(r"1 0 0:1 /top\040one /cg\040two rw - cgroup cgroup rw,cpu")[0]
    assert (mount.top, mount.point, mount.controllers) == ("/top one", "/cg two", {"rw", "cpu"})


def test_a_colon_in_a_group_name() -> None:
    assert parse_groups("3:cpu,cpuacct:/a:b/c\n0::/x\n") == {"cpu": "/a:b/c", "cpuacct": "/a:b/c", "": "/x"}


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", None),
        ("50000 100000", 0.5),
        ("150000 100000", 1.5),
        ("100000", 1.0),
        ("0 100000", None),
        ("nonsense 1", None),
        ("", None),
    ],
)
def test_cpu_max(text: str, cores: float | None) -> None:
    assert parse_cpu_max(text) == cores


@given(st.text(max_size=200))
def test_any_text_is_survived(text: str) -> None:
    """Whatever a kernel to come writes there, the probe goes on."""
    quota = parse_cpu_max(text)
    assert quota is None or quota > 0
    for mount in parse_mounts(text):
        assert mount.version in (1, 2)
    assert all(isinstance(path, str) for path in parse_groups(text).values())


Levels = st.lists(
    st.tuples(st.none() | st.integers(1000, 10_000_000), st.none() | st.integers(4096, 2**40)), min_size=1, max_size=5
)


@given(Levels, st.integers(1000, 1_000_000), st.sampled_from([1, 2]))
def test_the_tightest_level_wins(
    tmp_path_factory: pytest.TempPathFactory, levels: list[tuple[int | None, int | None]], period: int, version: int
) -> None:
    """Levels from the root down, each with or without a quota and a memory limit."""
    root = tmp_path_factory.mktemp("tree")
    path = "".join(f"/g{depth}" for depth in range(1, len(levels)))
    files = {"/proc/self/cgroup": f"0::{path or '/'}", "/proc/self/mountinfo": V2_MOUNT}
    if version == 1:
        files["/proc/self/cgroup"] = f"2:memory,cpu:{path or '/'}"
        files["/proc/self/mountinfo"] = "1 0 0:1 / /sys/fs/cgroup rw - cgroup cgroup rw,cpu,memory"
    for depth, (quota, limit) in enumerate(levels):
        directory = "/sys/fs/cgroup" + "".join(f"/g{level}" for level in range(1, depth + 1))
        if version == 2:
            files[f"{directory}/cpu.max"] = f"{quota or 'max'} {period}"
            files[f"{directory}/memory.max"] = str(limit or "max")
        else:
            files[f"{directory}/cpu.cfs_quota_us"], files[f"{directory}/cpu.cfs_period_us"] = (
                str(quota or -1),
                str(period),
            )
            files[f"{directory}/memory.limit_in_bytes"] = str(limit or 9223372036854771712)
    found = group(root, files)
    quotas = [quota for quota, _ in levels if quota]
    limits = [limit for _, limit in levels if limit]
    assert found.version == version
    assert found.memory_limit_bytes == min(limits, default=None)
    if quotas:
        assert found.quota_cores is not None and math.isclose(found.quota_cores, min(quotas) / period)
    else:
        assert found.quota_cores is None


@pytest.mark.parametrize(
    ("own", "parent", "expected"), [("max 100000", "150000 100000", "/a"), ("50000 100000", "150000 100000", "/a/b")]
)
def test_throttling_is_counted_where_the_tightest_quota_is(
    tmp_path: Path, own: str, parent: str, expected: str
) -> None:
    files = {
        "/proc/self/cgroup": "0::/a/b\n",
        "/proc/self/mountinfo": V2_MOUNT,
        "/sys/fs/cgroup/a/cpu.max": parent,
        "/sys/fs/cgroup/a/b/cpu.max": own,
    }
    group(tmp_path, files)
    assert cgroup.find_cpu_stat(HostFiles(tmp_path)) == tmp_path / f"sys/fs/cgroup{expected}/cpu.stat"


def test_no_quota_no_throttling(tmp_path: Path) -> None:
    assert cgroup.find_cpu_stat(HostFiles(tmp_path)) is None
