"""Python and the library mean the same bytes, or nothing is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from armature_kernels.errors import KernelError
from armature_kernels.native import operations
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.library import native_library
from armature_kernels.native.operations import has_kernel

pytestmark = pytest.mark.skipif(native_library().library is None, reason="no native library here")


@pytest.fixture(autouse=True)
def ask_again() -> Any:
    operations._version_matches.cache_clear()
    yield
    operations._version_matches.cache_clear()


def test_this_library_reads_what_is_written() -> None:
    assert has_kernel(OpCode.LINEAR_INT)


@pytest.mark.parametrize("other", [lambda code: 8, None], ids=["other sizes", "older than the question"])
def test_a_library_of_another_version_is_never_asked_to_run(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(armature_has=lambda code: 1, **({"armature_size": other} if other else {}))
    monkeypatch.setattr(operations, "native_library", lambda: SimpleNamespace(library=library))
    with pytest.raises(KernelError, match="make native"):
        has_kernel(OpCode.LINEAR_INT)
