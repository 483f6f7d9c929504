"""Two libraries run steps in turns, and each step counts for the library that ran it."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from armature_kernels.native.library import LIBRARY_PATH, load_library
from native_levels import at_level, levels
from row_checks import needs_levels
from tools.measure.two_libraries import AlternatingLibraries, alternate, decode_in_turns, report


class Driver:
    """Runs a prompt before each ten decode steps; a step takes as many seconds as the library says."""

    def __init__(self, libraries: AlternatingLibraries) -> None:
        self.libraries = libraries
        self.after_step: Any = None

    def decode(self, rows: int, steps: int) -> None:
        for step in range(steps):
            if step % 10 == 0:
                self.after_step(100.0 + self.libraries(), (64, 0))
            self.after_step(float(self.libraries()), (0, rows))


def test_each_library_has_its_own_steps() -> None:
    libraries = AlternatingLibraries([lambda: 2, lambda: 4])
    driver: Any = Driver(libraries)
    ours, others = decode_in_turns(driver, libraries, 8, 25)
    assert (set(ours), set(others)) == ({2.0}, {4.0})
    assert len(ours) + len(others) == 50
    assert report(ours, others).startswith("2000.000 ms, other 4000.000 ms: ratio 0.500 (quartiles 0.500 to 0.500")


def test_arguments_are_passed_on() -> None:
    libraries = AlternatingLibraries([lambda *given: sum(given), lambda *given: -sum(given)])
    assert libraries(1, 2) == 3
    libraries.choose_next()
    assert libraries(1, 2) == -3
    libraries.choose_next()
    assert libraries.chosen == 0


def test_a_ratio_is_of_neighbouring_steps() -> None:
    assert "ratio 0.500 " in report([1.0, 2.0, 3.0], [2.0, 4.0, 6.0, 60.0])
    with pytest.raises(ValueError, match="at least"):
        report([1.0], [2.0])


@needs_levels
@pytest.mark.levels
def test_the_other_library_has_the_same_level(tmp_path: Path) -> None:
    best, *others = levels()
    if not others:
        pytest.skip("the library has one level: `make test-all` compiles all")
    other, worst = shutil.copy(LIBRARY_PATH, tmp_path / "other.so"), others[-1]
    assert load_library(other).armature_level() == best.encode()
    with at_level(worst):
        alternate(other)
    assert load_library(other).armature_level() == worst.encode()
