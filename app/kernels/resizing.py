"""Changes the number of rows of recorded operations, up to the number they were recorded with.

Every row is computed like every other, so only the count changes. Results then occupy the beginning of the memory.
A step that reads texts has two row counts: its tokens, and the tokens that the last layer still needs.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Iterator, Sequence

from app.kernels.lanes import RowPlace
from app.kernels.native import native
from app.kernels.operations import Code, Sink
from app.kernels.recording import Unrecordable

_WORD = ctypes.sizeof(ctypes.c_int64)
_COUNTS = ("rows", "count")  # names of the row count in the operations' arguments (csrc/ops.h)


class Resizing:
    """Sets the row counts of recorded operations.

    The owner of the recording keeps the arguments alive. `addresses` locates the counts for the library
    (csrc/lanes.c).
    """

    def __init__(self, steps: Sequence[tuple[Code, ctypes.Structure]], sizes: Sequence[int]) -> None:
        """Find the row counts in the arguments of `steps`.

        Args:
            steps: The recorded operations.
            sizes: The row counts they were recorded with, all different.

        Raises:
            Unrecordable: If an operation has another row count.
        """
        assert len(set(sizes)) == len(sizes), "row counts must be different to be distinguishable"
        found = [place for code, arguments in steps for place in _places(code, arguments, sizes)]
        self.places = (RowPlace * len(found))(*found)
        self.sizes = tuple(sizes)

    def set(self, sizes: tuple[int, ...]) -> None:
        """Set the row counts; each at least one, and at most the one that was recorded."""
        assert len(sizes) == len(self.sizes) and all(0 < now <= most for now, most in zip(sizes, self.sizes, strict=True))
        library = native().library
        assert library is not None, "recorded operations require the native library"
        now = (ctypes.c_int64 * len(sizes))(*sizes)
        library.armature_resize(ctypes.byref(self.places), len(self.places), ctypes.byref(now))


def _places(code: Code, arguments: ctypes.Structure, sizes: Sequence[int]) -> Iterator[RowPlace]:
    names = {field[0]: field[1] for field in arguments._fields_}
    count = next((name for name in _COUNTS if name in names), None)
    if count is None:
        return  # it reads its row count from a buffer that is refilled for every step
    if getattr(arguments, count) not in sizes:
        raise Unrecordable(f"{code.name} of {getattr(arguments, count)} rows")
    which = sizes.index(getattr(arguments, count))
    yield RowPlace(_address(arguments, count), which, False)
    for holder in _sinks(arguments, names):
        if getattr(holder, "height", 0):
            yield RowPlace(_address(holder, "height"), which, True)


def _sinks(arguments: ctypes.Structure, names: dict[str, type]) -> Iterable[ctypes.Structure]:
    """Return the arguments and the `RowSink` structures in them."""
    return [arguments, *(getattr(arguments, name) for name, kind in names.items() if kind is Sink)]


def _address(holder: ctypes.Structure, name: str) -> int:
    field = getattr(type(holder), name)
    assert field.size == _WORD, "every integer field must have eight bytes"
    return ctypes.addressof(holder) + int(field.offset)
