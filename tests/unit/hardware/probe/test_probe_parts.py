"""Parts of the probe on synthetic machines: tables of cores, absent files, failing commands."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.hardware.probe import cpu as cpu_arm
from app.hardware.probe import cpu as cpu_x86
from app.hardware.probe import macos, software, topology
from app.hardware.probe.host_files import HostFiles, parse_cpu_list, parse_fields, parse_size
from app.hardware.probe.probe import probe, run_command


def write(root: Path, files: dict[str, str]) -> HostFiles:
    for name, content in files.items():
        path = root / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return HostFiles(root)


def silent(command: list[str]) -> str | None:
    return None


@pytest.mark.parametrize(
    ("vendor", "family", "model", "stepping", "name"),
    [
        ("AuthenticAMD", 0x1A, 2, 1, "Zen 5"),
        ("AuthenticAMD", 0x19, 0x11, 1, "Zen 4"),
        ("AuthenticAMD", 0x19, 0xA0, 2, "Zen 4"),
        ("AuthenticAMD", 0x19, 1, 1, "Zen 3"),
        ("AuthenticAMD", 0x17, 0x31, 0, "Zen 2"),
        ("AuthenticAMD", 0x17, 1, 2, "Zen"),
        ("AuthenticAMD", 0x42, 0, 0, None),
        ("GenuineIntel", 6, 0x55, 4, "Skylake-SP"),
        ("GenuineIntel", 6, 0x55, 7, "Cascade Lake"),
        ("GenuineIntel", 6, 0x55, 11, "Cooper Lake"),
        ("GenuineIntel", 6, 0xAD, 1, "Granite Rapids"),
        ("GenuineIntel", 6, 0xFE, 1, None),
        ("CentaurHauls", 6, 0x55, 1, None),
    ],
)
def test_x86_cores(vendor: str, family: int, model: int, stepping: int, name: str | None) -> None:
    assert cpu_x86.microarchitecture(vendor, family, model, stepping) == name


def test_a_model_number_that_contradicts_the_flags_names_no_core() -> None:
    """Some hypervisors show the model of a processor without AMX, and its flags."""
    fields = {"vendor_id": "GenuineIntel", "cpu family": "6", "model": "167", "stepping": "1", "flags": "avx2 amx_tile"}
    assert cpu_x86.x86_cpu(fields).microarchitecture is None
    assert cpu_x86.x86_cpu({**fields, "flags": "avx2"}).microarchitecture == "Rocket Lake"
    assert cpu_x86.x86_cpu({**fields, "model": "143"}).microarchitecture == "Sapphire Rapids"


@pytest.mark.parametrize(
    ("implementer", "part", "sold_by", "core", "product"),
    [
        ("0x41", "0xd4f", "Amazon EC2", "Neoverse V2", "Graviton4"),
        ("0x41", "0xd4f", "Google", "Neoverse V2", "Axion"),
        ("0x41", "0xd4f", "Quanta", "Neoverse V2", None),
        ("0x41", "0xd8e", "Google", "Neoverse N3", "Axion"),
        ("0x41", "0xd84", "Amazon EC2", "Neoverse V3", "Graviton5"),
        ("0x41", "0xd0c", "Hetzner", "Neoverse N1", "Altra"),
        ("0x41", "0xd0c", "", "Neoverse N1", None),
        ("0x6d", "0xd49", "Microsoft Corporation", "Neoverse N2", "Cobalt 100"),
        ("0x41", "0xd49", "Alibaba Cloud", "Neoverse N2", "Yitian 710"),
        ("0xc0", "0xac4", "", "AmpereOne", "AmpereOne"),
        ("0x61", "0x033", "", "Apple M2", None),
        ("0x99", "0x123", "Amazon EC2", None, None),
    ],
)
def test_arm_cores_and_products(
    tmp_path: Path, implementer: str, part: str, sold_by: str, core: str | None, product: str | None
) -> None:
    files = write(tmp_path, {"/sys/class/dmi/id/sys_vendor": sold_by + "\n"})
    cpu = cpu_arm.arm_cpu({"CPU implementer": implementer, "CPU part": part}, files)
    assert (cpu.microarchitecture, cpu.product) == (core, product)


def test_products_that_name_themselves(tmp_path: Path) -> None:
    grace = write(tmp_path / "grace", {"/sys/devices/soc0/soc_id": "jep106:036b:0241\n"})
    assert cpu_arm.arm_cpu({"CPU implementer": "0x41", "CPU part": "0xd4f"}, grace).product == "Grace"
    oracle = write(
        tmp_path / "oracle",
        {"/sys/class/dmi/id/sys_vendor": "QEMU", "/sys/class/dmi/id/chassis_asset_tag": "OracleCloud.com"},
    )
    assert cpu_arm.arm_cpu({"CPU implementer": "0x41", "CPU part": "0xd0c"}, oracle).product == "Altra"


def test_arm_under_an_emulator_that_shows_the_hosts_cpuinfo(tmp_path: Path) -> None:
    """qemu-user does so: no Features line, but the auxiliary vector is the emulated kernel's."""
    vector = struct.pack("<QQQQQQ", 16, 1 << 1 | 1 << 8 | 1 << 20, 26, 1 << 14, 0, 0)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/auxv").write_bytes(vector + b"trailing")
    assert cpu_arm.arm_instruction_sets({"flags": "avx2"}, HostFiles(tmp_path)) == {"neon", "lse", "dotprod", "bf16"}


