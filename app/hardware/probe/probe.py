"""Probe of the machine: reads facts below `root` and through `run`, decides nothing, never imports torch."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from app.hardware import power, thermal_sensors
from app.hardware.facts import Core, Cpu, Facts
from app.hardware.probe import accelerators, cgroup, macos, software, topology
from app.hardware.probe import cpu as cpu_arm
from app.hardware.probe import cpu as cpu_x86
from app.hardware.probe import topology as memory
from app.hardware.probe.accelerators import CommandRunner
from app.hardware.probe.host_files import HostFiles, parse_cpu_list, parse_fields

_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x86_64", "AMD64": "x86_64"}
_COMMAND_SECONDS = 10.0  # nvidia-smi takes seconds if the driver has to wake the GPU


def run_command(command: list[str]) -> str | None:
    """Return the command's output, even if it fails, as sysctl does; None if it is missing or hangs."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 or command[0] == "sysctl" else None


def probe(
    root: Path = Path("/"),
    run: CommandRunner = run_command,
    affinity: tuple[int, ...] | None = None,
    torch_directory: Path | None = None,
) -> Facts:
    """Return the facts below `root`; `torch_directory` and `affinity` are for recorded hosts."""
    files = HostFiles(root)
    facts = _linux(files, run, affinity) if files.is_directory("/proc") else macos.mac_facts(run) or _unknown_facts()
    torch_path = software.installed_torch() if torch_directory is None and files.is_this_machine else torch_directory
    native = software.find_native_library() if files.is_this_machine else None
    return dataclasses.replace(
        facts, torch=software.read_torch_build(torch_path) if torch_path else None, native=native
    )


def _linux(files: HostFiles, run: CommandRunner, affinity: tuple[int, ...] | None) -> Facts:
    nodes = topology.numa_nodes(files)
    cores = topology.physical_cores(files, nodes)
    architecture = _architecture(files)
    cpu, isa = _cpu(files, architecture, cores)
    meminfo = memory.meminfo_bytes(files)
    memory_bytes = meminfo.get("MemTotal") or (memory.physical_bytes() if files.is_this_machine else 0)
    status = parse_fields(files.text("/proc/self/status"))
    allowed = affinity or parse_cpu_list(status.get("Cpus_allowed_list")) or topology.online_cpus(files)
    return Facts(
        os="linux",
        kernel=files.text("/proc/sys/kernel/osrelease") or "",
        architecture=architecture,
        cpu=cpu,
        isa=isa,
        sve_bits=cpu_arm.sve_bits(files, isa),
        cores=cores,
        numa_nodes=nodes,
        caches=topology.cpu_caches(files),
        affinity=allowed,
        cgroup=cgroup.read_cgroup(files),
        memory_bytes=memory_bytes,
        available_bytes=memory.meminfo_available_bytes(meminfo) or memory_bytes,
        memory_node_ids=parse_cpu_list(status.get("Mems_allowed_list")),
        commit_left_bytes=memory.commit_left_bytes(files, meminfo),
        page_bytes=memory.page_bytes(files),
        huge_pages=memory.huge_pages(files, meminfo),
        cuda=accelerators.cuda_devices(
            files, run, os.environ.get("CUDA_VISIBLE_DEVICES") if files.is_this_machine else None
        ),
        power=power.find_power_meter(files),
        thermal=thermal_sensors.find_thermal_sensors(files, cores),
    )


def _architecture(files: HostFiles) -> str:
    """Return the architecture from /proc/sys/kernel/arch (Linux 6.1), else the format of cpuinfo."""
    stated = os.uname().machine if files.is_this_machine else files.text("/proc/sys/kernel/arch")
    if stated is None:
        stated = "aarch64" if "CPU implementer" in (files.text("/proc/cpuinfo") or "") else "x86_64"
    return _ARCHITECTURES.get(stated, stated)


def _cpu(files: HostFiles, architecture: str, cores: tuple[Core, ...]) -> tuple[Cpu, frozenset[str]]:
    fields = _cpuinfo_block(files, cores)
    if architecture == "arm64":
        return cpu_arm.arm_cpu(fields, files), cpu_arm.arm_instruction_sets(fields, files)
    if architecture == "x86_64":
        return cpu_x86.x86_cpu(fields), cpu_x86.x86_instruction_sets(fields)
    return Cpu("unknown", architecture), frozenset()


def _cpuinfo_block(files: HostFiles, cores: tuple[Core, ...]) -> dict[str, str]:
    """Return the /proc/cpuinfo block of the first performance core, because those cores compute."""
    wanted = next((core.cpu_ids[0] for core in cores if core.kind == "performance"), 0)
    blocks = [parse_fields(block) for block in re.split(r"\n\s*\n", files.text("/proc/cpuinfo") or "")]
    return next((block for block in blocks if block.get("processor") == str(wanted)), blocks[0])


def _unknown_facts() -> Facts:
    """Return what Python knows about a system that is neither Linux nor macOS, so that the refusal can name it."""
    count = os.cpu_count() or 1
    return Facts(
        os=sys.platform,
        architecture="unknown",
        cpu=Cpu("unknown", "unknown"),
        cores=tuple(Core((cpu,)) for cpu in range(count)),
        memory_bytes=0,
        available_bytes=0,
        affinity=tuple(range(count)),
    )
