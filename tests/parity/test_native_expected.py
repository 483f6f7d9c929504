"""Every level of the native library computes what x86 with AVX-512 computed, compared by digests in
native_expected.json. Numbers come from integers, never from a generator that a platform may vectorise differently.
If the arithmetic is meant to change, write the file again with `python tests/parity/test_native_expected.py`, and
review it.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import pytest
import torch
from torch import Tensor

from armature_kernels.elementwise.embedding import EmbeddingTable, TableLayout
from armature_kernels.linear.activations import RowGroups, quantise, unpack_tiles
from armature_kernels.linear.layout import PanelLayout
from armature_kernels.native.arguments import LinearIntArguments, OpCode, PackIntArguments, ProductOutput
from armature_kernels.native.library import native_library
from armature_kernels.native.memory import aligned_bytes
from armature_kernels.native.operations import has_kernel, run_operation

EXPECTED = Path(__file__).parent / "native_expected.json"
LEVELS = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable")
ROWS = 40


@dataclass(frozen=True, slots=True)
class Case:
    bits: int
    group: int | None
    zero_points: bool
    inputs: int
    outputs: int
    double_quantized: bool = False

    @property
    def layout(self) -> PanelLayout:
        return PanelLayout(self.bits, self.group, self.zero_points, self.double_quantized)

    def __str__(self) -> str:
        group = self.layout.group_of(self.inputs)
        kind = " with minimums" if self.zero_points else " double quantized" if self.double_quantized else ""
        return f"int{self.bits}/{group}{kind} {self.outputs}x{self.inputs}"


FORMS = [(8, None, False), *((4, group, points) for group in (32, 64, 128) for points in (False, True))]
SHAPES = ((576, 100), (896, 32), (1001, 65), (40, 7))
CASES = [
    *(Case(*form, inputs, outputs) for form in FORMS for inputs, outputs in SHAPES),
    *(Case(4, 32, False, inputs, outputs, double_quantized=True) for inputs, outputs in SHAPES),
]


def mixed(seed: int, *shape: int) -> Tensor:
    """Numbers from 0 to 2^16 - 1 without a pattern that a product could miss: int64 [shape]."""
    count = 1
    for size in shape:
        count *= size
    x = torch.arange(count) + 1_000_003 * seed
    for _ in range(3):
        x = (x * 0x5BD1E995 + 0x1B873593) & 0xFFFFFFFF
        x = x ^ (x >> 15)
    return ((x >> 7) & 0xFFFF).view(shape)


@dataclass(frozen=True, slots=True)
class Packed:
    case: Case
    panels: Tensor

    @property
    def padded(self) -> int:
        group = self.case.layout.group_of(self.case.inputs)
        return -(-self.case.inputs // group) * group

    @classmethod
    def of(cls, case: Case, exact: bool, code: int | None = None) -> Packed:
        """Scales and minimums are powers of two where sums are to be exact in fp32. `code`: all codes are this one."""
        packed = cls(case, aligned_bytes(case.layout.nbytes(case.outputs, case.inputs)).zero_())
        groups = packed.padded // case.layout.group_of(case.inputs)
        codes = mixed(1, case.outputs, packed.padded)
        codes = (codes % 255 - 127).to(torch.int8) if case.bits == 8 else (codes % 16).to(torch.uint8)
        if code is not None:
            codes = torch.full_like(codes, code)
        signs = 1 - 2 * (mixed(2, case.outputs, groups) % 2)
        sizes = (
            2.0 ** -(mixed(3, case.outputs, groups) % 2) if exact else (mixed(3, case.outputs, groups) + 1) / 2.0**20
        )
        scales = (signs * sizes).bfloat16()
        others = (-sizes * (mixed(4, case.outputs, groups) % 16)).bfloat16() if case.zero_points else None
        if case.double_quantized:
            scales = (signs * (mixed(3, case.outputs, groups) % (2 if exact else 127) + 1)).to(torch.int8)
            others = 2.0 ** -(mixed(4, case.outputs, 1) % 2) if exact else mixed(4, case.outputs, 1) / 2.0**30
            others = others.bfloat16()
        pack = PackIntArguments(
            codes.data_ptr(), scales.data_ptr(), None if others is None else others.data_ptr(), packed.panels.data_ptr(),
            case.outputs, 0, packed.padded, case.layout.group_of(case.inputs), case.bits, case.layout.header,
        )  # fmt: skip
        library = native_library().library
        assert library is not None
        library.armature_pack_int(ctypes.byref(pack))
        return packed

    def times(self, x: Tensor) -> Tensor:
        """fp32 [rows, outputs]."""
        codes = quantise(x, RowGroups(self.case.layout.group_of(self.case.inputs)))
        y = torch.full((len(x), self.case.outputs), torch.nan)
        run_operation(
            LinearIntArguments(
                self.panels.data_ptr(), None, codes.codes.data_ptr(), codes.scales.data_ptr(), codes.sums.data_ptr(), y.data_ptr(),
                y.stride(0), len(x), self.padded, self.case.outputs, codes.group, codes.height, self.case.bits,
                self.case.layout.header, ProductOutput.FP32, shared=codes.shared,
            ),
            OpCode.LINEAR_INT,
        )  # fmt: skip
        return y

    def widened(self) -> Tensor:
        """All its rows, fp32."""
        case, group = self.case, self.case.layout.group_of(self.case.inputs)
        header = case.layout.header
        table = EmbeddingTable(
            self.panels, TableLayout(case.bits), case.outputs, case.inputs, self.padded, group, header
        )
        return table.rows(torch.arange(case.outputs))


def activations(case: Case, exact: bool) -> Tensor:
    """bf16 [ROWS, inputs]. Exact: each group's largest is 127 times a power of two, so that quantising loses nothing."""
    codes = mixed(5, ROWS, case.inputs) % 255 - 127
    if not exact:
        return (codes * (mixed(6, ROWS, case.inputs) % 97 + 1) / 512.0).bfloat16()
    codes[:, :: case.layout.group_of(case.inputs)] = 127
    return (codes * 2.0 ** -(mixed(6, ROWS, 1) % 3)).bfloat16()


