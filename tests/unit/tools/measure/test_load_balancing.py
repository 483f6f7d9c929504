"""Results of a run behind a router: who answered, what was cached, and what a figure is compared with."""

from __future__ import annotations

import math

import pytest

from armature_bench.http.client import StreamTiming
from armature_bench.http.tally import GenerateRun, GenerateTiming
from armature_bench.http.workload import TextPrompts
from tools.measure.load_balancing import Counted, Load, Row, SessionPrompts, best_by_weights, chosen_routers
from tools.peers.routers.processes import NAMES


def answered(intended: float, first: float, last: float) -> GenerateTiming:
    return GenerateTiming(intended, 0, 2, StreamTiming(intended, ((first, 1), (last, 1))))


def test_a_row_counts_from_when_a_request_should_have_been_sent() -> None:
    run = GenerateRun(0.0, 10.0, answered=[answered(1.0, 1.5, 3.0), answered(2.0, 5.0, 8.0)])
    run.failures.update({"status 429": 3, "broken off": 1})
    row = Row.of(Load(part=0.5), "weights", run, [Counted(3.0, 60.0, 10.0), Counted(1.0, 20.0, 10.0)])
    assert (row.first_token_p50, row.first_token_p99, row.whole_p50, row.whole_p99) == (0.5, 3.0, 2.0, 6.0)
    assert (row.tokens_per_second, row.answered, row.refused, row.failed) == (0.4, 2, 3, 1)
    assert row.line() == "| 0.5 | weights | 0.50 / 3.00 | 2.00 / 6.00 | – | 0 | 2 / 3 / 1 | 75% : 25% | 25% |"
    assert "| 2.00 / 6.00 | 1.20 |" in row.line(best_p99=5.0)


def test_a_load_says_what_it_is() -> None:
    assert (str(Load(part=0.8)), str(Load(clients=16))) == ("0.8", "16 clients")


def row(load: str, rule: str, p99: float) -> Row:
    return Row(load, rule, 0.0, 0.0, 0.0, p99, 0.0, 1, 0, 0, (1.0,))


def test_a_p99_is_compared_with_the_best_that_weights_do_under_the_same_load() -> None:
    rows = [
        row("0.5", "nginx weights", 4.0),
        row("0.5", "nginx least_conn, weights", 3.0),
        row("0.5", "envoy picker", 2.0),
        row("0.8", "nginx weights", 1.0),
    ]
    assert (best_by_weights(rows, "0.5"), best_by_weights(rows, "0.8")) == (3.0, 1.0)
    assert math.isnan(best_by_weights(rows, "16 clients"))


def test_routers_are_chosen_by_program_or_by_program_and_policy() -> None:
    assert chosen_routers(["smg least_load", "nginx"]) == [*NAMES[:4], "smg least_load"]
    with pytest.raises(SystemExit, match="haproxy is no router: choose of nginx round-robin, "):
        chosen_routers(["haproxy"])


def test_prompts_of_a_session_begin_alike_and_end_differently() -> None:
    prompts = SessionPrompts(TextPrompts(1.0, 0.0, seed=3), sessions=2, shared_tokens=30)
    drawn = [prompts.prompt(5).split() for _ in range(40)]
    assert {len(words) for words in drawn} == {35}
    assert len({tuple(words[:30]) for words in drawn}) == 2
    assert len({tuple(words) for words in drawn}) == 40


METRICS = """\
armature_requests_total{api="openai",outcome="length"} 7.0
armature_requests_total{api="native",outcome="stop"} 2.0
armature_requests_total{api="openai",outcome="overloaded"} 5.0
armature_tokens_total{kind="prompt"} 80.0
armature_tokens_total{kind="cached"} 30.0
armature_requests_waiting 3.0
"""


def test_what_a_server_did_is_read_from_its_metrics() -> None:
    assert (Counted.read(""), Counted.read(METRICS)) == (Counted(), Counted(9.0, 80.0, 30.0))
    assert Counted(9.0, 80.0, 30.0) - Counted(4.0, 20.0, 5.0) == Counted(5.0, 60.0, 25.0)
