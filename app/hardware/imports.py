"""Imports without garbage collection and torch's compiler, and calls of libraries without their log lines."""

from __future__ import annotations

import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector, then exempt all objects that exist: modules live as long as the process."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()


@contextmanager
def compiler_absent() -> Iterator[None]:
    """Let decorators that keep a function from being compiled return it, without the import of torch's compiler.

    That takes a second or two, and nothing that is served is compiled. One that is imported already, as for a
    measurement, stays.
    """
    if _COMPILER in sys.modules:
        yield
        return
    stand_in = ModuleType(_COMPILER)
    torch = find_spec("torch")
    stand_in.__path__ = [f"{folder}/_dynamo" for folder in (torch and torch.submodule_search_locations) or ()]
    for name in ("disable", "allow_in_graph", "assume_constant_result"):
        setattr(stand_in, name, _undecorated)
    sys.modules[_COMPILER] = stand_in
    try:
        yield
    finally:
        del sys.modules[_COMPILER]


def _undecorated(function: Callable[..., Any] | None = None, *rest: Any, **options: Any) -> Callable[..., Any]:
    return function or (lambda decorated: decorated)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Give an attribute of a library another value for a while."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def only_errors_logged(*names: str) -> Iterator[None]:
    """Keep log lines below errors of these loggers out of ours."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
