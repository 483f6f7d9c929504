"""What an archive says of the sizes of a program's inputs: forms, ranges, symbols that inputs share, and conditions."""

from __future__ import annotations

import pickle
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import CheckpointInvalid, InvalidRequest
from app.models.program_graph import SAMPLE_SIZE, Condition, Dimension, ProgramSizes, plain_size, read_dimension

SYMBOL = "Symbol('s7', positive=True, integer=True)"
RANGES = {
    "s7": {"min_val": 2, "max_val": 9},
    "8*s7": {"min_val": 16, "max_val": 72},
    "s9": {"min_val": 0, "max_val": None},
}


@pytest.mark.parametrize(
    ("tree", "plain"),
    [
        (SYMBOL, "s7"),
        (f"Mul(Integer(8), {SYMBOL})", "8*s7"),
        (f"Add({SYMBOL}, Integer(1))", "s7 + 1"),
        (f"Add(Integer(-1), {SYMBOL})", "s7 - 1"),
        (f"Add(Mul(Integer(2), {SYMBOL}), Integer(-3))", "2*s7 - 3"),
        (f"Mul({SYMBOL}, Add({SYMBOL}, Integer(1)))", "s7*(s7 + 1)"),
        (f"FloorDiv({SYMBOL}, Integer(2))", "FloorDiv(s7, 2)"),
        ("not Python at all (", "not Python at all ("),
        ("__import__('os').system('x')", "__import__('os').system('x')"),
    ],
)
def test_a_size_is_printed_as_sympy_does(tree: str, plain: str) -> None:
    assert plain_size(tree) == plain


@pytest.mark.parametrize(
    ("size", "wanted"),
    [
        ("s7", Dimension("s7", low=2, high=9)),
        ("8*s7", Dimension("s7", 8, 0, 16, 72)),
        ("2*s7 - 3", Dimension("s7", 2, -3, 1, 15)),
        ("s9 + 1", Dimension("s9", 1, 1, 1, None)),
        ("s1", Dimension("s1")),
    ],
)
def test_a_dimension_has_a_form_and_a_range(size: str, wanted: Dimension) -> None:
    assert read_dimension("x", size, RANGES) == wanted


@pytest.mark.parametrize("size", ["s7*s9", "s7*(s7 + 1)", "FloorDiv(s7, 2)", "0*s7", ""])
def test_any_other_form_is_refused_by_name(size: str) -> None:
    with pytest.raises(CheckpointInvalid, match="Input 'x' has a dimension of the size"):
        read_dimension("x", size, RANGES)


SIZES = ProgramSizes(
    {
        "x": (Dimension("n", 2, 0, 4, 40), 3),
        "y": (Dimension("n", 1, 0, 2, 20),),
        "z": (Dimension("m", low=64),),
    },
    ("L['z'].size()[1] % 2 == 0", "(L['x'].size()[1] // 2) != 5 or L['z'].stride()[0] > 99"),
)


def shapes(x: int, y: int, z: int) -> dict[str, Sequence[int]]:
    return {"x": (1, x, 3), "y": (1, y), "z": (1, z)}


def test_sizes_within_what_was_exported_are_accepted_and_so_are_the_samples() -> None:
    SIZES.check(shapes(8, 4, 64))
    SIZES.check(shapes(10, 5, 100))
    assert SIZES.samples == {"x": (SAMPLE_SIZE, 3), "y": (8,), "z": (64,)}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (shapes(9, 4, 64), r"input 'x': dimension 1 must be in \[4, 40\], of the form 2\*n, .*not 9"),
        (shapes(42, 21, 64), r"input 'x': dimension 1 must be in \[4, 40\]"),
        (shapes(2, 1, 64), r"input 'x': dimension 1 must be in \[4, 40\]"),
        (shapes(8, 5, 64), r"input 'y': dimension 1 must be 4, as dimension 1 of input 'x' demands, not 5"),
        (shapes(8, 4, 63), r"input 'z': dimension 1 must be at least 64, .*not 63"),
        (
            shapes(8, 4, 65),
            r"input 'z': the program was not exported for the shape \[1, 65\]; it needs z.size\(1\) % 2 == 0",
        ),
        (shapes(10, 5, 64), r"input 'x': .*it needs x.size\(1\) // 2 != 5 or z.stride\(0\) > 99"),
    ],
)
def test_any_other_size_is_refused_with_its_input_and_dimension(given: dict[str, Sequence[int]], said: str) -> None:
    with pytest.raises(InvalidRequest, match=said) as caught:
        SIZES.check(given)
    assert caught.value.field in said


