"""Words whose address recorded operations know: it stays, whatever did not fit meanwhile."""

from __future__ import annotations

import ctypes

from armature_kernels.native.memory import Int64Buffer


def read(address: int, count: int) -> list[int]:
    return list((ctypes.c_int64 * count).from_address(address))


def test_what_is_known_of_an_address_is_what_was_filled_in_last() -> None:
    words = Int64Buffer(4)
    known = words.address
    for values in ([1, 2, 3, 4], [5, 6], [7, 8]):
        filled = words.fill(values)
        assert filled.tolist() == values and filled.data_ptr() == known
        assert words.stays and read(known, len(values)) == values


def test_what_has_no_room_lies_elsewhere_and_the_known_address_comes_back() -> None:
    words = Int64Buffer(4)
    known = words.address
    words.fill([7, 8])
    assert words.fill(list(range(9))).tolist() == list(range(9))
    assert words.address != known and not words.stays and read(words.address, 9) == list(range(9))
    assert read(known, 2) == [7, 8]  # still ours, not given back
    words.fill([1])
    words.set(0, 3)
    assert words.address == known and read(known, 1) == [3] and words.tensor[0] == 3
