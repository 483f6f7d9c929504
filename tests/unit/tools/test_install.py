"""The build of torch for a machine, the time limit of a silent index, and a machine without ensurepip."""

from __future__ import annotations

import importlib.util
import io
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
from tools.progress import Failed, Phase, Progress

PHASE = Phase("packages")


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


@pytest.mark.cases(test=1)
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
    with pytest.raises(Failed, match="Intel Macs"):
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
    without_network(monkeypatch)
    assert install.main([str(tmp_path / "venv"), "runtime"]) == 1
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"sudo apt install python{version}-venv" in capsys.readouterr().err
    assert not (tmp_path / "venv").exists()


def without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No index, no uv, no compiler."""
    monkeypatch.setattr(install, "cpu_index_answers", lambda: False)
    monkeypatch.setattr(
        install.shutil, "which", lambda name: f"/usr/bin/{name}" if name in ("cmake", "ninja") else None
    )
    monkeypatch.setattr(install, "build_tools", list)
    monkeypatch.setattr(install.native, "make", lambda *_: None)


class Recorded:
    """Commands in place of pip and uv; those that contain a word of `failing` fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *failing: str) -> None:
        self.commands: list[list[str]] = []
        self.torch: list[str] = []
        self._failing = set(failing)
        monkeypatch.setattr(Progress, "run", lambda _, phase, command, environment=None: self.run(command))

    def run(self, command: list[str]) -> list[str]:
        self.commands.append([str(word) for word in command])
        self.torch += [Path(word).read_text() for word in self.commands[-1] if word.endswith("torch.txt")]
        if self._failing & set(self.commands[-1]):
            raise Failed("pip: it ended with status 1; see its output above.")
        return []


@pytest.fixture
def quiet() -> Progress:
    return Progress(4, io.StringIO())