def test_sizes_that_were_checked_can_be_sent_to_another_process() -> None:
    SIZES.check(shapes(8, 4, 64))
    received = pickle.loads(pickle.dumps(SIZES))
    received.check(shapes(8, 4, 64))
    with pytest.raises(InvalidRequest, match=r"it needs z\.size"):
        received.check(shapes(8, 4, 65))


def test_samples_are_those_of_the_export_where_small_ones_meet_no_condition() -> None:
    odd = ProgramSizes({"x": (Dimension("n"),)}, ("L['x'].size()[1] == 100",), {"x": (100,)})
    assert odd.samples == {"x": (100,)}


def test_conditions_on_the_number_of_rows_are_refused() -> None:
    ProgramSizes({"x": (4,)}, ("L['x'].size()[0] != 1",), min_rows=2).check_batches()
    with pytest.raises(CheckpointInvalid, match="accepts only some numbers of rows"):
        ProgramSizes({"x": (4,)}, ("L['x'].size()[0] % 2 == 0",)).check_batches()


@pytest.mark.parametrize(
    ("text", "size", "holds"),
    [
        ("2 <= L['x'].size()[1] < 5", 4, True),
        ("2 <= L['x'].size()[1] < 5", 5, False),
        ("not (L['x'].size()[1] == 3)", 3, False),
        ("min(L['x'].size()[1], 4) == 4 and -L['x'].size()[1] < 0", 9, True),
        ("(1 if L['x'].size()[1] > 2 else 0) == 1", 3, True),
        ("math.floor(L['x'].size()[1] / 2) == 3", 7, True),
        ("L['x'].size()[1] ** 2 == 49", 7, True),
        ("1 // (L['x'].size()[1] - 7) == 0", 7, False),
        ("L['x'].storage_offset() == 0", 1, True),
        ("L['args'][0].size()[1] == 2", 2, True),
        ("L['kwargs']['x'].size()[1] == 2", 2, True),
    ],
)
def test_what_a_condition_says(text: str, size: int, holds: bool) -> None:
    assert Condition(text, ("x", "args_0")).holds({"x": (1, size), "args_0": (1, size)}) is holds


@pytest.mark.parametrize(
    "text",
    [
        "__import__('os')",
        "L['x'].size()[1].real == 1",
        "L['other'].size()[1] == 1",
        "open('a')",
        "(lambda: 1)()",
        "[1][0] == 1",
        "x == 1",
        "L['x'].size()[1] ==",
        "(" * 5_000,
        "1 + " * 5_000,
    ],
)
def test_a_condition_that_is_not_arithmetic_is_refused_and_never_run(text: str) -> None:
    with pytest.raises(CheckpointInvalid, match="a condition on its inputs that is not understood"):
        Condition(text, ("x",))


PIECES = st.sampled_from(
    "L['x'].size()[1] L['x'].size()[10] + - * // % ** == != < and or not ( ) 9 if else min".split()
)


@given(st.lists(PIECES, max_size=12).map(" ".join))
def test_no_text_of_a_condition_does_harm(text: str) -> None:
    try:
        condition = Condition(text, ("x",))
    except CheckpointInvalid:
        return
    assert condition.holds({"x": (1, 3)}) in (True, False)
