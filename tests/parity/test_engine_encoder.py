"""The encoder engine's answers equal the model's for each text alone, in shared and in recorded steps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from app.engine.encoder.batching import BatchingDelay, EncodeState
from app.engine.encoder.cpu_runner import EncoderRunner, LanePlanner
from app.engine.encoder.engine import EncoderEngine, EncoderLimits
from app.messages import Array, ArraysReady, Encode, Text
from app.models.encoders.encoder import Encoder
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load
from native_levels import at_level, levels
from run_encoder import encoded, random_texts
from tiny_encoders import Modules, write_encoder

LENGTHS = ((9,), (3, 30, 1, 12), (25, 25), (2,), (40, 1, 1, 7, 30))  # of the texts of each request
CLASSIFIER = "BertForSequenceClassification"


def asked(model: Encoder, outputs: tuple[str, ...]) -> list[Encode]:
    """Requests with several texts each, of which some want other things than others."""
    orders = []
    for number, lengths in enumerate(LENGTHS):
        texts = tuple(random_texts(lengths, num_types=model.config.num_types, seed=number))
        normalize, dimensions = ((None, None), (False, None), (True, 8))[number % 3]
        wanted = outputs if number % 2 else outputs[:1]
        if outputs[0] == "embedding":
            orders.append(Encode(f"r{number}", texts, wanted, 0.0, normalize=normalize, dimensions=dimensions))
        else:
            orders.append(Encode(f"r{number}", texts, wanted, 0.0))
    return orders


def answered(runner: EncoderRunner, orders: list[Encode], target: int = 48) -> dict[str, ArraysReady]:
    limits = EncoderLimits(64, 16, runner.model.config.outputs)
    engine = EncoderEngine(runner, limits, BatchingDelay(target))
    told: dict[str, ArraysReady] = {}
    for order in orders:
        assert engine.add(order) == []
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, ArraysReady)
            told[event.request_id] = event
    return told


def tensor_of(array: Array) -> Tensor:
    assert array.datatype == "FP32"
    return torch.from_numpy(np.frombuffer(array.data, "<f4").copy()).view(array.shape)


def expected(model: Encoder, order: Encode) -> dict[str, Tensor]:
    """Text by text, by the words of the order."""
    rows = [encoded(model, (text,), order.outputs) for text in order.texts]
    whole = {name: torch.cat([row[name] for row in rows]) for name in order.outputs}
    if "embedding" in whole:
        cut = whole["embedding"][:, : order.dimensions]
        unit = model.config.pooling.normalizes if order.normalize is None else order.normalize
        whole["embedding"] = F.normalize(cut, dim=-1) if unit else cut
    return whole


@pytest.mark.parametrize(
    "architecture", ["BertModel", CLASSIFIER, "ModernBertModel", "MPNetModel", "Qwen3Model", "RobertaModel"]
)
def test_every_request_gets_what_its_texts_are_alone(architecture: str, tmp_path: Path) -> None:
    modules = Modules() if architecture == "BertModel" else None
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture, modules=modules)))
    orders = asked(model, model.config.outputs)
    told = answered(EncoderRunner(model, 64), orders)
    for order in orders:
        answer = told[order.request_id]
        assert answer.num_tokens == sum(len(text.token_ids) for text in order.texts)
        for name, wanted in expected(model, order).items():
            torch.testing.assert_close(tensor_of(answer.arrays[name]), wanted, atol=2e-5, rtol=0.0)


@pytest.mark.parametrize("level", levels())
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "int8"])
def test_every_step_is_native(level: str, precision: str, tmp_path: Path) -> None:
    with at_level(level):
        model = cast(Encoder, load(write_encoder(tmp_path / "model"), precision))
        runner = EncoderRunner(model, 64)
        answered(runner, asked(model, ("embedding",)))
    assert runner.replay.reason == "" and runner.replay.num_runs > 3 and runner.is_native


def test_types_that_a_model_has_no_rows_for_are_left_out(tmp_path: Path) -> None:
    model = cast(Encoder, load(write_encoder(tmp_path / "model", "RobertaModel")))  # one type
    runner = EncoderRunner(model, 64)
    with_types, without = Text((5, 6, 7), (0, 1, 1)), Text((5, 6, 7))
    rows = [
        runner.run(EncodeState.from_message(Encode("r", (text,), ("embedding",), 0.0)).spans())
        for text in (with_types, without)
    ]
    assert rows[0] == rows[1]


def test_a_prompts_tokens_are_not_pooled_where_the_checkpoint_says_so(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "model", modules=Modules(prompts={"query": "hello world"}))
    says = json.loads((directory / "1_Pooling" / "config.json").read_text())
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({**says, "include_prompt": False}))
    model = cast(Encoder, load(directory))
    (plain,) = random_texts((9,))
    text = replace(plain, num_prompt_tokens=4)
    (rows,) = EncoderRunner(model, 64).run(
        EncodeState.from_message(Encode("r", (text,), ("embedding",), 0.0, normalize=False)).spans()
    )
    wanted = encoded(model, (plain,), ("last_hidden_state",))["last_hidden_state"][4:].mean(0)
    torch.testing.assert_close(
        torch.from_numpy(np.frombuffer(rows["embedding"], "<f4").copy()), wanted, atol=1e-5, rtol=0.0
    )


RECORDABLE = ["BertModel", CLASSIFIER, "ModernBertModel", "NomicBertModel", "MPNetModel", "Qwen3Model"]


@pytest.mark.parametrize("architecture", RECORDABLE)
@pytest.mark.parametrize("precision", ["int8", "bfloat16", "float32"])
def test_steps_run_again_say_the_same(architecture: str, precision: str, tmp_path: Path) -> None:
    if not has_kernel(OpCode.LINEAR_INT):
        pytest.skip("torch's own products serve here")
    model = cast(Encoder, load(write_encoder(tmp_path / "model", architecture), precision))
    for outputs in (model.config.outputs[:1], model.config.outputs):
        orders = asked(model, outputs)
        eager, again = EncoderRunner(model, 64, "for this test"), EncoderRunner(model, 64)
        said = answered(eager, orders)
        replayed = answered(again, orders)
        assert again.replay.reason == "" and again.replay.most_tokens == 64
        assert again.replay.num_runs > 3 and eager.replay.num_runs == 0
        assert {name: told.arrays for name, told in replayed.items()} == {
            name: told.arrays for name, told in said.items()
        }


@pytest.mark.cases(test=4)
@pytest.mark.parametrize("architecture", RECORDABLE)
@pytest.mark.parametrize("precision", ["int8", "bfloat16", "float32"])
@pytest.mark.parametrize("threads", [2, 3])
def test_lanes_say_what_all_threads_together_say(
    architecture: str, precision: str, threads: int, tmp_path: Path
) -> None:
    """To the bit where a product's sums do not depend on how many rows there are: a single one of bf16 has an order of its own."""
    if not has_kernel(OpCode.LINEAR_INT):
        pytest.skip("torch's own products serve here")
    model = cast(
        Encoder, load(write_encoder(tmp_path / "model", architecture), precision, deterministic=precision == "bfloat16")
    )
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for outputs in (model.config.outputs[:1], model.config.outputs):
            orders = asked(model, outputs)
            eager, together = EncoderRunner(model, 128, "for this test"), EncoderRunner(model, 128)
            lanes = EncoderRunner(model, 128, planner=LanePlanner(min_lane_tokens=8, max_lanes_per_thread=2))
            said = [answered(each, orders, 96) for each in (together, lanes)]
            assert {name: told.arrays for name, told in answered(eager, orders, 96).items()} == {
                name: told.arrays for name, told in said[0].items()
            }
            for name, told in said[0].items():
                for output, array in told.arrays.items():
                    within = (
                        1e-6 if output == "logits" else 0.0
                    )  # torch's product of a head's rows, which lie in another order
                    torch.testing.assert_close(
                        tensor_of(said[1][name].arrays[output]), tensor_of(array), atol=within, rtol=within
                    )
            assert lanes.replay.num_lanes > 4 and together.replay.num_lanes == 0
    finally:
        torch.set_num_threads(before)
