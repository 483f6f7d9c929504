"""When Triton's kernels serve: on an NVIDIA GPU alone, and only where Triton can build what starts a kernel."""

from __future__ import annotations

import logging
import subprocess
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from armature_kernels.triton import support

ON_GPU = cast(Tensor, SimpleNamespace(device=torch.device("cuda", 0)))


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    support.unavailable_reason.cache_clear()
    yield
    support.unavailable_reason.cache_clear()


class Triton:
    """In place of `triton.runtime`: its driver, or what happens where it is made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.asked = error, 0

    @property
    def driver(self) -> Any:
        return self

    @property
    def active(self) -> object:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return object()


def put(triton: Triton, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support.importlib, "import_module", lambda name: triton)


def test_a_processor_asks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton()
    put(triton, monkeypatch)
    assert not support.triton_usable(torch.zeros(1))
    assert not support.triton_usable(torch.zeros(1, device="meta"))
    assert triton.asked == 0


def test_a_gpu_is_served_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = Triton()
    put(triton, monkeypatch)
    assert support.triton_usable(ON_GPU)
    assert support.triton_usable(ON_GPU)
    assert triton.asked == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable"),
        subprocess.CalledProcessError(1, ["gcc"]),
        PermissionError("/.triton"),
        AssertionError("libcuda.so cannot found!"),
        ModuleNotFoundError("No module named 'triton'"),
    ],
)
def test_without_what_triton_needs_the_references_serve_and_it_is_said_once(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    triton = Triton(error)
    put(triton, monkeypatch)
    with caplog.at_level(logging.WARNING):
        assert not support.triton_usable(ON_GPU)
        assert not support.triton_usable(ON_GPU)
    assert triton.asked == 1
    [record] = caplog.records
    assert str(error) in record.message
    assert "torch's own serve" in record.message
