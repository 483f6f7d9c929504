"""The arithmetic of a load: streams of which every moment is known."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from armature_bench.console import Figure
from armature_bench.http.client import StreamTiming
from armature_bench.http.dialects import TokenUsage
from armature_bench.http.loops import RunLimits, ServerRuns
from armature_bench.http.tally import (
    GenerateRun,
    GenerateTiming,
    LatencyObjective,
    cpu_figure,
    steady_rate,
    stream_figures,
    tokens_per_second_ratio,
)
from armature_bench.http.workload import TextPrompts, UniformLengths, poisson_arrivals


def stream(first: float, step: float, num: int, usage: int | None = None) -> StreamTiming:
    """`num` pieces, the first of them at `first`."""
    counted = None if usage is None else TokenUsage(5, usage)
    return StreamTiming(0.0, tuple((first + step * index, 1) for index in range(num)), counted)


def run_of(*streams: StreamTiming, clients: int = 2, ended: float = 10.0) -> GenerateRun:
    answered = [GenerateTiming(0.0, index % clients, each.num_tokens, each) for index, each in enumerate(streams)]
    return GenerateRun(0.0, ended, cpu_seconds=0.5, num_sent=len(streams), num_units=1000, answered=answered)


def named(run: GenerateRun, objective: LatencyObjective | None = None, closed: bool = True) -> dict[str, Figure]:
    return {
        figure.name: figure
        for figure in stream_figures(ServerRuns("x", "", [run], closed), objective or LatencyObjective())
    }


def test_tokens_are_counted_while_all_clients_have_a_stream() -> None:
    # The first from 1.0 to 5.5, the second from 2.0 to 6.5: both have one from 2.0 to 5.5, and 7 tokens each come after 2.0.
    assert steady_rate([[stream(1.0, 0.5, 10)], [stream(2.0, 0.5, 10)]]) == pytest.approx(14 / 3.5)
    assert steady_rate([[stream(1.0, 0.5, 3)], [stream(9.0, 0.5, 3)]]) is None
    assert named(run_of(stream(1.0, 0.5, 10), stream(2.0, 0.5, 10)))["x tokens"].value == pytest.approx(4.0)


def test_a_piece_carries_its_share_of_what_the_server_counted() -> None:
    assert steady_rate([[stream(1.0, 0.5, 10, usage=20)]]) == pytest.approx(2 * 9 / 4.5)


def test_of_clients_that_were_sent_away_and_of_arrivals_all_counts() -> None:
    run = run_of(stream(1.0, 0.5, 10), stream(2.0, 0.5, 10))
    assert named(run, closed=False)["x tokens"].value == pytest.approx(20 / 6.5)
    run.failures["status 429"] += 1
    assert named(run)["x tokens"].value == pytest.approx(20 / 6.5)
    assert named(run)["x failed, status 429"].value == 1


def test_two_servers_are_held_against_each_other_round_by_round() -> None:
    def side(*steps: float) -> ServerRuns[GenerateTiming]:
        return ServerRuns("x", "", [run_of(stream(1.0, step, 10), clients=1) for step in steps], closed=True)

    assert tokens_per_second_ratio(side(0.1, 0.4, 0.2), side(0.2, 0.2, 0.2)) == pytest.approx(1.0), (
        "ratios of rounds are 2, 0.5 and 1"
    )
    assert tokens_per_second_ratio(side(0.1), ServerRuns("x", "", [GenerateRun()], closed=True)) is None


def test_every_latency_is_what_it_is_called() -> None:
    late = GenerateTiming(0.5, 0, 3, StreamTiming(0.7, ((1.0, 1), (1.2, 2), (1.6, 1)), TokenUsage(5, 5)))
    found = named(GenerateRun(0.0, 2.0, answered=[late], num_sent=1))
    assert found["x TTFT"].value == pytest.approx(500), "from when it should have been sent"
    assert found["x ITL"].value == pytest.approx(300)
    assert found["x ITL"].p99 == pytest.approx(400)
    assert found["x TPOT"].value == pytest.approx(600 / 4)
    assert found["x E2E"].value == pytest.approx(1100)
    assert found["x tokens"].parts == pytest.approx({"overall": 5 / 1.6, "req/s": 0.5, "answered": 1})


def test_an_objective_is_met_by_both_or_not_at_all() -> None:
    run = run_of(stream(1.0, 0.5, 10), stream(2.0, 0.1, 10))
    assert named(run, LatencyObjective(ttft_seconds=1.5))["x goodput"].ratio == 0.5
    assert named(run, LatencyObjective(ttft_seconds=1.5, itl_seconds=0.2))["x goodput"].ratio == 0.0
    assert named(run, LatencyObjective(itl_seconds=0.2))["x goodput"].value == pytest.approx(0.1)


def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    assert "x TPOT" not in named(run_of(stream(1.0, 0.5, 1)))


def test_what_the_client_costs_is_reported() -> None:
    figure = cpu_figure([run_of(stream(1.0, 0.5, 3))])
    assert (figure.value, figure.parts["us/piece"]) == (pytest.approx(5.0), pytest.approx(500.0))


def test_arrivals_are_the_same_for_a_seed_and_come_as_often_as_asked() -> None:
    moments = list(islice(poisson_arrivals(4.0, seed=1), 4000))
    assert moments == list(islice(poisson_arrivals(4.0, seed=1), 4000))
    assert moments != list(islice(poisson_arrivals(4.0, seed=2), 4000))
    gaps = sorted(later - earlier for earlier, later in pairwise([0.0, *moments]))
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 4, rel=0.05)
    assert gaps[len(gaps) // 2] == pytest.approx(0.25 * 0.693, rel=0.1), (
        "of exponential gaps half are shorter than ln 2 of the mean"
    )


@given(st.floats(0.5, 4.0), st.integers(0, 60), st.integers(80, 2000))
def test_texts_have_as_many_tokens_as_wanted(tokens_per_word: float, around: int, wanted: int) -> None:
    words = len(TextPrompts(tokens_per_word, around).prompt(wanted).split())
    assert abs(words * tokens_per_word + around - wanted) <= tokens_per_word / 2 + 1e-6


def test_lengths_and_bounds_are_written_and_kept() -> None:
    assert (str(UniformLengths(128, 128)), str(UniformLengths(64, 128))) == ("128", "64:128")
    assert RunLimits(num_requests=2).allow(1, 1e9)
    assert not RunLimits(num_requests=2).allow(2, 0.0)
    assert not RunLimits(num_requests=2, seconds=5.0).allow(1, 5.0)
