"""Probe of the machine: reads its facts, decides nothing, changes nothing and never imports torch.

All files are read below `root`, and other programs are called through `run`, so tests can probe recorded hosts.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

from app.hardware import accelerators, cgroup, cpu_arm, cpu_x86, macos, memory, native_library, power, topology, torch_build
from app.hardware.accelerators import Run
from app.hardware.facts import Core, Cpu, Facts
from app.hardware.files import Files, parse_cpu_list, parse_fields

_ARCHITECTURES = {"aarch64": "arm64", "arm64": "arm64", "x86_64": "x86_64", "AMD64": "x86_64"}
_COMMAND_SECONDS = 10.0  # nvidia-smi takes seconds if the driver has to wake the GPU


def run_command(command: list[str]) -> str | None:
    """Return the command's output; None if it is missing, fails or hangs.

    sysctl fails if one name is unknown but still prints the others, so its output is always returned.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout if done.returncode == 0 or command[0] == "sysctl" else None


def probe(
    root: Path = Path("/"), run: Run = run_command, affinity: tuple[int, ...] | None = None, torch_directory: Path | None = None
) -> Facts:
    """Return the facts of the machine below `root`.

    The installed torch and the native library are included for this machine, not for a recorded one. For a
    recorded host, `torch_directory` and `affinity` supply what its files do not.
    """
    files = Files(root)
    facts = _linux(files, run, affinity) if files.is_directory("/proc") else macos.facts(run) or _unknown()
    place = torch_build.installed_torch() if torch_directory is None and files.is_this_machine else torch_directory
    native = native_library.look() if files.is_this_machine else None
    return dataclasses.replace(facts, torch=torch_build.read(place) if place else None, native=native)


def _linux(files: Files, run: Run, affinity: tuple[int, ...] | None) -> Facts:
    nodes = topology.numa_nodes(files)
    cores = topology.cores(files, nodes)
    architecture = _architecture(files)
    cpu, isa = _cpu(files, architecture, cores)
    meminfo = memory.sizes(files)
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
        caches=topology.caches(files),
        affinity=allowed,
        cgroup=cgroup.read(files),
        memory_bytes=meminfo.get("MemTotal", 0),
        available_bytes=memory.available_bytes(meminfo),
        memory_node_ids=parse_cpu_list(status.get("Mems_allowed_list")),
        commit_left_bytes=memory.commit_left_bytes(files, meminfo),
        page_bytes=memory.page_bytes(files),
        huge_pages=memory.huge_pages(files, meminfo),
        cuda=accelerators.cuda_devices(files, run, os.environ.get("CUDA_VISIBLE_DEVICES") if files.is_this_machine else None),
        power=power.look(files),
    )


def _architecture(files: Files) -> str:
    """Return the architecture of the running kernel.

    A recorded host states it in /proc/sys/kernel/arch (Linux 6.1), else the format of its cpuinfo shows it.
    """
    stated = os.uname().machine if files.is_this_machine else files.text("/proc/sys/kernel/arch")
    if stated is None:
        stated = "aarch64" if "CPU implementer" in (files.text("/proc/cpuinfo") or "") else "x86_64"
    return _ARCHITECTURES.get(stated, stated)


def _cpu(files: Files, architecture: str, cores: tuple[Core, ...]) -> tuple[Cpu, frozenset[str]]:
    fields = _processor(files, cores)
    if architecture == "arm64":
        return cpu_arm.cpu(fields, files), cpu_arm.instruction_sets(fields, files)
    if architecture == "x86_64":
        return cpu_x86.cpu(fields), cpu_x86.instruction_sets(fields)
    return Cpu("unknown", architecture), frozenset()


def _processor(files: Files, cores: tuple[Core, ...]) -> dict[str, str]:
    """Return the /proc/cpuinfo block of the first performance core, because those cores compute."""
    wanted = next((core.cpu_ids[0] for core in cores if core.kind == "performance"), 0)
    blocks = [parse_fields(block) for block in re.split(r"\n\s*\n", files.text("/proc/cpuinfo") or "")]
    return next((block for block in blocks if block.get("processor") == str(wanted)), blocks[0])


def _unknown() -> Facts:
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
