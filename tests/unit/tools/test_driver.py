"""The native library without Python: its own driver in C under sanitizers, and which objects hold which instructions."""

from __future__ import annotations

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.hardware.probe.probe import probe
from app.hardware.probe.software import available_levels

X86 = platform.machine() in ("x86_64", "AMD64")
pytestmark = [
    pytest.mark.skipif(
        sys.platform != "linux" or shutil.which(os.environ.get("CC", "gcc")) is None, reason="no GCC for Linux"
    ),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="there is no cmake on the PATH"),
]
needs_x86 = pytest.mark.skipif(not X86, reason="x86 alone")


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if name not in ("CC", "CFLAGS")} | {
        "OMP_WAIT_POLICY": "passive"
    }
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def built_driver(root: Path, folder: Path, *options: str) -> Path:
    """The sanitized driver, in a folder that the next run of the tests finds again: then little is left to compile."""
    configured = run("cmake", "-S", root / "armature_kernels/csrc", "-B", folder, "-DARMATURE_SANITIZE=ON", *options)
    assert configured.returncode == 0, configured.stderr
    compiled = run("cmake", "--build", folder, "--target", "driver", "--parallel", "2")
    assert compiled.returncode == 0, compiled.stdout + compiled.stderr
    return folder / "driver"


@pytest.fixture
def driver(root: Path, pytestconfig: pytest.Config) -> Path:
    """The driver with the levels that this processor runs: the others take minutes to compile, and would be skipped."""
    levels = ";".join(level for level in available_levels(probe()) if level != "portable")
    options = (f"-DARMATURE_ONLY_LEVELS={levels}",) if levels else ()
    return built_driver(root, pytestconfig.cache.mkdir("native-sanitized"), *options)


@pytest.mark.nightly
def test_every_level_is_proved_under_the_sanitizers(driver: Path) -> None:
    result = run(driver)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert re.search(r"^[1-9]\d* checks, 0 failures$", result.stdout, re.MULTILINE)
    assert "portable, 2 threads: products in powers of two, bit for bit: ok" in result.stdout
    refused = run(driver, "no-such-level")
    assert refused.returncode == 1
    assert "no level no-such-level" in refused.stdout


@pytest.mark.nightly
@needs_x86
def test_tile_registers_are_proved_without_them(root: Path, pytestconfig: pytest.Config) -> None:
    """In plain C, so that also the sanitizers see what a register reads and writes."""
    if "avx512_bf16" not in probe().isa:  # before a compilation of minutes
        pytest.skip("the rest of the level needs AVX-512 with BF16")
    options = ("-DARMATURE_EMULATE_AMX=ON", "-DARMATURE_ONLY_LEVELS=amx")
    emulating = built_driver(root, pytestconfig.cache.mkdir("native-emulated"), *options)
    result = run(emulating, "amx")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "amx, 2 threads: rows of bf16 times integer weights: ok (24)" in result.stdout


def mnemonics(command: str, folder: Path, target: Path) -> str:
    """What the compiler makes of one source with these flags, disassembled."""
    words = [
        "-O1" if word == "-O3" else word for word in shlex.split(command)
    ]  # quicker, and the flags are what matters
    words[words.index("-o") + 1] = str(target)
    compiled = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=False)
    assert compiled.returncode == 0, compiled.stderr
    return run("objdump", "-d", "--no-show-raw-insn", target).stdout


AVX = re.compile(r"\t(v(?!err|erw|erx)[a-z0-9]+ .*|.*%[yz]mm\d+.*)")


@pytest.mark.nightly
@needs_x86
@pytest.mark.skipif(shutil.which("objdump") is None, reason="there is no objdump")
def test_only_a_level_s_own_file_has_its_instructions(root: Path, tmp_path: Path) -> None:
    csrc = root / "armature_kernels/csrc"
    assert run("cmake", "-S", csrc, "-B", tmp_path / "build").returncode == 0
    texts: dict[Path, str] = {}  # of all parts of a source
    for entry in json.loads((tmp_path / "build/compile_commands.json").read_text()):
        source = Path(entry["file"])
        if source.parent == csrc or source.name in ("portable.c", "avx2.c"):
            made = mnemonics(entry["command"], Path(entry["directory"]), tmp_path / "object.o")
            texts[source] = texts.get(source, "") + made
    everywhere = [*csrc.glob("*.c"), csrc / "levels/portable.c"]
    assert len(everywhere) >= 3
    for source in everywhere:
        assert "ret" in texts[source]
        assert AVX.findall(texts[source])[:5] == [], f"{source.name} is met by every processor"
    text = texts[csrc / "levels/avx2.c"]
    assert AVX.search(text), "what is looked for would be found"
    assert re.findall(r"vpdpbusd.*|.*%zmm.*|.*%k[1-7].*|.*%ymm(?:1[6-9]|2\d|3[01]).*", text)[:5] == []
