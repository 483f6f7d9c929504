"""`armature bench http --kind infer`: rows generated from a signature, counts of the answers, and refusals."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy
import pytest

from app.api.oip.tensors import VALUE_BYTES, parse_infer_request
from app.cli.parser import parse_arguments
from app.settings import Settings
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed
from armature_bench.http import infer, loops
from armature_bench.http.infer import InferBench, InferWorkload, build_bodies, parse_inputs
from armature_bench.http.load import LoadJob, LoadLevel, ServerTarget, measure_load
from armature_bench.http.loops import RunLimits
from armature_bench.http.wire import HttpBody
from armature_bench.http.workload import UniformLengths
from armature_bench.run import run_bench
from scripted_peer import ScriptedPeer, running

IDS = {"name": "ids", "datatype": "INT64", "shape": [-1, 5]}
DENSE = {"name": "dense", "datatype": "FP32", "shape": [-1, -1, 2]}


def job(peer: ScriptedPeer, rows: InferWorkload | None = None, model: str | None = None) -> LoadJob:
    target = ServerTarget(peer.url, api="oip", model=model)
    return LoadJob(
        "peer",
        [target],
        [LoadLevel(clients=3)],
        InferBench(rows or InferWorkload(4)),
        RunLimits(num_requests=9),
        warm_up=0,
    )


def named(outcome: BenchOutcome) -> dict[str, Figure]:
    return {figure.name: figure for figure in outcome.figures}


def read(body: HttpBody) -> dict[str, Any]:
    """As our own server reads it, by name."""
    length = int(body.headers.partition(f"{infer.BINARY_HEADER}: ")[2].strip())
    inference = parse_infer_request(body.content[:length], body.content[length:])
    assert inference.parameters.binary_data_output
    return dict(inference.inputs)


def made(datatype: str, shape: Sequence[int], rows: InferWorkload) -> Any:
    (first, *_) = build_bodies(
        parse_inputs({"inputs": [{"name": "x", "datatype": datatype, "shape": [-1, *shape]}]}, "/x"), rows
    )
    return read(first)["x"]


@pytest.mark.parametrize("datatype", list(VALUE_BYTES))
def test_our_own_server_reads_rows_of_every_datatype(datatype: str) -> None:
    array = made(datatype, (3, -1), InferWorkload(2, UniformLengths(7, 7)))
    assert (array.datatype, array.shape) == (datatype, (2, 3, 7))
    assert len(set(array.data)) > 1, "rows are not all one number"


def test_whole_numbers_lie_where_they_are_wanted() -> None:
    few = numpy.frombuffer(made("INT64", (1000,), InferWorkload(1)).data, numpy.int64)
    many = numpy.frombuffer(made("INT64", (1000,), InferWorkload(1, below=500)).data, numpy.int64)
    small = numpy.frombuffer(made("INT8", (1000,), InferWorkload(1, below=500)).data, numpy.int8)
    assert set(few) == {0, 1}, "any table has two rows"
    assert 0 <= many.min() < 20 and 480 < many.max() < 500
    assert small.min() >= 0, "nothing passes the type's own end"


def test_brain_floats_are_numbers_near_nought() -> None:
    halves = numpy.frombuffer(made("BF16", (1000,), InferWorkload(1)).data, numpy.uint16)
    values = (halves.astype(numpy.uint32) << 16).view(numpy.float32)
    assert abs(float(values.mean())) < 0.2 and 0.8 < float(values.std()) < 1.2


def test_bodies_differ_and_are_the_same_again(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = parse_inputs({"inputs": [IDS, DENSE]}, "/x")
    again = [build_bodies(inputs, InferWorkload(2, UniformLengths(3, 9))) for _ in range(2)]
    assert again[0] == again[1] and len(set(again[0])) == infer.MAX_BODIES
    assert len({read(body)["dense"].shape for body in again[0]}) > 3, "free dimensions are drawn"
    assert build_bodies(inputs, InferWorkload(2, seed=1)) != build_bodies(inputs, InferWorkload(2))
    monkeypatch.setattr(infer, "MAX_TOTAL_BODY_BYTES", 3 * len(build_bodies(inputs, InferWorkload(2))[0].content))
    assert len(build_bodies(inputs, InferWorkload(2))) == 3, "large rows are few"
    monkeypatch.setattr(infer, "MAX_TOTAL_BODY_BYTES", 1)
    assert len(build_bodies(inputs, InferWorkload(2))) == 1


def test_rows_are_counted() -> None:
    with running(ScriptedPeer(activation_group=[IDS, DENSE])) as peer:
        outcome = measure_load(job(peer))
    figures = named(outcome)
    assert list(figures) == ["×3 samples", "×3 latency", "this client, of a core"]
    assert figures["×3 samples"].unit == "row/s" and figures["×3 samples"].parts["answered"] == 9
    assert figures["×3 samples"].parts["overall"] == pytest.approx(4 * figures["×3 samples"].parts["req/s"])
    assert [request["rows"] for request in outcome.details["runs"][0]["requests"]] == [4] * 9
    assert len(peer.bodies) == 1 + 9, "one request asks whether tensors come"
    assert "generated from the model's signature" in "\n".join(outcome.notes)


def test_failures_are_reported_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MIN_PAUSE_SECONDS", 0.0)
    with running(ScriptedPeer(activation_group=[IDS], fault={4: "429"}.get)) as peer:
        figures = named(measure_load(job(peer)))
    assert figures["×3 failed, status 429"].value == 1 and figures["×3 samples"].parts["answered"] == 8


@pytest.mark.parametrize(
    ("peer", "complaint"),
    [
        (
            ScriptedPeer(activation_group=[{"name": "text", "datatype": "BYTES", "shape": [-1]}]),
            r"takes 'text' of datatype BYTES.*--kind embed",
        ),
        (ScriptedPeer(activation_group=[]), "takes no inputs"),
        (ScriptedPeer(activation_group=[{"name": "x"}]), "does not describe the model's inputs"),
        (
            ScriptedPeer(activation_group=[IDS], output_indices=lambda rows: {"hello": rows}),
            "did not answer with tensors",
        ),
        (
            ScriptedPeer(activation_group=[IDS], output_indices=lambda rows: {"outputs": [{"shape": [rows + 1]}]}),
            r"request of 4 rows with tensors of \[5\] rows",
        ),
    ],
)
def test_what_is_no_measurement_is_refused(peer: ScriptedPeer, complaint: str) -> None:
    with running(peer), pytest.raises(MeasurementFailed, match=complaint):
        measure_load(job(peer))


def test_a_model_that_is_not_there_is_reported_in_the_servers_words() -> None:
    with (
        running(ScriptedPeer(activation_group=[IDS])) as peer,
        pytest.raises(MeasurementFailed, match="/v2/models/other answered 404"),
    ):
        measure_load(job(peer, model="other"))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--kind=infer", "--max-tokens=4"], "--max-tokens does not apply to --kind infer"),
        (["--kind=infer", "--texts=4"], "--texts does not apply to --kind infer"),
        (["--kind=infer", "--api=openai"], "--api openai does not support --kind infer: use oip"),
        (["--kind=embed", "--batch=4"], "--batch does not apply to --kind embed"),
        (["--below=4"], "--below does not apply to --kind generate"),
    ],
)
def test_what_means_nothing_is_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(MeasurementFailed, match=complaint):
        run_bench(Settings(), parse_arguments(["bench", "http", *flags]))
