"""The build of torch for a machine, the time limit of a silent index, and a machine without ensurepip."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import threading
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tools import install


def never() -> bool:
    raise AssertionError("the answer would not matter here")


@pytest.mark.parametrize(
    "machine, gpu, index, requirement, options",
    [
        (("Linux", "x86_64"), False, lambda: True, install.TORCH_CPU, ["--extra-index-url", install.CPU_INDEX]),
        (("Linux", "x86_64"), False, lambda: False, install.TORCH, []),
        (("Linux", "x86_64"), True, never, install.TORCH, []),
        (("Linux", "aarch64"), False, lambda: True, install.TORCH_CPU, ["--extra-index-url", install.CPU_INDEX]),
        (("Linux", "aarch64"), False, lambda: False, install.TORCH_ARM_LINUX, []),
        (("Linux", "aarch64"), True, never, install.TORCH, []),
        (("Darwin", "arm64"), False, never, install.TORCH, []),
    ],
)
def test_each_machine_gets_its_build(
    machine: tuple[str, str], gpu: bool, index: Any, requirement: str, options: list[str]
) -> None:
    assert install.choose_torch(*machine, gpu, index)[:2] == (requirement, options)


def test_a_cpu_build_in_a_local_folder_is_asked_for_by_name() -> None:
    """Both builds have allowed hashes, and pip takes the one whose hash an index names: gigabytes of CUDA."""
    machine = ("Linux", "x86_64", False)
    assert install.choose_torch(*machine, lambda: False, lambda: True)[:2] == (install.TORCH_CPU, [])
    assert install.choose_torch(*machine, lambda: False, lambda: False)[:2] == (install.TORCH, [])
    assert install.choose_torch("Linux", "x86_64", True, never, never)[0] == install.TORCH


@pytest.mark.parametrize(("requirement", "found"), [("a==1", True), ("a==2", False)])
def test_pip_finds_what_its_configuration_has(
    requirement: str, found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = "a-1.dist-info"
    with zipfile.ZipFile(tmp_path / "a-1-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{folder}/METADATA", "Metadata-Version: 2.1\nName: a\nVersion: 1\n")
        wheel.writestr(f"{folder}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{folder}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert install.pip_finds(Path(sys.executable), requirement) == found


def test_an_intel_mac_is_refused_with_a_reason() -> None:
    with pytest.raises(install.Refusal, match="Intel Macs"):
        install.choose_torch("Darwin", "x86_64", False, never)


def test_a_silent_index_costs_no_more_than_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()

    def hang(*_: Any, **__: Any) -> None:
        over.wait(60.0)
        raise OSError("nobody waits any more")

    monkeypatch.setattr(install, "INDEX_SECONDS", 0.05)
    monkeypatch.setattr(install.urllib.request, "urlopen", hang)
    assert install.cpu_index_answers() is False
    assert not over.is_set()
    over.set()


@pytest.mark.parametrize("error", [OSError("no route"), TimeoutError()])
def test_an_index_that_cannot_be_reached_does_not_answer(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(install.urllib.request, "urlopen", refuse)
    assert install.cpu_index_answers() is False


def test_without_ensurepip_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert install.main([str(tmp_path / "venv"), "runtime"]) == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"sudo apt install python{version}-venv" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


@pytest.mark.parametrize("kind, stamps", [("runtime", 1), ("bench", 2), ("dev", 3)])
def test_one_install_for_torch_and_pins_then_the_project_and_its_stamps(
    kind: str, stamps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(install, "make_venv", lambda venv: Path("python"))
    monkeypatch.setattr(install, "cpu_index_answers", lambda: False)
    torch: list[str] = []

    def pip(python: Path, *arguments: str) -> None:
        calls.append(arguments)
        torch.extend(Path(name).read_text() for name in arguments if name.endswith("torch.txt"))

    monkeypatch.setattr(install, "pip", pip)
    monkeypatch.setattr(install, "choose_torch", lambda *_: (install.TORCH_ARM_LINUX, [], "a test"))
    assert install.main([str(tmp_path), kind]) == 0
    assert "--require-hashes" in calls[0]
    assert any(argument.endswith("requirements/runtime-hashes.txt") for argument in calls[0])
    assert [text.split()[0] for text in torch] == [install.TORCH_ARM_LINUX]
    assert any(str(argument).endswith(f"requirements/{kind}.txt") for argument in calls[1])
    assert calls[2][-2:] == ("-e", str(install.ROOT))
    assert {path.stem for path in tmp_path.iterdir()} == set(("runtime", "bench", "dev")[:stamps])


def test_a_failed_install_leaves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = subprocess.CompletedProcess([], 1, stdout="")
    monkeypatch.setattr(install, "make_venv", lambda venv: Path("python"))
    monkeypatch.setattr(install, "cpu_index_answers", lambda: False)
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: failed)
    assert install.main([str(tmp_path), "runtime"]) == 1
    assert "pip could not install" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "present, version, fetched",
    [
        (("cmake", "ninja"), "3.25.1", False),
        (("cmake", "make"), "4.0", False),
        (("cmake", "make"), "3.18.4", True),
        (("cmake",), "3.25.1", True),
        (("make", "ninja"), "", True),
    ],
)
def test_cmake_is_fetched_where_the_machine_has_none_that_will_do(
    present: tuple[str, ...], version: str, fetched: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = subprocess.CompletedProcess([], 0, stdout=f"cmake version {version}\n")
    monkeypatch.setattr(install.shutil, "which", lambda name: name if name in present else None)
    monkeypatch.setattr(install.subprocess, "run", lambda *_, **__: said)
    assert install.build_tools() == (["-r", str(install.ROOT / "requirements" / "cmake.txt")] if fetched else [])


def test_what_fetches_cmake_and_what_wants_it_agree(root: Path) -> None:
    wanted = re.search(
        r"cmake_minimum_required\(VERSION (\d+)\.(\d+)", (root / "app/kernels/csrc/CMakeLists.txt").read_text()
    )
    assert wanted
    assert (int(wanted[1]), int(wanted[2])) == install.CMAKE
    assert pins(root, "cmake.txt").keys() == {"cmake", "ninja"}


def pins(root: Path, name: str) -> dict[str, str]:
    lines = (root / "requirements" / name).read_text().splitlines()
    return dict(line.partition(";")[0].split("==") for line in lines if re.match(r"[a-z]", line))


def test_what_serving_installs_has_hashes_for_every_python_and_platform(root: Path) -> None:
    lines = (root / "requirements/runtime-hashes.txt").read_text().splitlines()
    hashed = {line.split()[0]: line.split()[1:] for line in lines if re.match(r"[a-z]", line)}
    found = {name.partition("==")[0].replace("_", "-"): name.partition("==")[2] for name in hashed}
    assert found == pins(root, "runtime.txt")
    assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for hashes in hashed.values() for each in hashes)
    compiled = next(hashes for name, hashes in hashed.items() if name.startswith("numpy=="))
    assert len(compiled) >= 12, "four Pythons on three platforms"


def test_every_build_of_torch_has_hashes_and_they_agree_with_those_of_the_images(root: Path) -> None:
    chosen = {install.TORCH: 20, install.TORCH_CPU: 8, install.TORCH_ARM_LINUX: 4}  # of four Pythons on each platform
    lines = {requirement: install.torch_line(requirement).split()[1:] for requirement in chosen}
    for requirement, number in chosen.items():
        assert len(set(lines[requirement])) == number
        assert all(re.fullmatch("--hash=sha256:[0-9a-f]{64}", each) for each in lines[requirement])
    assert set(lines[install.TORCH_CPU]) < set(lines[install.TORCH])
    images = sorted((root / "requirements").glob("image-*.txt"))
    locked = [line.split() for path in images for line in path.read_text().splitlines() if line.startswith("torch=")]
    assert len(locked) == len(images) == 4
    for name, digest in locked:
        assert digest in lines[name.replace("===", "==")]


def test_the_pins_lie_within_the_ranges(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    runtime = pins(root, "runtime.txt") | dict([install.TORCH.split("==")])
    everything = runtime | pins(root, "bench.txt") | pins(root, "otel.txt") | pins(root, "dev.txt")
    wanted = [(text, runtime) for text in project["dependencies"]]
    wanted += [(text, everything) for extra in project["optional-dependencies"].values() for text in extra]
    for text, pinned in wanted:
        requirement = Requirement(text)
        if requirement.name != "armature":
            assert requirement.specifier.contains(pinned[requirement.name]), text
    arm = install.TORCH_ARM_LINUX.split("==")[1]
    torch = next(Requirement(text) for text in project["dependencies"] if text.startswith("torch>"))
    assert torch.specifier.contains(arm)
