"""Measure decode steps whose sequences have different LoRA adapters against the same steps without adapters.

    python -m tools.measure.adapters --model DIR --precision int4 --loras 8 --rank 16 --rows 8

Both kinds of steps run in one engine, in turns: the speed of a shared machine changes. The adapters have random weights in
all linear layers.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from app.messages import LoadedAdapter, SetAdapter
from app.server.prepare import prepare
from app.settings import Settings

if TYPE_CHECKING:
    from armature_bench.engine.driver import DecoderDriver


def measured_seconds(
    given: argparse.Namespace, driver: DecoderDriver, adapters: list[LoadedAdapter]
) -> dict[bool, list[float]]:
    """Return the seconds of steps, or of prompts, with adapters and without."""
    import torch

    from armature_bench.engine.decoder import gc_disabled

    seconds: dict[bool, list[float]] = {False: [], True: []}
    with torch.inference_mode(), gc_disabled():
        for _ in range(given.rounds):
            for with_adapters, times in seconds.items():
                driver.use_adapters(adapters if with_adapters else [None])
                if given.prefill:
                    times += [driver.prefill(given.prefill) for _ in range(given.steps)]
                else:
                    times += driver.decode(given.rows, given.steps)
    return seconds


def main() -> None:
    """Print the median seconds of both kinds of steps, and the share of the speed that adapters leave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--precision", default="int4")
    for flag, default in (
        ("--loras", 8),
        ("--rank", 16),
        ("--rows", 8),
        ("--rounds", 5),
        ("--steps", 20),
        ("--prefill", 0),
    ):
        parser.add_argument(flag, type=int, default=default)
    given = parser.parse_args()
    settings = Settings(
        model=given.model, precision=given.precision, calibrate="off", speculation="off", max_model_len=1024
    )
    prepared = prepare(settings)
    os.environ.update(prepared.plan.environment())
    import torch

    from app.engine.build import BuildRequest
    from app.engine.decoder.build import build_decoder_engine
    from app.weights.lora.adapter import ServedAdapters, adapted_layers
    from app.weights.open import require_checkpoint
    from armature_bench.engine.driver import DecoderDriver
    from armature_bench.http.workload import TokenPrompts
    from armature_kernels.linear.lora import LoraWeights

    checkpoint = require_checkpoint(prepared.checkpoint)
    layers = adapted_layers(checkpoint.decoder)
    served = ServedAdapters(layers, {}, given.loras, given.rank)
    built = build_decoder_engine(BuildRequest(checkpoint, prepared.plan, adapters=served))
    num_bytes = 0
    for slot in range(given.loras):
        weights = {
            name: LoraWeights.pack(
                torch.randn(given.rank, inputs) / inputs**0.5,
                torch.randn(outputs, given.rank) / 100,
                built.model.norm.dtype,
            )
            for name, (outputs, inputs) in layers.items()
        }
        num_bytes += sum(each.nbytes for each in weights.values())
        built.engine.add(SetAdapter(slot, weights))
    driver = DecoderDriver(built.engine, TokenPrompts(range(2, checkpoint.decoder.vocab_size)), 1024)
    seconds = measured_seconds(given, driver, [LoadedAdapter(slot, slot) for slot in range(given.loras)])
    base, mixed = median(seconds[False]), median(seconds[True])
    what = f"prefill of {given.prefill} tokens" if given.prefill else f"decode step of {given.rows} rows"
    print(f"{given.loras} adapters of rank {given.rank}: {num_bytes / 1e6:.0f} MB")
    print(f"{what}: {base * 1e3:.2f} ms without, {mixed * 1e3:.2f} ms with adapters: {base / mixed:.3f} of the speed")


if __name__ == "__main__":
    main()
