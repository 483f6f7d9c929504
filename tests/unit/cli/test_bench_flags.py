"""Named objectives of `bench http`, and flags of `bench engine` that one kind of model has."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from app.cli.parser import parse_arguments
from armature_bench.console import MeasurementFailed
from armature_bench.flags import bench_flags
from armature_bench.http.generate import GenerateBench
from armature_bench.http.tally import NAMED_OBJECTIVES, LatencyObjective
from armature_bench.run import REQUEST_KINDS


def objective(*flags: str) -> LatencyObjective:
    work: Any = REQUEST_KINDS["generate"].work(parse_arguments(["bench", "http", *flags]))
    assert isinstance(work, GenerateBench)
    return work.objective


def test_turns_are_taken_within_200_ms() -> None:
    assert objective("--slo", "turn-taking") == LatencyObjective(ttft_seconds=0.2)
    assert objective() == LatencyObjective()


def test_times_that_are_given_go_before_those_of_the_name() -> None:
    flags = ("--slo", "turn-taking", "--slo-ttft-ms", "150", "--slo-itl-ms", "50")
    assert objective(*flags) == LatencyObjective(0.15, 0.05)


def test_the_flag_offers_all_names() -> None:
    assert set(bench_flags()["--slo"]["choices"]) == set(NAMED_OBJECTIVES)


def test_embeddings_have_no_first_token() -> None:
    arguments: argparse.Namespace = parse_arguments(["bench", "http", "--kind", "embed", "--slo", "turn-taking"])
    with pytest.raises(MeasurementFailed, match="--slo does not apply to --kind embed"):
        REQUEST_KINDS["embed"].work(arguments)


def test_pictures_are_of_chats() -> None:
    arguments = parse_arguments(["bench", "http", "--image", "448x320"])
    with pytest.raises(MeasurementFailed, match="--image needs --api openai"):
        REQUEST_KINDS["generate"].work(arguments)
    work: Any = REQUEST_KINDS["generate"].work(
        parse_arguments(["bench", "http", "--image", "448x320", "--api", "openai"])
    )
    assert work.workload.image == (448, 320) and work.details()["image"] == "448x320"


def test_a_width_of_beams_is_a_number() -> None:
    assert parse_arguments(["bench", "engine", "--beam-width", "4"]).beam_width == 4
    assert parse_arguments(["bench", "engine"]).beam_width is None
