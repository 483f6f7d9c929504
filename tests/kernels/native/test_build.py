"""Build and packaging of the native library: its levels, its wheel, and a machine that cannot build it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tools import wheels

CSRC = Path("armature_kernels/csrc")
# The virtual environment's cmake and ninja, where the machine has none.
PATH = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
CC = shutil.which(os.environ.get("CC", "gcc"))
MACHINE = platform.machine()

needs_cmake = pytest.mark.skipif(shutil.which("cmake", path=PATH) is None, reason="there is no cmake")
needs_gcc = pytest.mark.skipif(sys.platform != "linux" or CC is None, reason="there is no GCC for Linux")
pytestmark = needs_cmake


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = (
        {name: value for name, value in os.environ.items() if name not in ("CC", "CFLAGS", "CMAKE_ARGS")}
        | {"PATH": PATH}
        | environment
    )
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, stdin=subprocess.DEVNULL)


@pytest.fixture
def sources(root: Path, tmp_path: Path) -> Path:
    """A checkout's kernels, where a build may leave what it likes."""
    return Path(shutil.copytree(root / CSRC, tmp_path / CSRC))


def status(sources: Path, build: Path, *flags: str, **environment: str) -> str:
    """What cmake says of us; it must succeed."""
    result = run("cmake", "-S", sources, "-B", build, *flags, **environment)
    assert result.returncode == 0, result.stderr
    return "\n".join(line for line in result.stdout.splitlines() if line.startswith("-- Armature"))


def compiler(folder: Path, refuses: str) -> str:
    """GCC, but that it fails where one of its arguments is `refuses`."""
    path = folder / "gcc-that-refuses"
    path.write_text(f'#!/bin/sh\nfor each; do [ "$each" = {refuses} ] && exit 1; done\nexec {CC} "$@"\n')
    path.chmod(0o755)
    return str(path)


def test_without_a_compiler_cmake_succeeds_and_removes_a_library_of_other_sources(
    sources: Path, tmp_path: Path
) -> None:
    old = sources.parent / "libarmature.so"
    old.touch()
    said = status(sources, tmp_path / "build", "-DARMATURE_INPLACE=ON", CC="no-such-compiler")
    assert "no native library, since there is no working C compiler" in said
    assert "torch's own products will serve" in said
    assert run("cmake", "--build", tmp_path / "build").returncode == 0
    assert not old.exists()


@pytest.mark.nightly
@needs_gcc
def test_a_compiler_that_came_later_is_found(sources: Path, tmp_path: Path) -> None:
    assert "no native library" in status(sources, tmp_path / "build", CC="no-such-compiler")
    assert "native library for" in status(sources, tmp_path / "build", CC=str(CC))


@needs_gcc
def test_a_compiler_without_openmp_builds_no_library(sources: Path, tmp_path: Path) -> None:
    assert "cannot build with OpenMP" in status(sources, tmp_path / "build", CC=compiler(tmp_path, "-fopenmp"))


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("clang") is None, reason="there is no clang for Linux")
def test_clang_has_another_openmp_and_builds_no_library(sources: Path, tmp_path: Path) -> None:
    assert "only GCC speaks to torch's libgomp" in status(sources, tmp_path / "build", CC="clang")


@pytest.mark.nightly
@needs_gcc
@pytest.mark.skipif(MACHINE != "x86_64", reason="names a level of x86")
def test_a_level_is_left_out_that_the_compiler_does_not_know(sources: Path, tmp_path: Path) -> None:
    (sources / "levels" / "avxvnni.c").touch()
    said = status(sources, tmp_path / "old", CC=compiler(tmp_path, "-mavxvnni"))
    assert "without the level avxvnni" in said
    assert "avxvnni" not in said.splitlines()[-1]
    assert "avxvnni" in status(sources, tmp_path / "new", CC=str(CC)).splitlines()[-1]
    old, new = (commands(tmp_path / name) for name in ("old", "new"))
    assert not [file for file, _ in old if file.endswith("avxvnni.c")]
    assert not [command for _, command in old if "-DARMATURE_LEVEL_avxvnni=1" in command]
    assert [file for file, command in new if "-DARMATURE_LEVEL_avxvnni=1" in command] == ["dispatch.c"]


def commands(build: Path) -> list[tuple[str, str]]:
    """Source files and what each is compiled with; a level's file is compiled once for each part."""
    text = (build / "compile_commands.json").read_text()
    found = re.findall(r'"command": "(.*)",\s*"file": "(.*)"', text)
    return [(Path(file).name, command) for command, file in found]


