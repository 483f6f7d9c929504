"""Advice to the kernel about memory, which serving can do without.

A sandbox or a seccomp filter may refuse such a call with any error, which costs speed, never a step.
"""

from __future__ import annotations

import mmap

_POPULATE_READ = 22  # Linux 5.14; Python's mmap has no name for it


def advise(region: mmap.mmap, advice: str, start: int = 0, length: int | None = None) -> bool:
    """Give the kernel advice about mapped memory (man 2 madvise), and return whether it was taken.

    `advice` names a constant of Python's `mmap`, which other systems may lack. `start` is at the beginning of a page.
    """
    number = getattr(mmap, advice, None) if advice != "MADV_POPULATE_READ" else _POPULATE_READ
    if number is None:
        return False
    try:
        region.madvise(number, start, len(region) - start if length is None else length)
    except (OSError, ValueError):
        return False
    return True
