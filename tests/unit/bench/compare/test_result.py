"""A machine's result file: what is written is read again, and what is none is refused with what would be right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, read_result, write_result
from armature_bench.console import MeasurementFailed
from synthetic_results import made_decoder, made_encoder


@pytest.mark.parametrize("result", [made_decoder(samples=4), made_encoder(samples=4)], ids=["decoder", "encoder"])
def test_what_is_written_is_read_again(tmp_path: Path, result: CompareResult) -> None:
    path = tmp_path / "result.json"
    write_result(result, path)
    assert read_result(path) == result
    assert [each.name for each in tmp_path.iterdir()] == ["result.json"]
    assert path.read_bytes().startswith(b'{"schema":"armature-compare/1"')


WHOLE = made_decoder(samples=2).model_dump_json(by_alias=True)


def changed(**fields: Any) -> str:
    return json.dumps({**json.loads(WHOLE), **fields})


def point_with(**fields: Any) -> bytes:
    (first, *_) = json.loads(WHOLE)["points"]
    return changed(points=[{**first, **fields}]).encode()


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "is empty"),
        (b" \n", "is empty"),
        (b"{", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"\xff\xfe", "cannot be read"),
        (b"[]", "schema None"),
        (b'{"schema": "armature-compare/2"}', "schema 'armature-compare/2'; this version reads 'armature-compare/1'"),
        (changed(points=[]).encode(), "is damaged: points"),
        (changed(began_at="now").encode(), "is damaged: began_at"),
        (point_with(gap_at=[1.0]), "is damaged: points.0: .*gap_at and gap_seconds differ"),
        (point_with(steps={"at": [1.0]}), "is damaged: points.0.steps: .*columns differ"),
        (changed(surprise=1).encode(), "is damaged: surprise"),
        (changed(began_at=float("nan")).encode(), "is damaged: began_at"),
    ],
)
def test_what_is_no_result_is_refused(tmp_path: Path, content: bytes, complaint: str) -> None:
    path = tmp_path / "result.json"
    path.write_bytes(content)
    with pytest.raises(MeasurementFailed, match=complaint):
        read_result(path)


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match="cannot be read"):
        read_result(tmp_path / "nothing.json")
    with pytest.raises(MeasurementFailed, match="cannot be written"):
        write_result(made_decoder(), tmp_path / "nowhere" / "result.json")


def test_loads_are_called_by_what_they_ask() -> None:
    assert LoadSpec(kind="generate", clients=1, tokens=128, max_tokens=128).name == "1 client, prompts of 128"
    assert LoadSpec(kind="embed", clients=1, batch=8, tokens=512).name == "batch 8 of 512 tokens"
    assert LoadSpec(kind="embed", clients=32, tokens=128).name == "32 clients, batch 1 of 128 tokens"
    assert LoadSpec(kind="infer", clients=1, batch=4, tokens=0).name == "batch 4"


def test_rates_are_of_the_seconds_in_which_all_asked() -> None:
    load = LoadSpec(kind="embed", clients=1, batch=8, tokens=128)
    assert LoadPoint(load=load, began=0.0, seconds=2.0, samples=16, read_tokens=2048).tokens_per_second == 1024
    assert (
        LoadPoint(load=load, began=0.0, seconds=2.0, samples=16, read_tokens=8, generated_tokens=64).tokens_per_second
        == 32
    )
    assert LoadPoint(load=load, began=0.0, seconds=2.0, samples=16).samples_per_second == 8


def test_a_models_name_is_not_its_shape() -> None:
    one, other = made_decoder(), made_decoder()
    other.info["model"]["name"] = "called otherwise"
    assert one.model_shape == other.model_shape
    assert "name" not in one.model_shape
