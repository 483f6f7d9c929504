"""Our decoder engine as a side of a comparison, built as the server builds it.

Options are settings, such as `precision=int4 int8_copy=off`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.messages import Event, Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from app.metrics.steps import StepTimeModel
from app.server.prepare import Prepared, calibrate, prepare
from app.settings import load_settings
from app.version import VERSION
from tools.peers.turns import Peer, Rows

if TYPE_CHECKING:
    from torch.nn import Module

    from app.engine.build import BuildRequest


def load(model: Path, threads: int, options: dict[str, str]) -> Peer:
    """Build the engine. The plan sets environment variables that thread pools read before torch is imported.

    No client waits for these streams, so prefill is not limited by inter-token latency. Speculation is off, so that
    every side computes one token per step: untrained models repeat themselves, which is easy to draft.
    """
    request, prepared = build_request(model, threads, {"itl_target_ms": 60_000, "speculation": "off", **options})
    from app.engine.decoder.build import build_decoder_engine
    from armature_bench.engine.driver import largest_cache_bytes, product_costs

    built = build_decoder_engine(request)
    weights = product_costs(
        built.model,
        prepared.checkpoint.model_config.vocab_size,
        largest_cache_bytes(prepared.facts, built.backend.device),
    )
    names = count()

    def generate(prompts: Rows, tokens: int) -> Iterator[Rows]:
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        rows = {f"row-{next(names)}": (prompt, list[int]()) for prompt in prompts}
        yield [picked for _, picked in rows.values()]
        for name, (prompt, _) in rows.items():
            _collect(built.engine.add(Generate(name, tuple(prompt), params, time.monotonic())), rows)
        while built.engine.has_work:
            _collect(built.engine.step(), rows)
            yield [picked for _, picked in rows.values()]

    share = f"{held_bytes(built.model) / prepared.checkpoint.needs().num_parameters:.3f} bytes a parameter held"
    return Peer(f"{description(prepared)}, {share}", weights.num_bytes, generate)


def build_request(model: Path, threads: int, options: Mapping[str, Any]) -> tuple[BuildRequest, Prepared]:
    """Plan and calibrate as the server does, and return what an engine is built from."""
    prepared = prepare(load_settings(model=str(model), threads=threads, **options)[0])
    os.environ.update(prepared.plan.environment())
    prepared = calibrate(prepared, lambda stage: None)
    from app.engine.build import BuildRequest

    times = StepTimeModel(prepared.step_time_table)
    return BuildRequest(prepared.checkpoint, prepared.plan, step_time_model=times), prepared


def held_bytes(model: Module) -> int:
    from armature_kernels.linear.linear import Linear

    return sum({id(each.form): each.form.nbytes for each in model.modules() if isinstance(each, Linear)}.values())


def description(prepared: Prepared) -> str:
    import torch

    from armature_kernels.native.library import native_library

    words = (
        f"armature {VERSION}",
        f"torch {torch.__version__}",
        prepared.plan.weights.precision,
        native_library().reason,
    )
    return ", ".join(words)


def _collect(events: list[Event], rows: dict[str, tuple[Any, list[int]]]) -> None:
    for event in events:
        if isinstance(event, RequestFailed):
            raise SystemExit(f"the engine refused a row: {event.error}")
        if isinstance(event, TokensReady | SequenceFinished):
            rows[event.request_id][1].extend(event.token_ids)
