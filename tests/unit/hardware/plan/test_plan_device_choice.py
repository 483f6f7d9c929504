"""Choice of the device: the fastest that is present, supported and suitable, with a reason for each other device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from app.errors import NoRecipe, PlanImpossible
from app.hardware.facts import CudaDevice, Facts, Needs, TorchBuild
from app.hardware.plan.plan import ServingPlan, make_plan
from app.settings import Settings
from planned_machines import GIB, ON_GPUS, RECIPES, machine, plan

Recorded = Callable[[str], Facts]
L4 = CudaDevice(0, "NVIDIA L4", (8, 9), 24 * GIB, 23 * GIB, "GPU-1", "580.65.06")


def chosen(facts: Facts, needs: Needs | None = None, **asked: Any) -> ServingPlan:
    return make_plan(facts, None, Settings(**asked), needs, ON_GPUS)


def with_gpu(**changes: Any) -> Facts:
    return machine(cuda=(dataclasses.replace(L4, **changes),))


@pytest.mark.parametrize(
    ("name", "device", "number", "words"),
    [
        ("h200", "cuda", 0, "1 × NVIDIA H200 is present and usable"),
        ("h100", "cuda", 2, "8 × NVIDIA H100 80GB HBM3 is present"),
        ("two-gpus", "cuda", 1, "is present and usable"),
        (
            "t4",
            "cpu",
            None,
            "1 × Tesla T4 is present, but its compute capability is 7.5, and 8.0 (Ampere) is the minimum.",
        ),
        ("dgx-spark", "cuda", 0, "1 × NVIDIA GB10 is present"),
        ("h100-mig", "cuda", 0, "is present"),
        ("mac-m1", "mps", None, "The Apple GPU (MPS) is present and usable."),
        ("mac-m2", "cpu", None, "this macOS (Darwin 21.6.0) is older than 14"),
        ("mac-m4-pro", "mps", None, "The Apple GPU (MPS) is present"),
        ("zen5-vm", "cpu", None, "No other device is present."),
    ],
)
def test_of_recorded_hosts(recorded: Recorded, name: str, device: str, number: int | None, words: str) -> None:
    found = chosen(recorded(name))
    assert (found.placement.device, found.placement.cuda_device) == (device, number)
    assert words in found.decisions["device"].reason


def test_the_gpu_with_the_most_free_memory_and_how_to_use_the_rest(recorded: Recorded) -> None:
    reason = chosen(recorded("h100")).decisions["cuda_device"].reason
    assert reason.startswith("Of 8 GPUs, the one with the most free memory (79.2 GiB).") and "data_parallel" in reason
    assert chosen(recorded("h200")).decisions["cuda_device"].reason == "The only one: NVIDIA H200 (124.7 GiB)."
    assert chosen(recorded("h100"), cuda_device=5).placement.cuda_device == 5


def test_the_process_sees_its_own_gpu_alone(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    two = chosen(recorded("two-gpus"), cache_dir="/somewhere").environment()
    assert two["CUDA_VISIBLE_DEVICES"] == "GPU-7518f6b0-991f-ce2b-3d37-c779130d3137"
    assert (two["CUDA_DEVICE_ORDER"], two["TRITON_CACHE_DIR"]) == ("PCI_BUS_ID", "/somewhere/triton")
    assert chosen(recorded("h100-mig")).environment()["CUDA_VISIBLE_DEVICES"].startswith("MIG-5c89")
    assert chosen(with_gpu(uuid=None)).environment()["CUDA_VISIBLE_DEVICES"] == "0"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert "TRITON_CACHE_DIR" not in chosen(recorded("two-gpus")).environment(), "who said it is obeyed"
    processor = chosen(recorded("two-gpus"), device="cpu").environment()
    assert not {"CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TRITON_CACHE_DIR"} & processor.keys()


def test_the_gpu_whose_joules_are_counted_and_whose_name_is_reported(recorded: Recorded) -> None:
    facts = dataclasses.replace(recorded("h100-mig"), cuda=tuple(reversed(recorded("h100-mig").cuda)))
    found = chosen(facts).gpu(facts)
    assert found is not None and (found.index, found.mig) == (0, "3g.40gb"), (
        "an instance shares its number with another"
    )
    second = chosen(recorded("h100"), cuda_device=6).gpu(recorded("h100"))
    assert second is not None and second.index == 6
    assert chosen(recorded("h100"), device="cpu").gpu(recorded("h100")) is None


def test_what_torch_lacks_on_a_mac_is_not_moved_to_the_processor(recorded: Recorded) -> None:
    assert chosen(recorded("mac-m4-pro")).environment()["PYTORCH_ENABLE_MPS_FALLBACK"] == "0"


# why it is not taken by itself, and what is said where it is asked for
PASSED_OVER: list[tuple[dict[str, Any], str]] = [
    ({"capability": (7, 5)}, "its compute capability is 7.5, and 8.0 (Ampere) is the minimum"),
    (
        {"capability": None},
        "its compute capability is unknown: nvidia-smi is missing or older than driver 510 (in a container NVIDIA_DRIVER",
    ),
    ({"mig": ""}, "it is partitioned by MIG and has no visible instance"),
]


@pytest.mark.parametrize(("changes", "words"), PASSED_OVER)
def test_gpus_that_nothing_can_be_served_on(changes: dict[str, Any], words: str) -> None:
    host = with_gpu(**changes)
    found = chosen(host).decisions["device"]
    assert (found.value, f"1 × NVIDIA L4 is present, but {words}" in found.reason) == ("cpu", True)
    for asked in ({"device": "cuda"}, {"device": "cuda", "cuda_device": 0}):
        with pytest.raises(PlanImpossible) as refused:
            chosen(host, **asked)
        assert words in refused.value.message and "device is cuda" in refused.value.message


def test_a_torch_without_cuda() -> None:
    host = dataclasses.replace(with_gpu(), torch=TorchBuild("2.13.0+cpu"))
    assert "the installed torch (2.13.0+cpu) was built without CUDA" in chosen(host).decisions["device"].reason
    with pytest.raises(
        PlanImpossible, match=r"device is cuda, but the installed torch \(2.13.0\+cpu\) was built without CUDA"
    ):
        chosen(host, device="cuda")
    assert chosen(dataclasses.replace(host, torch=TorchBuild("2.13.0+cu130", "13.0"))).placement.device == "cuda"


def test_a_driver_older_than_torchs_cuda_asks_for() -> None:
    built = TorchBuild("2.13.0+cu130", "13.0")
    host = dataclasses.replace(with_gpu(driver="570.86.15"), torch=built)
    found = chosen(host).decisions["device"]
    assert (
        found.value,
        "its driver (570.86.15) is older than the 580 that torch for CUDA 13.0 needs" in found.reason,
    ) == (
        "cpu",
        True,
    )
    forced = chosen(host, device="cuda").decisions["device"]
    assert (forced.value, "compatibility libraries" in forced.reason) == ("cuda", True), "those let an older driver do"
    assert chosen(dataclasses.replace(host, torch=TorchBuild("2.13.0+cu126", "12.6"))).placement.device == "cuda"
    unknown = dataclasses.replace(with_gpu(driver=None), torch=built)
    assert chosen(unknown).placement.device == "cuda", "what is not told refuses nothing"


def test_devices_that_are_here_but_not_built() -> None:
    with pytest.raises(NoRecipe, match="Serving on cuda is not supported yet"):
        plan(with_gpu(), device="cuda")
    assert (
        "NVIDIA L4 is present, but serving on it is not supported yet." in plan(with_gpu()).decisions["device"].reason
    )
    built = [*RECIPES, ("cuda", "x86_64", "bf16")]
    assert plan(with_gpu(), recipes=built).placement.device == "cuda"
    assert plan(with_gpu(), recipes=built, device="cpu").placement.device == "cpu"
    assert plan(machine(), recipes=built).placement.device == "cpu"


@pytest.mark.parametrize(
    ("facts", "asked", "words"),
    [
        (
            machine(),
            {"device": "cuda"},
            "neither nvidia-smi nor /proc/driver/nvidia lists a GPU. Check that the driver is installed and "
            "that CUDA_VISIBLE_DEVICES hides no GPU.",
        ),
        (machine(), {"device": "mps"}, "this is no Apple silicon Mac"),
        (
            machine(),
            {"cuda_device": 0},
            "cuda_device is 0, but device is cpu: No other device is present. Leave cuda_device at auto",
        ),
        (with_gpu(), {"cuda_device": 1}, "cuda_device is 1, but the GPUs of this machine are: 0"),
        (with_gpu(), {"cuda_device": 0, "device": "cpu"}, "cuda_device is 0, but device is cpu: Asked for"),
        (machine(is_translated=True), {}, "runs by Rosetta"),
    ],
)
def test_what_is_asked_and_cannot_be(facts: Facts, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanImpossible) as refused:
        chosen(facts, **asked)
    assert words in refused.value.message


def test_an_old_gpu_that_is_asked_for_beside_a_suited_one(recorded: Recorded) -> None:
    with pytest.raises(PlanImpossible, match=r"cuda_device is 0 \(NVIDIA TITAN V\), but its compute capability is 7.0"):
        chosen(recorded("two-gpus"), cuda_device=0)


def test_exported_programs_are_served_on_processors(recorded: Recorded, llama_1b: Needs) -> None:
    program = dataclasses.replace(llama_1b, kind="program", kv_elements_per_token=0, bytes_by_precision={"fp32": 10**9})
    found = chosen(recorded("h200"), program).decisions["device"]
    assert (found.value, "but exported programs are served on processors" in found.reason) == ("cpu", True)
    for name, kind in (("h200", "cuda"), ("mac-m4-pro", "mps")):
        with pytest.raises(PlanImpossible, match=f"device is {kind}, but exported programs are served on processors"):
            chosen(recorded(name), program, device=kind)


def test_experts_are_served_on_an_nvidia_gpu_in_16_bits(recorded: Recorded, llama_1b: Needs) -> None:
    experts = dataclasses.replace(llama_1b, expert_weights=10**8, expert_use=0.25)
    found = chosen(recorded("h200"), experts).decisions
    assert (found["device"].value, found["precision"].value) == ("cuda", "bf16")
    with pytest.raises(NoRecipe, match="Precision int4 on cuda"):
        chosen(recorded("h200"), experts, device="cuda", precision="int4")
    with pytest.raises(PlanImpossible, match="experts are served on processors and NVIDIA GPUs"):
        chosen(recorded("mac-m4-pro"), experts, device="mps")


@pytest.mark.parametrize(
    ("asked", "error", "words"),
    [
        ({"deterministic": "on", "precision": "int8"}, NoRecipe, "Precision int8 on cuda"),
        ({"precision": "int8"}, NoRecipe, "Precision int8 on cuda"),
        ({"precision": "fp16"}, NoRecipe, "Precision fp16 on cuda"),
        ({"int8_copy": "on", "precision": "int4"}, PlanImpossible, "int8_copy is on, but on cuda"),
        ({"deterministic": "on"}, PlanImpossible, "deterministic is on, but on a GPU"),
    ],
)
def test_what_a_gpu_cannot_do_is_refused_there_or_done_by_the_processor(
    recorded: Recorded, llama_1b: Needs, asked: dict[str, Any], error: type[Exception], words: str
) -> None:
    """Who asks for the device is refused; who leaves it to us gets the device that can, and is told."""
    for insisted in ({"device": "cuda"}, {"cuda_device": 0}):
        with pytest.raises(error, match=words):
            chosen(recorded("h200"), llama_1b, **asked, **insisted)
    if (
        asked.get("precision") == "fp16" or asked.get("deterministic") == "on"
    ):  # the processor cannot either, without our kernels
        with pytest.raises(error, match=words):
            chosen(recorded("h200"), llama_1b, **asked)
    else:
        found = chosen(recorded("h200"), llama_1b, **asked).decisions["device"]
        assert found.value == "cpu" and found.reason.startswith(
            "NVIDIA H200 is present, but cannot serve these settings. "
        )
        assert words.split(",")[0] in found.reason


def test_a_gpu_without_room_leaves_the_model_to_the_processor(recorded: Recorded, llama_1b: Needs) -> None:
    full = dataclasses.replace(recorded("h200").cuda[0], free_bytes=GIB)
    host = dataclasses.replace(recorded("h200"), cuda=(full,))
    found = chosen(host, llama_1b).decisions["device"]
    assert (
        found.value == "cpu"
        and "The model does not fit" in found.reason
        and "free of 140.4 GiB on NVIDIA H200" in found.reason
    )
    with pytest.raises(PlanImpossible, match=r"free of 140\.4 GiB on NVIDIA H200"):
        chosen(host, llama_1b, device="cuda")
