"""Our encoder engine as a side of a comparison, built as the server builds it.

Options are settings, such as `precision=int8`. A text's "token" is the index of the largest value in its vector. Sides
are compared by it.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from app.messages import ArraysReady, Encode, Text
from app.metrics.steps import StepTimeModel
from app.server.prepare import calibrate, prepare
from app.settings import load_settings
from app.version import VERSION
from tools.peers.turns import Peer, Rows


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Build the engine. The plan sets environment variables that thread pools read before torch is imported.

    The texts of a turn are one request, which the engine divides into steps.
    """
    settings = load_settings(model=str(model), threads=threads, **options)[0]
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    prepared = calibrate(prepared, lambda stage: None)
    import torch

    from app.engine.build import BuildRequest
    from app.engine.encoder.build import build_encoder_engine
    from armature_kernels.linear.linear import Linear
    from armature_kernels.native.library import native_library

    built = build_encoder_engine(
        BuildRequest(prepared.checkpoint, prepared.plan, step_time_model=StepTimeModel(prepared.step_time_table))
    )
    names = count()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        yield [[] for _ in prompts]
        texts = tuple(Text(tuple(prompt)) for prompt in prompts)
        events = built.engine.add(Encode(f"texts-{next(names)}", texts, ("embedding",), time.monotonic()))
        while built.engine.has_work:
            events = events + built.engine.step()
        (answer,) = events
        if not isinstance(answer, ArraysReady):
            raise SystemExit(f"the engine refused the texts: {answer}")
        yield largest(answer.arrays["embedding"].data, len(prompts))

    held = sum(
        {id(layer.form): layer.form.nbytes for layer in built.model.modules() if isinstance(layer, Linear)}.values()
    )
    words = [
        f"armature {VERSION}",
        f"torch {torch.__version__}",
        prepared.plan.weights.precision,
        native_library().reason,
    ]
    return Peer(", ".join(words), held, generate)


def largest(vectors: bytes, rows: int) -> Rows:
    """Return the index of the largest value of each of `count` FP32 vectors, stored one after the other."""
    values = array("f", vectors)
    size = len(values) // rows
    return [[max(range(size), key=values[at : at + size].__getitem__)] for at in range(0, len(values), size)]