@pytest.mark.parametrize(
    "kind, requirement, stamps, resolves",
    [
        ("runtime", install.TORCH_ARM_LINUX, 1, False),
        ("runtime", install.TORCH_CPU, 1, False),
        ("runtime", install.TORCH, 1, sys.platform == "linux"),
        ("bench", install.TORCH_CPU, 2, True),
        ("dev", install.TORCH_CPU, 3, True),
    ],
)
def test_torch_and_the_pins_by_hash_then_what_has_no_hashes_and_the_project(
    kind: str, requirement: str, stamps: int, resolves: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_network(monkeypatch)
    ran = Recorded(monkeypatch)
    monkeypatch.setattr(install, "make_venv", lambda venv, progress, phase: installer(tmp_path, progress))
    monkeypatch.setattr(install, "choose_torch", lambda *_: (requirement, [], "a test"))
    assert install.main([str(tmp_path), kind]) == 0
    first, second, *others, project = ran.commands  # torch and the pins are installed at the same time
    torch, hashed = sorted((first, second), key=lambda command: not command[-1].endswith("torch.txt"))
    assert "--require-hashes" in torch and "--require-hashes" in hashed
    assert [text.split()[0] for text in ran.torch] == [requirement]
    assert hashed[-1].endswith("requirements/runtime-hashes.txt")
    assert [command[-1].endswith(f"requirements/{kind}.txt") for command in others] == [True] * resolves
    assert project[-2:] == ["-e", str(install.ROOT)]
    assert {path.stem for path in tmp_path.glob("*.stamp")} == set(("runtime", "bench", "dev")[:stamps])


def installer(venv: Path, progress: Progress, uv: str | None = None) -> install.Installer:
    return install.Installer(venv / "bin" / "python", uv, progress)


def test_pip_installs_the_package_that_uv_does_not_find(
    tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Recorded(monkeypatch, "uv-has-no-torch")
    by = installer(tmp_path, quiet, "uv")
    monkeypatch.setattr(install, "pip_options", lambda python: [])
    by.install(PHASE, "torch", alone=True)
    assert [command[0] for command in ran.commands] == ["uv"]
    with pytest.raises(Failed):
        by.install(PHASE, "uv-has-no-torch", alone=True)
    assert [command[0] for command in ran.commands[1:]] == ["uv", str(by.python)]
    by.install(PHASE, "others")
    assert ran.commands[-1][0] == "uv", "one package that uv lacks is no reason to leave it"


def test_pip_installs_everything_else_where_uv_fails(
    tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Recorded(monkeypatch, "--index-strategy=unsafe-best-match")
    by = installer(tmp_path, quiet, "uv")
    by.install(PHASE, "a")
    by.install(PHASE, "b")
    assert [command[0] for command in ran.commands] == ["uv", str(by.python), str(by.python)]


def test_an_environment_of_the_former_name_loses_it(
    tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = Recorded(monkeypatch)
    (tmp_path / "lib/python3.11/site-packages/armature_serve-0.9.0.dist-info").mkdir(parents=True)
    install.install_project(installer(tmp_path, quiet), PHASE)
    assert len(ran.commands) == 1
    (tmp_path / "lib/python3.11/site-packages/armature-0.8.0.dist-info").mkdir()
    install.install_project(installer(tmp_path, quiet), PHASE)
    assert ran.commands[1][-2:] == ["-y", "armature"]


@pytest.mark.parametrize(("version", "raw"), [("23.0.1", False), ("24.1", True), ("26.2.1", True)])
def test_a_pip_that_can_says_how_much_of_a_file_it_has(version: str, raw: bool, tmp_path: Path) -> None:
    (tmp_path / f"lib/python3.11/site-packages/pip-{version}.dist-info").mkdir(parents=True)
    assert ("--progress-bar=raw" in install.pip_options(tmp_path / "bin" / "python")) == raw


@pytest.mark.cases(ci=1)
@pytest.mark.full
@pytest.mark.parametrize("found", [True, False])
def test_an_environment_has_pip(found: bool, tmp_path: Path, quiet: Progress, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where this Python's wheel of pip is not where it is looked for."""
    monkeypatch.setattr(install.shutil, "which", lambda name: None)
    if not found:
        monkeypatch.setattr(install, "pip_wheel", lambda: None)
    assert (install.pip_wheel() is None) != found
    made = install.make_venv(tmp_path / "venv", quiet, PHASE)
    assert install.succeeds([made.python, "-m", "pip", "--version"])
    assert install.make_venv(tmp_path / "venv", quiet, PHASE) == made, "it is complete"


def test_a_failed_install_leaves_no_stamp(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_network(monkeypatch)
    Recorded(monkeypatch, "--require-hashes")
    monkeypatch.setattr(install, "make_venv", lambda venv, progress, phase: installer(tmp_path, progress))
    monkeypatch.setattr(install, "choose_torch", lambda *_: (install.TORCH_CPU, [], "a test"))
    assert install.main([str(tmp_path), "runtime"]) == 1
    assert "ended with status 1" in capsys.readouterr().err
    assert list(tmp_path.glob("*.stamp")) == []


def test_an_interrupted_install_says_how_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    without_network(monkeypatch)
    monkeypatch.setattr(install, "make_venv", interrupt)
    assert install.main([str(tmp_path), "runtime"]) == 130
    assert "The same command goes on from here." in capsys.readouterr().err


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
        r"cmake_minimum_required\(VERSION (\d+)\.(\d+)", (root / "armature_kernels/csrc/CMakeLists.txt").read_text()
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
    everything = (
        runtime
        | pins(root, "bench.txt")
        | pins(root, "otel.txt")
        | pins(root, "transformers.txt")
        | pins(root, "dev.txt")
    )
    wanted = [(text, runtime) for text in project["dependencies"]]
    wanted += [(text, everything) for extra in project["optional-dependencies"].values() for text in extra]
    for text, pinned in wanted:
        requirement = Requirement(text)
        if requirement.name != project["name"]:
            assert requirement.specifier.contains(pinned[requirement.name]), text
    arm = install.TORCH_ARM_LINUX.split("==")[1]
    torch = next(Requirement(text) for text in project["dependencies"] if text.startswith("torch>"))
    assert torch.specifier.contains(arm)
