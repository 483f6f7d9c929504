"""Recorded operations for any number of rows up to the one that they were recorded with: every row is computed like every other, so only
the count changes, and results lie at the beginning of memory that has room for more.

A step that reads texts has two numbers: its tokens, and those of them that the last layer still wants.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence

from app.kernels.lanes import RowPlace
from app.kernels.native import native
from app.kernels.operations import Code, Sink
from app.kernels.recording import Unrecordable

_WORD = ctypes.sizeof(ctypes.c_int64)
_COUNTS = ("rows", "count")  # what operations call their number of rows (csrc/ops.h)


class Resizing:
    """Sets the numbers of rows in recorded operations anew. Those who hold the recording keep the arguments alive.

    `places`: where the library finds them (csrc/lanes.c).
    """

    def __init__(self, steps: Sequence[tuple[Code, ctypes.Structure]], sizes: Sequence[int]) -> None:
        """`sizes`: the different numbers of rows that they were recorded with. Raises `Unrecordable` where one has another number."""
        assert len(set(sizes)) == len(sizes), "or nobody could tell which is which"
        found = [place for code, arguments in steps for place in _places(code, arguments, sizes)]
        self.places = (RowPlace * len(found))(*found)
        self.sizes = tuple(sizes)

    def set(self, sizes: tuple[int, ...]) -> None:
        """From now on so many rows; at least one of each kind, and no more than were recorded."""
        assert len(sizes) == len(self.sizes) and all(0 < now <= most for now, most in zip(sizes, self.sizes, strict=True))
        library = native().library
        assert library is not None, "it recorded operations of the library"
        now = (ctypes.c_int64 * len(sizes))(*sizes)
        library.armature_resize(ctypes.byref(self.places), len(self.places), ctypes.byref(now))


def _places(code: Code, arguments: ctypes.Structure, sizes: Sequence[int]) -> Iterator[RowPlace]:
    names = {field[0]: field[1] for field in arguments._fields_}
    count = next((name for name in _COUNTS if name in names), None)
    if count is None:
        return  # what it is to do, it reads where it is described anew
    if getattr(arguments, count) not in sizes:
        raise Unrecordable(f"{code.name} of {getattr(arguments, count)} rows")
    which = sizes.index(getattr(arguments, count))
    yield RowPlace(_address(arguments, count), which, False)
    for holder in _sinks(arguments, names):
        if getattr(holder, "height", 0):
            yield RowPlace(_address(holder, "height"), which, True)


def _sinks(arguments: ctypes.Structure, names: dict[str, type]) -> Iterable[ctypes.Structure]:
    """The arguments themselves, and where they say rows are to go."""
    return [arguments, *(getattr(arguments, name) for name, kind in names.items() if kind is Sink)]


def _address(holder: ctypes.Structure, name: str) -> int:
    field = getattr(type(holder), name)
    assert field.size == _WORD, "every number has eight bytes"
    return ctypes.addressof(holder) + int(field.offset)