@pytest.mark.parametrize(
    ("family", "chip"),
    [(458787763, "Apple M1"), (-634136515, "Apple M2"), (1912690738, "Apple M3"), (1867590060, "Apple M4"), (1, None)],
)
def test_macs(family: int, chip: str | None) -> None:
    """The numbers are those that `sysctl hw.cpufamily` printed on such machines, signed as it prints them."""
    text = (
        f"hw.memsize: 17179869184\nhw.cputype: 16777228\nhw.cpufamily: {family}\nhw.physicalcpu: 8\nhw.logicalcpu: 8\n"
    )
    facts = macos.mac_facts(lambda command: text)
    assert facts is not None
    assert (facts.cpu.microarchitecture, len(facts.cores), facts.mps) == (chip, 8, True)


def test_an_intel_mac() -> None:
    text = "hw.memsize: 17179869184\nhw.cputype: 7\nhw.physicalcpu: 6\nhw.logicalcpu: 12\nhw.optional.avx2_0: 1\nhw.optional.avx1_0: 1\n"
    facts = macos.mac_facts(lambda command: text)
    assert facts is not None
    assert (facts.architecture, facts.mps, facts.isa) == ("x86_64", False, {"avx2", "avx"})
    assert [core.cpu_ids for core in facts.cores][:2] == [(0, 1), (2, 3)]


def test_neither_linux_nor_mac(tmp_path: Path) -> None:
    facts = probe(tmp_path, silent)
    assert (facts.os, facts.architecture) == (sys.platform, "unknown")
    assert facts.cores


def test_a_container_without_sysfs(tmp_path: Path) -> None:
    blocks = "".join(f"processor\t: {n}\nflags\t\t: avx2\n\n" for n in range(3))
    write(tmp_path, {"/proc/cpuinfo": blocks, "/proc/meminfo": "MemTotal: 8 kB\nMemFree: 2 kB\nCached: 1 kB\n"})
    facts = probe(tmp_path, silent)
    assert [core.cpu_ids for core in facts.cores] == [(0,), (1,), (2,)]
    assert (facts.available_bytes, facts.numa_nodes, facts.caches, facts.cuda) == (3072, (), (), ())


@pytest.mark.parametrize(
    ("mode", "meminfo", "left"),
    [
        ("2", "CommitLimit: 12 kB\nCommitted_AS: 5 kB", 7 * 1024),
        ("2", "CommitLimit: 5 kB\nCommitted_AS: 12 kB", 0),
        ("2", "MemTotal: 9 kB", None),
        ("0", "CommitLimit: 12 kB\nCommitted_AS: 5 kB", None),
        ("1", "CommitLimit: 12 kB\nCommitted_AS: 5 kB", None),
    ],
)
def test_what_strict_overcommit_leaves(tmp_path: Path, mode: str, meminfo: str, left: int | None) -> None:
    files = {
        "/proc/sys/vm/overcommit_memory": f"{mode}\n",
        "/proc/meminfo": meminfo,
        "/proc/self/status": "Mems_allowed_list:\t0-1,3",
    }
    write(tmp_path, {"/proc/cpuinfo": "processor: 0", "/sys/devices/system/cpu/online": "0", **files})
    facts = probe(tmp_path, silent)
    assert (facts.commit_left_bytes, facts.memory_node_ids) == (left, (0, 1, 3))


