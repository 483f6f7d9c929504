"""GPUs from nvidia-smi, the driver's files and a Mac: visible, hidden and partitioned ones."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from app.hardware.facts import CudaDevice, Facts
from app.hardware.probe import accelerators, macos
from app.hardware.probe.host_files import HostFiles

MIB = 2**20
LINE = "{}, NVIDIA L4, 8.9, 23034, 22000, GPU-{}{}-11ee, 580.65.06, [N/A]\n"
Recorded = Callable[[str], Facts]


def silent(command: list[str]) -> str | None:
    return None


def seen(tmp_path: Path, query: str, listed: str = "", visible: str | None = None) -> tuple[CudaDevice, ...]:
    return accelerators.cuda_devices(
        HostFiles(tmp_path), lambda command: listed if command == accelerators.GPU_LIST else query, visible
    )


def test_an_h200_and_what_somebody_else_holds_of_it(recorded: Recorded) -> None:
    (gpu,) = recorded("h200").cuda
    assert (gpu.index, gpu.name, gpu.capability, gpu.mig) == (0, "NVIDIA H200", (9, 0), None)
    assert (gpu.memory_bytes, gpu.free_bytes) == (143771 * MIB, (143771 - 16057) * MIB)
    assert (gpu.driver, gpu.uuid) == ("580.65.06", "GPU-0a1b2c3d-1111-2222-3333-444444444444")


def test_eight_h100(recorded: Recorded) -> None:
    devices = recorded("h100").cuda
    assert [device.index for device in devices] == list(range(8))
    assert {(device.name, device.capability, device.memory_bytes) for device in devices} == {
        ("NVIDIA H100 80GB HBM3", (9, 0), 81559 * MIB)
    }
    assert len({device.uuid for device in devices}) == 8


def test_memory_that_is_the_machines_is_reported_by_no_one(recorded: Recorded) -> None:
    (gpu,) = recorded("dgx-spark").cuda
    assert (gpu.name, gpu.capability, gpu.memory_bytes, gpu.free_bytes) == ("NVIDIA GB10", (12, 1), None, None)


def test_a_divided_gpu_stands_there_as_its_instances(recorded: Recorded) -> None:
    three, one, whole = recorded("h100-mig").cuda
    assert [gpu.index for gpu in (three, one, whole)] == [0, 0, 1]
    assert (three.name, three.mig, three.uuid) == (
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
        "3g.40gb",
        "MIG-5c89852c-d268-c3f3-1b07-005d5ae1dc3f",
    )
    assert one.memory_bytes == int(8.9 * 10**9), "less than any instance of that name has"
    assert (one.free_bytes, whole.mig, whole.free_bytes) == (None, None, 3000 * MIB)


def test_instances_stand_below_their_own_gpu(tmp_path: Path) -> None:
    query = "".join(f"{n}, A100, 8.0, 40960, 40000, GPU-{n}, 535.1, Enabled\n" for n in range(2))
    listed = "".join(
        f"GPU {n}: A100 (UUID: GPU-{n})\n  MIG {n + 1}g.5gb  Device  0: (UUID: MIG-{n})\n" for n in range(2)
    )
    assert [(gpu.index, gpu.mig, gpu.uuid) for gpu in seen(tmp_path, query, listed)] == [
        (0, "1g.5gb", "MIG-0"),
        (1, "2g.5gb", "MIG-1"),
    ]


def test_a_divided_gpu_without_instances_stays_and_says_so(tmp_path: Path) -> None:
    (gpu,) = seen(tmp_path, "0, A100, 8.0, 40960, 40000, GPU-1, 535.1, Enabled\n", "GPU 0: A100 (UUID: GPU-1)\n")
    assert (gpu.mig, gpu.uuid) == ("", "GPU-1")


def test_gpus_that_say_little(tmp_path: Path) -> None:
    told = "0, X, [N/A], 5, [Unknown Error], [N/A], [N/A], [N/A]\nno devices\n1, cut, short\n"
    assert accelerators.parse_gpu_query(told) == (CudaDevice(0, "X", memory_bytes=5 * MIB),)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information").write_text("Model: \t NVIDIA L4\nIRQ: 5\n")
    assert accelerators.cuda_devices(HostFiles(tmp_path), silent) == (CudaDevice(0, "NVIDIA L4"),)


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("-1", []),
        ("2, 0", [2, 0]),
        ("1,-1,2", [1]),
        ("1,7,2", [1]),
        ("GPU-4f2a1", [1]),
        ("GPU-4f2a2,0", [2, 0]),
        ("GPU-unknown,0", []),
    ],
)
def test_gpus_that_are_hidden(tmp_path: Path, visible: str | None, indices: list[int]) -> None:
    query = "".join(LINE.format(index, "4f2a", index) for index in range(3))
    assert [device.index for device in seen(tmp_path, query, visible=visible)] == indices


def test_one_instance_that_is_shown(tmp_path: Path) -> None:
    listed = "GPU 0: A100 (UUID: GPU-1)\n" + "".join(f"  MIG 1g.5gb  Device  {n}: (UUID: MIG-{n})\n" for n in range(3))
    found = seen(tmp_path, "0, A100, 8.0, 40960, 40000, GPU-1, 535.1, Enabled\n", listed, "MIG-1")
    assert [gpu.uuid for gpu in found] == ["MIG-1"]


def test_what_a_mac_lets_its_gpu_hold(recorded: Recorded) -> None:
    assert (recorded("mac-m4-pro").mps, recorded("mac-m4-pro").mps_limit_bytes) == (True, None)
    text = "hw.memsize: 17179869184\nhw.cputype: 16777228\nhw.physicalcpu: 8\nhw.logicalcpu: 8\niogpu.wired_limit_mb: 12000\n"
    facts = macos.mac_facts(lambda command: text)
    assert facts is not None and facts.mps_limit_bytes == 12000 * MIB


def test_a_python_for_intel_on_apple_silicon() -> None:
    text = "hw.memsize: 17179869184\nhw.cputype: 7\nhw.physicalcpu: 8\nhw.logicalcpu: 8\nsysctl.proc_translated: 1\n"
    facts = macos.mac_facts(lambda command: text)
    assert facts is not None and (facts.architecture, facts.is_translated, facts.mps) == ("x86_64", True, False)
