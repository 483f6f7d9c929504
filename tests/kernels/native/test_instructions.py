"""Instructions that the documentation names: each level of the library has its own, and none that another level adds.

docs/kernels.md has the only table of them. What other pages name must be in the library or be said not to be used.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from armature_kernels.native.library import LIBRARY_PATH

ROOT = Path(__file__).resolve().parents[3]
KERNELS = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<level>\w+)` \| (?P<text>[^|]+) \| [^|]+ \|$", re.MULTILINE)
# Names of multiplying instructions as the pages write them.
NAME = re.compile(
    r"\b(?:VPDP[A-Z]+|VPMADDUBSW|VDPBF16PS|TDPB[A-Z0-9]+|BFMMLA|BFDOT|[SU]S?MMLA|[SU]S?DOT|[SU]MULL|FMLA)\b"
)
TABLE = dict(ROW.findall(KERNELS.split("## Levels")[1].split("\n## ")[0]))
ARM = ("i8mm", "dotprod", "neon")
X86 = tuple(level for level in TABLE if level not in (*ARM, "portable"))
NOT_USED = "tried and rejected"
CROSS = shutil.which("aarch64-linux-gnu-gcc")

pytestmark = pytest.mark.nightly


def claimed(level: str) -> set[str]:
    """The instructions that the table names for a level, and those of the level that it refers to."""
    text = TABLE[level]
    inherited = [other for other in re.findall(r"`(\w+)`", text) if other in TABLE]
    return set(NAME.findall(text)).union(*map(claimed, inherited))


@cache
def instructions(library: Path, objdump: str) -> dict[str, Counter[str]]:
    """The mnemonics of each source file of a library, with their counts; `z` counts SVE registers, `zmm` 512 bits.

    A linker keeps the local symbols of a file behind its name. What the parts of a level share has the level's name.
    """
    files: dict[int, str] = {}
    name = ""
    for line in run(objdump, "-t", str(library)).splitlines():
        fields = line.split()
        if " df *ABS*" in line:
            name = Path(fields[-1]).stem if len(fields) > 4 else ""
        elif " F .text" in line and " l " in line:
            files[int(fields[0], 16)] = name
    found: dict[str, Counter[str]] = {}
    counts: Counter[str] = Counter()
    for line in run(objdump, "-d", "--no-show-raw-insn", str(library)).splitlines():
        if start := re.match(r"([0-9a-f]{8,}) <(?:level_([a-z0-9]+)_)?", line):
            counts = found.setdefault(start[2] or files.get(int(start[1], 16), ""), Counter())
        elif len(parts := line.split("\t")) > 1:
            # A tab follows an Arm mnemonic, spaces one of x86; `{vex}` is a prefix of its AVX-VNNI.
            mnemonic, *rest = " ".join(parts[1:]).removeprefix("{vex} ").split()
            operands = " ".join(rest)
            counts[mnemonic] += 1
            counts["zmm"] += "%zmm" in operands
            counts["z"] += bool(re.search(r"\bz\d+\.[bhsd]\b", operands))
    return found


def run(*command: str) -> str:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def x86() -> dict[str, Counter[str]]:
    if platform.machine() != "x86_64" or not shutil.which("objdump") or not LIBRARY_PATH.exists():
        pytest.skip("needs objdump and a native library for x86-64")
    return instructions(LIBRARY_PATH, "objdump")


@pytest.fixture(scope="module")
def arm64() -> dict[str, Counter[str]]:
    if CROSS is None:
        pytest.skip("needs a cross compiler: gcc-aarch64-linux-gnu")
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    build = subprocess.run(
        ["tools/cross.sh"], cwd=ROOT, capture_output=True, text=True, check=False, env={**os.environ, "PATH": path}
    )
    assert build.returncode == 0, build.stdout + build.stderr
    return instructions(ROOT / "build" / "aarch64" / "libarmature.so", "aarch64-linux-gnu-objdump")


def check(level: str, found: dict[str, Counter[str]], levels: tuple[str, ...]) -> None:
    counts = found[level]
    assert claimed(level), f"docs/kernels.md names no instruction of {level}"
    missing = {name for name in claimed(level) if not counts[name.lower()]}
    assert not missing, f"docs/kernels.md names {missing} for the level {level}; the library has none there"
    foreign = {name for other in levels for name in claimed(other)} - claimed(level)
    present = {name for name in foreign if counts[name.lower()] and name not in _EVERYWHERE}
    assert not present, f"the level {level} has {present}, which docs/kernels.md does not say"


_EVERYWHERE = ("VPMADDUBSW", "SMULL")  # instructions of the oldest level, which the newer levels may use too


@pytest.mark.parametrize("level", X86)
def test_x86_levels(level: str, x86: dict[str, Counter[str]]) -> None:
    check(level, x86, X86)
    assert bool(x86[level]["zmm"]) == (level in ("amx", "avx512bf16", "avx512")), "vectors of 512 bits"


@pytest.mark.parametrize("level", ARM)
def test_arm_levels(level: str, arm64: dict[str, Counter[str]]) -> None:
    check(level, arm64, ARM)


def test_no_sve(arm64: dict[str, Counter[str]]) -> None:
    assert "SVE is not used" in KERNELS
    assert not {file: counts["z"] for file, counts in arm64.items() if counts["z"]}


def test_what_other_pages_name_is_there(x86: dict[str, Counter[str]], arm64: dict[str, Counter[str]]) -> None:
    known = {name.upper() for found in (x86, arm64) for counts in found.values() for name in counts}
    pages = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
    wrong = []
    for page in pages:
        for paragraph in page.read_text(encoding="utf-8").split("\n\n"):
            absent = set(NAME.findall(paragraph)) - known
            if absent and NOT_USED not in paragraph:
                wrong.append((page.name, sorted(absent)))
    assert not wrong
