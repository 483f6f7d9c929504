"""Our encoder engine as a side of a comparison, built as the server builds it.

Options are settings, such as `precision=int8`. A text's "token" is the index of the largest value in its vector. Sides
are compared by it.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from app.messages import ArraysReady, Encode, Text
from tools.peers.ours import build_request, description, held_bytes
from tools.peers.turns import Peer, Rows


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Build the engine. The plan sets environment variables that thread pools read before torch is imported.

    The texts of a turn are one request, which the engine divides into steps.
    """
    request, prepared = build_request(model, threads, options)
    from app.engine.encoder.build import build_encoder_engine

    built = build_encoder_engine(request)
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

    return Peer(description(prepared), held_bytes(built.model), generate)


def largest(vectors: bytes, rows: int) -> Rows:
    """Return the index of the largest value of each FP32 vector."""
    values = array("f", vectors)
    size = len(values) // rows
    return [[max(range(size), key=values[at : at + size].__getitem__)] for at in range(0, len(values), size)]
