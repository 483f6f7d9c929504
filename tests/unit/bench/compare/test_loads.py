"""The loads of `bench compare`, and those that a model or a plan does not allow."""

from __future__ import annotations

from typing import Any

import pytest

from armature_bench.compare.loads import protocol_loads
from armature_bench.console import MeasurementFailed


def info(kind: str, context: int, places: int = 64) -> dict[str, Any]:
    plan = {"max_model_len": {"value": context}, "max_running_seqs": {"value": places}}
    return {"model": {"kind": kind}, "plan": plan}


def test_generations() -> None:
    wanted = protocol_loads(info("decoder", 2048))
    found = [(load.clients, load.tokens, load.max_tokens) for load in wanted.loads]
    assert found == [(clients, length, 128) for length in (128, 512) for clients in (1, 2, 4, 8, 16, 32)]
    assert not wanted.left_out


def test_no_more_clients_than_places() -> None:
    wanted = protocol_loads(info("decoder", 2048, places=5))
    assert {load.clients for load in wanted.loads} == {1, 2, 4}
    assert wanted.left_out == ["More than 4 clients are left out: this plan runs 5 sequences at once."]


def test_texts_by_batch_and_then_by_clients() -> None:
    wanted = protocol_loads(info("encoder", 512, places=1))
    one = [(load.batch, load.tokens) for load in wanted.loads if load.clients == 1]
    assert one == [(batch, length) for length in (128, 512) for batch in (1, 4, 8, 16, 32)]
    assert [(load.clients, load.batch, load.tokens) for load in wanted.loads[10:]] == [
        (n, 1, 128) for n in (2, 4, 8, 16, 32)
    ]
    assert not wanted.left_out


def test_rows() -> None:
    wanted = protocol_loads(info("program", 1))
    assert [load.batch for load in wanted.loads if load.clients == 1] == [1, 4, 8, 16, 32]
    assert {load.tokens for load in wanted.loads} == {0}


@pytest.mark.parametrize(
    ("kind", "context", "lengths", "answer"),
    [
        ("decoder", 640, {128, 512}, 128),
        ("decoder", 639, {128}, 128),
        ("decoder", 255, {127}, 128),
        ("decoder", 2, {1}, 1),
        ("encoder", 511, {128}, 0),
        ("encoder", 100, {100}, 0),
    ],
)
def test_lengths_that_a_model_cannot_read(kind: str, context: int, lengths: set[int], answer: int) -> None:
    wanted = protocol_loads(info(kind, context))
    assert {load.tokens for load in wanted.loads} == lengths
    assert {load.max_tokens for load in wanted.loads} == {answer}
    assert all(load.tokens + load.max_tokens <= context for load in wanted.loads)
    left_out = [length for length in (128, 512) if length not in lengths]
    for length in left_out:
        assert any(
            f"of {length} tokens" in told and f"has a context of {context} tokens" in told for told in wanted.left_out
        )
    assert any(told.startswith("Measured instead") for told in wanted.left_out) == (not lengths & {128, 512})


@pytest.mark.parametrize(
    "strange", [{}, {"model": {"kind": "oracle"}}, {"model": {"kind": "decoder"}, "plan": {}}, {"model": None}]
)
def test_what_is_no_server_of_ours(strange: dict[str, Any]) -> None:
    with pytest.raises(MeasurementFailed, match="bench compare only measures Armature servers"):
        protocol_loads(strange)