@pytest.mark.full
@needs_gcc
def test_only_a_level_is_compiled_for_its_instructions(sources: Path, tmp_path: Path) -> None:
    status(sources, tmp_path / "build", CC=str(CC))
    found = commands(tmp_path / "build")
    assert "dispatch.c" in dict(found)
    parts = set(re.findall(r"defined\((PART_\w+)\)", (sources / "kernels.h").read_text()))
    assert {word for _, command in found for word in re.findall(r" -D(PART_\w+)", command)} == parts
    levels = {path.name for path in (sources / "levels").iterdir()}
    for file, command in found:
        assert not {"-march=native", "-ffast-math", "-Ofast"} & set(command.split()), file
        if file not in levels or file in ("portable.c", "neon.c"):
            assert not re.search(r" -m(avx|fma|arch)", command), file
        for flag in ("-O3", "-std=gnu11", "-fvisibility=hidden", "-fPIC", "-fopenmp"):
            assert flag in command.split(), (file, flag)


@needs_gcc
@pytest.mark.parametrize("compiled_for", ["here", "aarch64"])
def test_no_level_has_an_error(sources: Path, root: Path, tmp_path: Path, compiled_for: str) -> None:
    """`make native` compiles the levels of this processor alone, so another level's error would be seen late."""
    toolchain = root / "cmake/aarch64-linux-gnu.cmake"
    if compiled_for == "aarch64" and shutil.which("aarch64-linux-gnu-gcc") is None:
        pytest.skip("there is no cross compiler for 64-bit Arm")
    options = [f"-DCMAKE_TOOLCHAIN_FILE={toolchain}"] if compiled_for == "aarch64" else []
    status(sources, tmp_path / "build", *options, **({} if options else {"CC": str(CC)}))
    levels = {path.name for path in (sources / "levels").iterdir()}
    of_levels = [(file, command) for file, command in commands(tmp_path / "build") if file in levels]
    assert len(of_levels) >= 16
    for file, command in of_levels:
        flags = command.split(" -o ")[0].split()
        found = run(*flags, "-Werror", "-fsyntax-only", sources / "levels" / file)
        assert found.returncode == 0, found.stderr[:3000]


@needs_gcc
def test_a_level_shares_no_function_with_another(root: Path) -> None:
    """The linker keeps one of two functions with one name: were it the one with newer instructions, an old processor would meet them."""
    objects = list((root / "build/native/CMakeFiles").glob("part_*.dir/levels/*.o"))
    if not objects:
        pytest.skip("the library has not been built here: make native")
    for path in objects:
        names = re.findall(r" [A-TV-Zuvw] (\S+)$", run("nm", "--defined-only", path).stdout, re.MULTILINE)
        level = f"level_{path.name.split('.')[0]}"
        shared = [name for name in names if not name.startswith(".")]
        assert shared
        assert [name for name in shared if name != level and not name.startswith(f"{level}_")] == []


@needs_gcc
@pytest.mark.nightly
@pytest.mark.skipif(
    MACHINE != "x86_64" or shutil.which("qemu-x86_64") is None, reason="no qemu-x86_64 to be an old processor"
)
@pytest.mark.parametrize(
    ("processor", "level", "newer"), [("Nehalem", "portable", "avx2"), ("Haswell", "avx2", "avxvnni")]
)
def test_an_old_processor_meets_no_instruction_that_it_lacks(
    root: Path, processor: str, level: str, newer: str
) -> None:
    """The whole driver runs there, and the level is what that processor has."""
    build = root / "build" / "native"
    if not (build / "CMakeCache.txt").exists():
        pytest.skip("the library has not been built here: make native")
    made = run("cmake", "--build", build, "--target", "driver")
    assert made.returncode == 0, made.stdout
    assert run("qemu-x86_64", "-cpu", processor, build / "driver", "--level").stdout.split() == [level]
    result = run("qemu-x86_64", "-cpu", processor, build / "driver", "-2", level)
    assert result.returncode == 0, result.stdout
    refused = run("qemu-x86_64", "-cpu", processor, build / "driver", newer)
    assert refused.returncode == 1, "refused, not killed by an illegal instruction"
    assert f"no level {newer}" in refused.stdout