def test_two_kinds_of_core(tmp_path: Path) -> None:
    arm = {
        f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "1024" if n in (0, 3) else "980" if n == 1 else "718"
        for n in range(4)
    }
    kinds = [
        core.kind
        for core in topology.physical_cores(
            write(tmp_path / "arm", {"/sys/devices/system/cpu/online": "0-3", **arm}), ()
        )
    ]
    assert kinds == ["performance", "performance", "efficiency", "performance"]
    intel = {
        "/sys/devices/system/cpu/online": "0-5",
        "/sys/devices/cpu_atom/cpus": "4-5",
        "/sys/devices/cpu_core/cpus": "0-3",
    }
    assert [core.kind for core in topology.physical_cores(write(tmp_path / "intel", intel), ())] == [
        "performance"
    ] * 4 + ["efficiency"] * 2
    three = {**intel, "/sys/devices/cpu_atom/cpus": "4", "/sys/devices/cpu_lowpower/cpus": "5"}
    found = topology.physical_cores(write(tmp_path / "three", three), ())
    assert [core.kind for core in found] == ["performance"] * 4 + ["efficiency"] * 2


def test_the_core_that_computes_gives_its_name(tmp_path: Path) -> None:
    """An Arm machine whose first CPU is a small core: the order of NVIDIA's GB10 and of most phones."""
    block = "processor\t: {n}\nFeatures\t: asimd atomics\nCPU implementer\t: 0x41\nCPU part\t: {part}\n\n"
    files = {"/proc/cpuinfo": "".join(block.format(n=n, part="0xd87" if n < 2 else "0xd85") for n in range(4))}
    files |= {f"/sys/devices/system/cpu/cpu{n}/cpu_capacity": "718" if n < 2 else "1024" for n in range(4)}
    write(tmp_path, {"/sys/devices/system/cpu/online": "0-3", **files})
    assert probe(tmp_path, silent).cpu.microarchitecture == "Cortex-X925"


def test_a_sibling_that_is_offline_is_not_there(tmp_path: Path) -> None:
    files = write(
        tmp_path, {"/sys/devices/system/cpu/online": "0", "/sys/devices/system/cpu/cpu0/topology/core_cpus_list": "0-1"}
    )
    assert [core.cpu_ids for core in topology.physical_cores(files, ())] == [(0,)]


def test_commands_that_are_not_there_or_fail() -> None:
    assert run_command(["no-such-command-anywhere"]) is None
    assert run_command(["sh", "-c", "echo 1; exit 3"]) is None
    assert run_command(["sh", "-c", "echo 1"]) == "1\n"


def test_torch_is_read_without_importing_it(tmp_path: Path) -> None:
    header = "#define AT_MKLDNN_ENABLED() 1\n#define AT_MKLDNN_ACL_ENABLED() 1\n#define AT_KLEIDIAI_ENABLED() 0\n"
    write(
        tmp_path,
        {"version.py": "__version__ = '2.10.0+cpu'\ncuda: Optional[str] = None\n", "include/ATen/Config.h": header},
    )
    build = software.read_torch_build(tmp_path)
    assert build is not None
    assert (build.version, build.cuda, build.onednn, build.acl, build.kleidiai, build.mkl) == (
        "2.10.0+cpu",
        None,
        True,
        True,
        False,
        None,
    )
    assert software.read_torch_build(tmp_path / "nowhere") is None


def test_this_machine_is_probed_and_planned_without_torch(root: Path) -> None:
    program = (
        "import sys; from app.hardware.plan.plan import make_plan; "
        "from app.hardware.probe.probe import probe; from app.settings import Settings\n"
        "facts = probe(); import app.cli.tables\n"
        "recipes = [('cpu', facts.architecture, name) for name in ('fp32', 'bf16')]\n"
        "plan = make_plan(facts, None, Settings(), None, recipes)\n"
        "assert facts.torch and plan.cpu.threads >= 1 and facts.memory_bytes > 0\n"
        "loaded = [name for name in sys.modules if name.partition('.')[0] in ('torch', 'numpy')]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", program], cwd=root, check=True, timeout=60)


@given(st.sets(st.integers(0, 300)))
def test_cpu_lists(cpus: set[int]) -> None:
    assert parse_cpu_list(",".join(str(cpu) for cpu in cpus)) == tuple(sorted(cpus))


@given(st.text(max_size=50))
def test_nonsense_is_nothing(text: str) -> None:
    parse_cpu_list(text)
    parse_fields(text)
    size = parse_size(text)
    assert size is None or size >= 0


@pytest.mark.parametrize(
    ("text", "size"), [("32K", 32768), ("16384 kB", 2**24), ("1M", 2**20), ("7", 7), ("", None), ("many", None)]
)
def test_sizes(text: str, size: int | None) -> None:
    assert parse_size(text) == size