def digest(*tensors: Tensor) -> str:
    return hashlib.sha256(b"".join(t.contiguous().numpy().tobytes() for t in tensors)).hexdigest()[:16]


def sample(y: Tensor) -> Tensor:
    return y.flatten()[:: max(1, y.numel() // 12)][:12]


def results(case: Case) -> dict[str, object]:
    """What is stored: digests of all that is exact, and some of the sums whose last bit may depend on their order."""
    x = activations(case, exact=False)
    codes, scales = unpack_tiles(quantise(x, RowGroups(case.layout.group_of(case.inputs))))
    exact, near = Packed.of(case, exact=True), Packed.of(case, exact=False)
    return {
        "quantised": digest(codes, scales),
        "widened": digest(exact.widened()),
        "exact": digest(exact.times(activations(case, exact=True))),
        "near": [float(value).hex() for value in sample(near.times(x))],
    }


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Each level that this processor has serves once."""
    before = native_library()
    wanted = os.environ.get("ARMATURE_ISA")
    if before.library is None:
        pytest.skip("there is no native library here")
    if (wanted and request.param != wanted) or before.library.armature_select(request.param.encode()) != 0:
        pytest.skip("not asked for, or not of this processor")
    monkeypatch.setenv("ARMATURE_ISA", request.param)
    native_library.cache_clear()
    assert native_library().level == request.param
    yield request.param
    assert before.level is not None
    before.library.armature_select(before.level.encode())
    native_library.cache_clear()


@pytest.fixture(params=(1, 2))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_each_level_computes_what_was_stored(level: str, threads: int) -> None:
    expected = json.loads(EXPECTED.read_text())
    assert set(expected) == {str(case) for case in CASES}
    for case in CASES:
        found, stored = results(case), expected[str(case)]
        for name in ("quantised", "widened", "exact"):
            assert found[name] == stored[name], f"{case}: {name}"
        near, was = ([float.fromhex(value) for value in result["near"]] for result in (found, stored))
        assert near == pytest.approx(was, rel=1e-6, abs=2e-6 * max(map(abs, was))), case


def test_a_row_has_the_same_bits_in_any_company(level: str) -> None:
    """So have tiles of every height, the last with fewer rows than the others."""
    for case in CASES:
        if case.inputs not in (40, 1001) or case.group == 64:
            continue
        packed, x = Packed.of(case, exact=False), activations(case, exact=False)
        together = packed.times(x)
        for rows in range(1, ROWS):
            assert torch.equal(packed.times(x[:rows]), together[:rows]), f"{case}, {rows} rows"


def test_a_group_that_is_not_finite_spoils_its_own_row_only(level: str) -> None:
    for case in CASES[::4]:
        packed, x = Packed.of(case, exact=False), activations(case, exact=False)
        good = packed.times(x)
        x[1, 3], x[6, 570], x[ROWS - 1, 0] = torch.nan, torch.inf, -torch.inf
        bad = packed.times(x)
        spoiled = [1, 6, ROWS - 1]
        assert bad[spoiled].isnan().all()
        kept = [row for row in range(ROWS) if row not in spoiled]
        assert torch.equal(bad[kept], good[kept])


def test_nothing_but_extremes_of_one_sign_overflows_nowhere(level: str) -> None:
    for case in CASES:
        for code in (-127, 127) if case.bits == 8 else (0, 15):
            packed = Packed.of(case, exact=True, code=code)
            for value in (-127, 127):
                x = torch.full((7, case.inputs), value).bfloat16()
                assert torch.equal(packed.times(x).double(), x.double() @ packed.widened().double().T), (
                    case,
                    code,
                    value,
                )


def test_the_exact_sums_are_those_of_integers() -> None:
    """What is stored is right, not only stable: checked against a product of whole numbers."""
    if not has_kernel(OpCode.LINEAR_INT):
        pytest.skip("there is no native library here")
    for case in CASES:
        packed, x = Packed.of(case, exact=True), activations(case, exact=True)
        assert torch.equal(packed.times(x).double(), x.double() @ packed.widened().double().T), case


if __name__ == "__main__":
    lines = ",\n".join(f"{json.dumps(str(case))}: {json.dumps(results(case))}" for case in CASES)
    EXPECTED.write_text(f"{{\n{lines}\n}}\n")
