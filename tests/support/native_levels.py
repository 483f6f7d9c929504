"""The levels of the native library that this processor runs, and how a test makes one of them serve for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from armature_kernels.native.library import NativeKernels, native_library

_NAMES = ("amx", "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "dotprod", "neon", "portable")


def levels() -> tuple[str, ...]:
    """Names, the best first; none where there is no library. The one that served serves again afterwards."""
    library, serving = native_library().library, native_library().level
    if library is None or serving is None:
        return ()
    found = tuple(name for name in _NAMES if library.armature_select(name.encode()) == 0)
    library.armature_select(serving.encode())
    return found


def tests_levels(module: ModuleType) -> bool:
    """Whether a module's tests choose levels: `make test-all` runs them again, with the levels that `make test` has not."""
    return any(getattr(value, "__name__", "") in ("at_level", "levels") for value in vars(module).values())


@contextmanager
def at_level(name: str) -> Iterator[NativeKernels]:
    """Inside, `native()` is the library at this level. Nothing else may run meanwhile."""
    before = native_library()
    assert before.library is not None and before.level is not None, "levels() named this one"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ARMATURE_ISA", name)
        native_library.cache_clear()
        try:
            yield native_library()
        finally:
            before.library.armature_select(before.level.encode())
            native_library.cache_clear()
