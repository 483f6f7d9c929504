"""Results of a run behind a load balancer: who answered, and the available rules."""

from __future__ import annotations

import pytest

from app.bench.http.client import StreamTiming
from app.bench.http.tally import GenerateRun, GenerateTiming
from tools.measure.load_balancing import Load, Row, completed, rules_for


def answered(intended: float, first: float, last: float) -> GenerateTiming:
    return GenerateTiming(intended, 0, 2, StreamTiming(intended, ((first, 1), (last, 1))))


def test_a_row_counts_from_when_a_request_should_have_been_sent() -> None:
    run = GenerateRun(0.0, 10.0, answered=[answered(1.0, 1.5, 3.0), answered(2.0, 5.0, 8.0)])
    run.failures.update({"status 429": 3, "broken off": 1})
    row = Row.of(Load(part=0.5), "weights", run, [3.0, 1.0])
    assert (row.first_token_p50, row.first_token_p99, row.whole_p50, row.whole_p99) == (0.5, 3.0, 2.0, 6.0)
    assert (row.tokens_per_second, row.answered, row.refused, row.failed) == (0.4, 2, 3, 1)
    assert row.line() == "| 0.5 | weights | 0.50 / 3.00 | 2.00 / 6.00 | 0 | 2 / 3 / 1 | 75% : 25% |"


def test_a_load_says_what_it_is() -> None:
    assert (str(Load(part=0.8)), str(Load(clients=16))) == ("0.8", "16 clients")


def test_rules_differ_by_weights_and_connections() -> None:
    found = {name: (tuple(rule.weights), rule.least_connections) for name, rule in rules_for([100, 25]).items()}
    assert found == {
        "round-robin": ((1, 1), False),
        "weights": ((100, 25), False),
        "least_conn": ((1, 1), True),
        "least_conn, weights": ((100, 25), True),
    }


@pytest.mark.parametrize(
    ("metrics", "count"),
    [
        ("", 0.0),
        (
            'armature_requests_total{api="openai",outcome="length"} 7.0\narmature_requests_total{api="native",outcome="stop"} 2.0\n'
            'armature_requests_total{api="openai",outcome="refused"} 5.0\narmature_requests_waiting 3.0\n',
            9.0,
        ),
    ],
)
def test_who_was_answered_is_read_from_the_metrics(metrics: str, count: float) -> None:
    assert completed(metrics) == count
