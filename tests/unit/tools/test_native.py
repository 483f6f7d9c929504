"""When the native library is made again, and when one out of a wheel is used."""

from __future__ import annotations

import io
import platform
import re
import shutil
import zipfile
from pathlib import Path

import pytest

from tools import native
from tools.progress import Phase, Progress

MACHINE = platform.machine()
TAG = f"macosx_11_0_{MACHINE}" if platform.system() == "Darwin" else f"linux_{MACHINE}"


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkout's folder of kernels with two sources and no library."""
    folder = tmp_path / "kernels"
    (folder / "csrc" / "levels").mkdir(parents=True)
    (folder / "csrc" / "dispatch.c").write_text("int main;")
    (folder / "csrc" / "levels" / "avx2.c").write_text("int avx2;")
    monkeypatch.setattr(native, "KERNELS", folder)
    monkeypatch.setattr(native, "processor_levels", lambda: "avx2 portable")
    monkeypatch.delenv(native.WHEELS_VARIABLE, raising=False)
    return folder


def library(kernels: Path, made_for: str, sources: str | None = None) -> bytes:
    return f"\0\0armature build: {sources or native.digest(kernels / 'csrc')} {made_for};\0".encode()


@pytest.mark.parametrize(
    ("made_for", "wanted", "current"),
    [
        ("all", "here", True),
        ("all", "all", True),
        ("here avx2 portable", "here", True),
        ("here avx2 portable", "all", False),
        ("here avx512 avx2 portable", "here", False),
        ("avx2", "avx2", True),
        ("avx2", "here", False),
    ],
)
def test_a_library_serves_for_the_processors_that_it_was_made_for(
    made_for: str, wanted: str, current: bool, kernels: Path
) -> None:
    assert not native.is_current(wanted), "there is none"
    native.library_path().write_bytes(library(kernels, made_for))
    assert native.is_current(wanted) == current


@pytest.mark.parametrize(
    ("runs", "made"),
    [("avx512 avx2 portable", "avx512 avx2"), ("avx2 portable", "here"), ("portable", "all"), ("", "all")],
)
def test_usable_levels_are_what_the_processor_runs(runs: str, made: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "processor_levels", lambda: runs)
    assert native.usable_levels() == made


@pytest.mark.parametrize("changed", ["dispatch.c", "levels/avx2.c", "new.h"])
def test_a_library_of_other_sources_is_made_again(changed: str, kernels: Path) -> None:
    native.library_path().write_bytes(library(kernels, "all"))
    assert native.is_current("all")
    (kernels / "csrc" / changed).write_text("int other;")
    assert not native.is_current("all")


def test_a_library_that_does_not_say_what_it_was_made_of_is_made_again(kernels: Path) -> None:
    native.library_path().write_bytes(b"armature levels: avx2;")
    assert not native.is_current("here")


def test_the_processor_is_asked_with_the_program_that_the_build_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "BUILD", tmp_path)
    assert native.processor_levels() == ""
    program = tmp_path / "processor-levels"
    program.write_text("#!/bin/sh\necho avx2 portable\n")
    program.chmod(0o755)
    assert native.processor_levels() == "avx2 portable"


def wheel(folder: Path, content: bytes, tag: str = TAG) -> Path:
    path = folder / f"armature_serve-9-py3-none-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"armature_kernels/{native.library_path().name}", content)
    return path


def test_a_library_of_these_sources_is_taken_out_of_a_wheel(
    kernels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = library(kernels, "all")
    wheel(tmp_path, made)
    monkeypatch.setenv(native.WHEELS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(native, "compile_library", lambda *_: pytest.fail("there is one"))
    log = io.StringIO()
    with Progress(1, log) as progress:
        native.make("here", progress, tmp_path)
    assert native.library_path().read_bytes() == made
    assert "from armature_serve-9-py3-none-" in log.getvalue()


@pytest.mark.parametrize(
    ("sources", "made_for", "tag", "reason"),
    [
        ("0" * 64, "all", TAG, "made of other sources"),
        (None, "here avx2 portable", TAG, "only for the processor that it was compiled on"),
        (None, "all", "manylinux_2_17_riscv64", "for another platform"),
        ("", "all", TAG, "without a library that names its sources"),
        (None, None, TAG, "no wheel of armature-serve"),
    ],
)
def test_any_other_wheel_is_refused_with_the_reason_and_the_library_compiled(
    sources: str | None, made_for: str | None, tag: str, reason: str, kernels: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if made_for:
        wheel(tmp_path, library(kernels, made_for, sources) if sources != "" else b"", tag)
    monkeypatch.setenv(native.WHEELS_VARIABLE, str(tmp_path))
    monkeypatch.setattr(native, "compile_library", lambda *_: "compiled")
    log = io.StringIO()
    with Progress(1, log) as progress:
        native.make("here", progress, tmp_path)
    assert reason in log.getvalue()
    assert log.getvalue().splitlines()[-1].endswith("compiled")
    assert not native.library_path().exists()


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="names versions of glibc")
def test_a_wheel_runs_where_the_c_library_is_as_new() -> None:
    assert native.fits(f"manylinux_2_17_{MACHINE}")
    assert not native.fits(f"manylinux_2_999_{MACHINE}")
    assert not native.fits("manylinux_2_17_other")


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("cmake") is None, reason="needs GCC and cmake")
def test_cmake_computes_the_same_digest_and_compiles_this_processor_s_level_alone(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only configured: compiling takes a minute."""
    monkeypatch.setattr(native, "KERNELS", root / "armature_kernels")
    with Progress(1, io.StringIO()) as progress:
        options = ["-S", str(root / "armature_kernels/csrc"), "-B", str(tmp_path), "-DARMATURE_ONLY_LEVELS=here"]
        (said,) = [line for line in progress.run(Phase("configure"), ["cmake", *options]) if "-- Armature" in line]
    monkeypatch.setattr(native, "BUILD", tmp_path)
    levels = native.processor_levels().split()
    assert said.endswith(f"with the levels {levels[0]}")
    commands = (tmp_path / "compile_commands.json").read_text()
    (made,) = set(re.findall(r"ARMATURE_BUILD=[\\\"]*([0-9a-f]{64} here [a-z0-9 ]+)", commands))
    assert made == f"{native.digest(root / 'armature_kernels/csrc')} here {' '.join(levels)}"
