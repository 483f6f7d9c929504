"""Python and the library mean the same bytes, or nothing is run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import PlanImpossible
from app.kernels import operations
from app.kernels.native import native
from app.kernels.operations import Code, has

pytestmark = pytest.mark.skipif(native().library is None, reason="no native library here")


@pytest.fixture(autouse=True)
def ask_again() -> Any:
    operations._of_this_version.cache_clear()
    yield
    operations._of_this_version.cache_clear()


def test_this_library_reads_what_is_written() -> None:
    assert has(Code.LINEAR_INT)


@pytest.mark.parametrize("other", [lambda code: 8, None], ids=["other sizes", "older than the question"])
def test_a_library_of_another_version_is_never_asked_to_run(other: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = SimpleNamespace(armature_has=lambda code: 1, **({"armature_size": other} if other else {}))
    monkeypatch.setattr(operations, "native", lambda: SimpleNamespace(library=library))
    with pytest.raises(PlanImpossible, match="make native"):
        has(Code.LINEAR_INT)