@needs_gcc
@pytest.mark.nightly
def test_a_wheel_holds_one_library_and_says_where_it_runs(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library is the one that `make native` compiled from the same sources, which takes minutes."""
    made = root / wheels.LIBRARY
    if not made.exists():
        pytest.skip("the library has not been built here: make native")
    monkeypatch.setenv("CMAKE_ARGS", f"-DARMATURE_LIBRARY={made}")
    wheel = wheels.build(MACHINE, cross=False, folder=tmp_path)
    assert re.fullmatch(rf"armature_serve-\S+-py3-none-manylinux_2_\d+_{MACHINE}\.whl", wheel.name)
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        library = Path(archive.extract(wheels.LIBRARY, tmp_path))
    assert not [name for name in names if "csrc" in name or "gomp" in name]
    assert {"app/py.typed", "app/demo/llama/model.safetensors"} <= set(names)
    needed, versions = wheels.needs(library)
    assert "libgomp.so.1" in needed
    assert max(versions["GLIBC"]) <= tuple(map(int, re.findall(r"manylinux_(\d+)_(\d+)", wheel.name)[0]))
    exported = re.findall(r" T (\S+)$", run("nm", "-D", "--defined-only", library).stdout, re.MULTILINE)
    assert exported
    assert [name for name in exported if not name.startswith("armature_")] == []


@needs_gcc
@pytest.mark.parametrize(
    "source, options, sentence",
    [
        ("", ["-lz"], r"needs \['libz.so.1'\]"),
        (
            "int f(void) {\n#pragma omp parallel\n{}\nreturn 0; }",
            ["-fopenmp"],
            "needs GOMP_4.0, newer than torch's libgomp",
        ),
    ],
)
def test_a_library_that_would_not_run_elsewhere_is_refused(
    source: str, options: list[str], sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "TORCH_GOMP", (3, 0))
    (tmp_path / "f.c").write_text(source)
    library = tmp_path / "lib.so"
    made = run(str(CC), "-shared", "-fPIC", "-Wl,--no-as-needed", "-o", library, tmp_path / "f.c", *options)
    if made.returncode != 0:
        pytest.skip(made.stderr)
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.write(library, wheels.LIBRARY)
    with pytest.raises(wheels.Unfit, match=sentence):
        wheels.platform_tag(tmp_path / "a.whl", MACHINE, tmp_path)


def test_a_wheel_with_two_libraries_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "a.whl", "w") as archive:
        archive.writestr(wheels.LIBRARY, "")
        archive.writestr("armature.libs/libgomp-24e2ab19.so.1", "")
    with pytest.raises(wheels.Unfit, match="no other library"):
        wheels.platform_tag(tmp_path / "a.whl", MACHINE, tmp_path)


@pytest.mark.nightly
def test_without_a_compiler_a_wheel_is_built_and_says_who_serves(root: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("cmake", "ninja", "make"):
        found = shutil.which(name, path=PATH)
        if found:
            (tools / name).symlink_to(found)
    command = (sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, root)
    result = run(*command, PATH=str(tools))
    assert result.returncode == 0, result.stderr
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert not [name for name in archive.namelist() if "libarmature" in name]
        archive.extractall(tmp_path / "installed")
    script = "from armature_kernels.native.library import native_library; print(native_library().reason)"
    # -P: not from the folder that this runs in, which has a library of its own.
    said = run(
        sys.executable,
        "-P",
        "-c",
        script,
        PATH=str(tools),
        PYTHONPATH=os.pathsep.join((str(tmp_path / "installed"), *sys.path)),
    )
    assert "torch's own products serve" in said.stdout, said.stderr


def test_cross_compiling_says_what_is_missing(root: Path, tmp_path: Path) -> None:
    for name in ("bash", "env", "dirname"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    result = run("bash", root / "tools" / "cross.sh", PATH=str(tmp_path))
    assert result.returncode == 1
    assert "sudo apt install cmake ninja-build gcc-aarch64-linux-gnu libc6-dev-arm64-cross" in result.stderr


@pytest.mark.nightly
@pytest.mark.skipif(shutil.which("aarch64-linux-gnu-gcc") is None, reason="there is no cross compiler for 64-bit Arm")
def test_the_library_for_64_bit_arm_is_built_here(root: Path) -> None:
    result = run(root / "tools" / "cross.sh")
    assert result.returncode == 0, result.stderr
    library = root / "build" / "aarch64" / "libarmature.so"
    head = library.read_bytes()[:20]
    assert head[:6] == b"\x7fELF\x02\x01"
    assert struct.unpack_from("<HH", head, 16) == (3, 183)  # a shared object, EM_AARCH64
    if shutil.which("file"):
        assert "ELF 64-bit LSB shared object, ARM aarch64" in run("file", library).stdout
    needed, versions = wheels.needs(library)
    assert needed <= wheels.MAY_NEED
    assert max(versions["GLIBC"]) <= (2, 28), "torch's own wheels ask for 2.28"
