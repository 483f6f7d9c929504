"""What an API process reports is counted in the main process as if it had happened there."""

from __future__ import annotations

import pickle
import random

from app.messages import Timings
from app.metrics.instruments import Metrics
from app.metrics.reports import MetricsReporter, add_report


def served(metrics: Metrics, seed: int) -> None:
    """Some requests of all kinds."""
    chance = random.Random(seed)
    for _ in range(20):
        seconds = chance.uniform(1e-4, 3.0)
        metrics.refused("chat", "overloaded")
        metrics.responded("POST", "/v1/chat/completions", chance.choice((200, 429)), "")
        metrics.first_token(Timings(seconds, seconds / 2), 2 * seconds, {"trace_id": str(seed), "span_id": "1"})
        metrics.next_tokens(chance.randrange(9), {seconds: 3})
        metrics.prompt_tokens(chance.randrange(100), 3)
        metrics.request_lengths(12, 34)
        metrics.request_ended("messages", chance.choice(("stop", "aborted")), seconds)
        metrics.vectors_returned(2, 7, Timings(queue_seconds=seconds))
        metrics.fields_ignored("native", 1)


def exposition(metrics: Metrics) -> list[str]:
    text = metrics.render("application/openmetrics-text")[0].decode()
    kept = [line.partition(" # ") for line in text.splitlines() if not line.startswith(("process_", "# "))]
    values = [(value.rpartition(" "), example.rpartition(" ")[0]) for value, _, example in kept]  # without times
    return sorted(f"{name} {float(value):.9g} # {example}" for (name, _, value), example in values)


def test_reports_of_two_processes_are_as_one_registry() -> None:
    now = [0.0]
    alone, main = Metrics(lambda: now[0]), Metrics(lambda: now[0])
    others = [Metrics(), Metrics()]
    reporters = [MetricsReporter(each) for each in others]
    for number in range(3):
        served(alone, number)
        served(main, number)  # requests of its own
    for number in range(3, 9):
        served(alone, number)
        served(others[number % 2], number)
        add_report(main, pickle.loads(pickle.dumps(reporters[number % 2].take())))
    now[0] = 1.0
    assert exposition(main) == exposition(alone)
    for name in ("succeeded", "failed", "queued"):
        ours, theirs = getattr(main, name), getattr(alone, name)
        assert (ours.count, round(ours.seconds, 9)) == (theirs.count, round(theirs.seconds, 9)) != (0, 0.0)
    assert (main.num_tokens, main.num_vectors) == (alone.num_tokens, alone.num_vectors) != (0, 0)


def test_a_report_without_news_is_empty() -> None:
    metrics = Metrics()
    reporter = MetricsReporter(metrics)
    served(metrics, 1)
    assert not reporter.take().is_empty
    assert reporter.take().is_empty
