"""Errors of libraries in Rust (tokenizers, llguidance), which Python code does not expect.

Such a library raises plain `Exception` for an error and `pyo3_runtime.PanicException` for a panic, its own bug. The
latter derives from `BaseException`, so no `except Exception` takes it, and it cannot be imported: it is known by name.
"""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from app.errors import ArmatureError


def is_rust_panic(kind: type[BaseException] | None) -> bool:
    """Return True if an exception of this class is a panic of a library in Rust."""
    return kind is not None and (kind.__module__, kind.__name__) == ("pyo3_runtime", "PanicException")


class ConvertRustErrors:
    """Convert plain `Exception` and panics into an error of ours; other exceptions pass.

    `make` returns the error for a message, which is `sentence` and the library's own text.
    """

    def __init__(self, make: Callable[[str], ArmatureError], sentence: str) -> None:
        self._make, self._sentence = make, sentence

    def __enter__(self) -> None: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is Exception or is_rust_panic(kind):
            raise self._make(f"{self._sentence}: {error}") from error
