"""The answer compares at one p99, claims no more than was measured, and says in money what it says in tokens."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from armature_bench.compare.result import CompareResult, LoadPoint, LoadSpec, write_result
from armature_bench.report.comparison import (
    _ratio_phrase,
    headline_sentences,
    rate_within_p99,
    repeat_variation,
    shared_p99,
)
from synthetic_results import made_encoder

SIZE = "prompts of 128 tokens, answers of 16"


def point(clients: int, rate: float, p99: float) -> LoadPoint:
    """So many tokens a second, each request taking as long."""
    load = LoadSpec(kind="generate", clients=clients, tokens=128, max_tokens=16)
    return LoadPoint(
        load=load, began=0, seconds=10, samples=10, generated_tokens=int(rate * 10), request_seconds=[p99] * 10
    )


def made(name: str, *curve: tuple[int, float, float], **fields: Any) -> CompareResult:
    points = [point(*each) for each in curve]
    given = {
        "schema": "armature-compare/1",
        "name": name,
        "began_at": 0.0,
        "measured_by": "0",
        "info": {},
        "points": points,
    }
    return CompareResult.model_validate(given | fields)


FIRST = made("first", (1, 100, 1.0), (2, 150, 2.0), (4, 160, 4.0))
SECOND = made("second", (1, 200, 1.0), (2, 300, 3.0))


def test_between_measured_loads_the_rate_lies_on_a_straight_line() -> None:
    assert rate_within_p99(FIRST, SIZE, 2.0) == 150
    assert rate_within_p99(FIRST, SIZE, 3.0) == pytest.approx(155)
    assert rate_within_p99(FIRST, SIZE, 100.0) == 160
    assert rate_within_p99(FIRST, SIZE, 0.5) is None
    assert rate_within_p99(FIRST, "texts of 9 tokens", 100.0) is None


def test_the_p99_is_one_that_all_reach_and_that_makes_nobody_wait_beyond_his_best() -> None:
    assert shared_p99([FIRST, SECOND], SIZE) == 3.0  # where the second is at its best
    assert shared_p99([FIRST, made("slow", (1, 10, 30.0))], SIZE) == 30.0
    assert shared_p99([FIRST], SIZE) == 4.0


def test_results_are_held_against_the_first_at_that_p99() -> None:
    (sentence,) = headline_sentences([FIRST, SECOND])
    assert "where 99 of 100 requests take at most 3.00 s: second does 1.94 times as much as first" in sentence
    assert "(tokens/s: first 155, second 300)" in sentence
    assert "cost" not in sentence


def test_prices_turn_rates_into_dollars() -> None:
    first, second = (result.model_copy(update={"hourly_price": 3.6}) for result in (FIRST, SECOND))
    (sentence,) = headline_sentences([first, second])
    assert "A million tokens then cost: first $6.45, second $3.33; second is the cheapest." in sentence
    assert "cost" not in headline_sentences([first, SECOND])[0]  # one price alone says nothing
    assert headline_sentences([first])[0].endswith("at a p99 of 4.00 s; a million tokens then cost $6.25.")


def test_a_difference_within_what_the_measurements_can_resolve_is_none() -> None:
    near = made("near", (1, 104, 1.0), (2, 154, 2.0), (4, 165, 4.0))
    assert (
        "near is as fast, within the 5% accuracy of these measurements, as first"
        in headline_sentences([FIRST, near])[0]
    )
    unsteady = SECOND.model_copy(update={"repeats": [point(1, 100, 1.0)]})
    assert repeat_variation(unsteady) == 1.0
    assert "second is as fast, within the 100%" in headline_sentences([FIRST, unsteady])[0]


def test_without_a_load_in_common_nothing_is_said() -> None:
    (sentence,) = headline_sentences([FIRST, made_encoder()])
    assert sentence.startswith("These results have no load in common")


def test_an_encoder_is_compared_over_clients_and_batches_together() -> None:
    encoder = made_encoder()
    sentences = headline_sentences([encoder])
    assert [sentence.split(" with ")[1].split(",")[0] for sentence in sentences] == [
        "texts of 128 tokens",
        "texts of 512 tokens",
    ]
    best = max(each.tokens_per_second for each in encoder.points if each.load.tokens == 128)
    assert f"{best:,.0f} tokens/s" in sentences[0]


def test_what_does_a_tenth_is_not_as_quick_however_unsteady_the_machine() -> None:
    assert _ratio_phrase("slow", 0.1, 1.4) == "slow does 0.10 times as much"
    assert "as fast" in _ratio_phrase("near", 0.5, 1.4)
    assert "as fast" in _ratio_phrase("near", 2.0, 1.4)


def test_tables_need_no_matplotlib(tmp_path: Path) -> None:
    """In a process of its own, since other tests have imported it."""
    write_result(made_encoder(samples=2), tmp_path / "one.json")
    script = (
        "import sys\n"
        "sys.modules['matplotlib'] = None\n"
        "from app.cli.main import main\n"
        "sys.exit(main(['bench', 'compare', sys.argv[1]]))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "one.json")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert "Throughput and request latency" in ran.stdout
