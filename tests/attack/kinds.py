"""One served model of each kind, for attacks on all routes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from app.settings import DEMO_DIRECTORY
from exported_programs import write_program
from tests.live.live_server import LiveServer, live
from tiny_checkpoints import write_checkpoint
from tiny_encoders import write_encoder

KINDS = ("decoder", "encoder", "classifier", "program")


def write_model(kind: str, directory: Path) -> Path:
    """A model of the kind: a checkpoint's directory, or an exported program."""
    if kind == "decoder":
        return write_checkpoint(directory)
    if kind == "encoder":
        return DEMO_DIRECTORY.parent / "bert"
    if kind == "classifier":
        return write_encoder(directory, "BertForSequenceClassification")
    directory.mkdir(parents=True, exist_ok=True)
    return write_program(directory, "recommender")


@contextmanager
def serving(kind: str, directory: Path) -> Iterator[LiveServer]:
    """A server of such a model in this process. It does not measure the machine, which would take seconds."""
    with live(write_model(kind, directory), calibrate="off") as server:
        yield server
