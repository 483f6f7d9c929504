"""The environment of every test: few threads, no settings of the shell, only loopback, and the markers for devices."""

from __future__ import annotations

import atexit
import gc
import os
import shutil
import tempfile

# Before anything imports torch: its pools read these when they load, and tests measure nothing.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # transformers, our reference, may not look anything up
_TESTED = ("ARMATURE_ISA", "ARMATURE_NATIVE_LIBRARY")  # what is to be tested, if not this machine's best
for _name in [name for name in os.environ if name.startswith("ARMATURE_") and name not in _TESTED]:
    del os.environ[_name]  # a developer's own settings are not the tests'
os.environ["ARMATURE_CALIBRATE"] = "off"  # a start measures nothing but where a test asks for it

# What is kept for the next start is not kept in a developer's home, nor found there.
_CACHES = tempfile.mkdtemp(prefix="armature-tests-")
atexit.register(shutil.rmtree, _CACHES, ignore_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHES

import ipaddress
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import native_levels
import pairwise
from hypothesis_examples import examples

ROOT = Path(__file__).resolve().parent.parent

# A shell that runs us in the background has us ignore Ctrl-C, and tests that send it would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Examples are found by search, never by the clock, and a failing run can be repeated. `make fuzz` tries four times as many.
settings.register_profile("armature", deadline=None, derandomize=True, max_examples=examples(100), database=None)
settings.load_profile("armature")


def _has_cuda() -> bool:
    """Whether there is an NVIDIA GPU and a torch that can use it; torch is asked, and so loaded, only where there is a driver."""
    if shutil.which("nvidia-smi") is None:
        return False
    import torch

    return torch.cuda.is_available()


# Where there is no GPU its kernels run in Triton's interpreter, on the CPU's tensors. Triton asks when a kernel is imported.
if not _has_cuda():
    os.environ["TRITON_INTERPRET"] = "1"

_PRESENT: dict[str, Callable[[], bool]] = {
    "arm64": lambda: platform.machine() in ("aarch64", "arm64"),
    "cuda": _has_cuda,
    "mps": lambda: sys.platform == "darwin" and platform.machine() == "arm64",
}


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests of devices that this machine lacks, and leave most cases of large products to `make test-all`."""
    pairwise.mark_other_cases(items)
    pairwise.mark_repetitions(items)
    for item in items:
        if isinstance(item, pytest.Function) and native_levels.tests_levels(item.module):
            item.add_marker(pytest.mark.levels)
        if item.get_closest_marker("nightly"):
            item.add_marker(pytest.mark.full)
    missing = {marker for marker, present in _PRESENT.items() if not present()}
    for item in items:
        for marker in missing & {mark.name for mark in item.iter_markers()}:
            item.add_marker(pytest.mark.skip(reason=f"this machine has no {marker}"))


# Millions of objects belong to the collected tests and the libraries. The collector would look through them in each
# collection that the code under test asks for, a second and more every time.
_unfreeze = gc.unfreeze
_unfrozen = False


def _note_and_unfreeze() -> None:
    global _unfrozen
    _unfrozen = True
    _unfreeze()


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()
    gc.unfreeze = _note_and_unfreeze


@pytest.fixture(autouse=True)
def _frozen() -> Iterator[None]:
    """Freeze again what a test has unfrozen."""
    global _unfrozen
    yield
    if _unfrozen:
        _unfrozen = False
        gc.freeze()


def _refuse_the_world(address: Any) -> None:
    """Loopback and sockets in files only: a test that needs the network is a test that fails on a train."""
    host = address[0] if isinstance(address, tuple) else None
    if host is None or host in ("localhost", ""):
        return
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise AssertionError(f"a test tried to reach {host}: tests use loopback only")


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def guarded(self: socket.socket, address: Any) -> None:
        _refuse_the_world(address)
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)


@pytest.fixture
def root() -> Path:
    """The repository's root directory."""
    return ROOT
