"""Whole models on an NVIDIA GPU give the results of the CPU: the same tokens in FP32, nearly in BF16.

The CPU side is the simulated device. One case of each test runs on the simulated device alone, so that it also runs
without a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from app.backends.base import DeviceBackend
from app.engine.encoder.batching import EncodeState
from app.engine.encoder.device_runner import DeviceEncoderRunner
from app.messages import Encode, Generate, Text, TokensReady
from device_engine import DeviceServed, prompt_of, request_of
from loaded_models import load_on
from planned_machines import bare_plan
from run_encoder import random_texts
from simulated_device import SimulatedDeviceBackend
from tiny_checkpoints import ARCHITECTURES, write_checkpoint
from tiny_encoders import write_encoder

ENCODERS = (
    "BertModel",
    "RobertaModel",
    "MPNetModel",
    "ModernBertModel",
    "NomicBertModel",
    "Qwen3Model",
    "Gemma3TextModel",
)
CUDA = pytest.param("cuda", marks=pytest.mark.cuda)
SHARED = prompt_of(70, 0)
REQUESTS = [
    request_of("greedy", prompt_of(30, 1), temperature=0.0, max_tokens=40),
    request_of("seeded", prompt_of(50, 2), seed=3, temperature=0.8),
    request_of("shaped", SHARED + prompt_of(7, 3), seed=4, temperature=1.2, top_p=0.9, top_k=50, max_tokens=12),
    request_of("penalised", SHARED + prompt_of(5, 4), temperature=0.0, repetition_penalty=1.3, max_tokens=8),
]
FIRST = [
    request_of(f"first-{seed}", prompt_of(20 + seed, seed), temperature=0.0, logprobs=5, max_tokens=1)
    for seed in range(6)
]


def backend_on(place: str, dtype: torch.dtype) -> DeviceBackend:
    if place == "cpu":
        return SimulatedDeviceBackend(dtype)
    from app.backends.cuda import CudaBackend

    backend = CudaBackend(dtype)
    backend.configure(bare_plan(device="cuda", dtype=str(dtype).removeprefix("torch."), threads=4))
    return backend


def served(directory: Path, place: str, dtype: torch.dtype, requests: list[Generate]) -> DeviceServed:
    model: Any = load_on(directory, str(dtype).removeprefix("torch."), place=place)
    return DeviceServed(model, backend_on(place, dtype)).add(*requests).finish()


def places(cases: tuple[str, ...]) -> list[Any]:
    """All of them on a GPU, the first on the twin as well."""
    return [("cpu", cases[0]), *(pytest.param("cuda", case, marks=pytest.mark.cuda) for case in cases)]


@pytest.mark.parametrize(("place", "architecture"), places(tuple(ARCHITECTURES)))
def test_a_decoder_says_what_it_says_on_a_processor(place: str, architecture: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, architecture, seed=11)
    expected = served(tmp_path, "cpu", torch.float32, REQUESTS)
    found = served(tmp_path, place, torch.float32, REQUESTS)
    assert found.said == expected.said
    assert found.runner.graphs.num_replayed > 10, found.runner.graphs.reason
    assert found.num_ahead > 10


@pytest.mark.parametrize(("place", "precision"), places(("bfloat16", "int4")))
def test_rounded_weights_are_near(place: str, precision: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Log-probabilities of first tokens, against FP32's: held in BF16, or four bits as both sides round them."""
    write_checkpoint(tmp_path, seed=11, hidden_size=128, intermediate_size=256)
    exact = "float32" if precision == "bfloat16" else "int4"
    assert first_logprobs(tmp_path, place, precision) == pytest.approx(first_logprobs(tmp_path, "cpu", exact), abs=0.1)


def first_logprobs(directory: Path, place: str, precision: str) -> list[float]:
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    model: Any = load_on(directory, precision, place=place)
    engine = DeviceServed(model, backend_on(place, dtype)).engine
    found: dict[str, float] = {}
    for request in FIRST:
        engine.add(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokensReady):
                found[event.request_id] = event.logprobs[0].logprob
    return [found[request.request_id] for request in FIRST]


@pytest.mark.parametrize(("place", "architecture"), places(ENCODERS))
def test_an_encoder_says_what_it_says_on_a_processor(place: str, architecture: str, tmp_path: Path) -> None:
    write_encoder(tmp_path, architecture, seed=5)
    texts = random_texts((5, 1, 40, 17))
    expected, found = (vectors(tmp_path, where, texts) for where in ("cpu", place))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0.0)


def vectors(directory: Path, place: str, texts: list[Text]) -> torch.Tensor:
    model: Any = load_on(directory, "float32", place=place)
    runner = DeviceEncoderRunner(model, backend_on(place, torch.float32), 160)
    output = model.config.outputs[0]
    rows = runner.run(EncodeState.from_message(Encode("r", tuple(texts), (output,), 0.0)).spans())
    return torch.frombuffer(bytearray(b"".join(row[output] for row in rows)), dtype=torch.float32)
