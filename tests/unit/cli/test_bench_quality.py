"""The command line of `armature bench quality`: flags that mean nothing for the kind of model are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.cli.parser import parse_arguments
from app.settings import Settings
from armature_bench.console import MeasurementFailed
from armature_bench.run import run_bench


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))  # a bench sets what torch reads


@pytest.mark.parametrize(
    ("model", "flags", "complaint"),
    [
        ("", ["--peer-python", "python3"], "--peer-python needs --peer llama.cpp"),
        ("", ["--texts", "5"], "--texts does not apply to a language model"),
        ("bert", ["--tokens", "5"], "--tokens does not apply to an encoder"),
        ("bert", ["--peer", "llama.cpp"], "--peer does not apply to an encoder"),
    ],
)
def test_what_means_nothing_is_refused(model: str, flags: list[str], complaint: str) -> None:
    settings = Settings(model=Path(model)) if model else Settings()
    with pytest.raises(MeasurementFailed, match=complaint):
        run_bench(settings, parse_arguments(["bench", "quality", *flags]))
