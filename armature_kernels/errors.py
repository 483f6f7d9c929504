"""The exception of this package."""

from __future__ import annotations


class KernelError(Exception):
    """The library, a config of torchao or a stored weight cannot be used. The message says why, and what can be done."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message
