"""The content of a report, before rendering: notes on each result, sentences, and tables.

This module needs no plotting library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.bench.compare.result import Result
from app.bench.report.answer import answer
from app.bench.report.figures import TOPICS
from app.bench.report.judging import Here, Judged, judge, names_of
from app.bench.report.loads import Case, cases_of, part
from app.bench.report.pricing import priced
from app.bench.report.table import Table
from app.bench.report.tables import decision_table, figure_tables, head_table, tail_tables


@dataclass(frozen=True, slots=True)
class Comparison:
    """The content of a report on `results`, in the order given. The others are compared with the first."""

    results: tuple[Result, ...]
    names: tuple[str, ...]
    cases: tuple[Case, ...]
    judged: tuple[Judged, ...]
    sentences: tuple[str, ...]
    head: Table
    figures: tuple[Table, ...]
    tails: tuple[Table, ...]
    decisions: Table | None
    colophon: tuple[str, ...]
    topics: tuple[str, ...] = tuple(topic.title for topic in TOPICS)

    @property
    def title(self) -> str:
        """The title, such as `MODEL: MACHINE against MACHINE`."""
        model = part(self.results[0].info, "model").get("name", "a model")
        return f"{model}: {' against '.join(self.names)}"

    @property
    def tables(self) -> list[Table]:
        """All tables, in the order of the report."""
        return [self.head, *self.figures, *self.tails, *([self.decisions] if self.decisions else [])]


def compare(given: Sequence[Result], here: Here) -> Comparison:
    """Build the content of a report on one or more results."""
    with_prices = priced(given)
    results = [each.result for each in with_prices]
    names, cases = names_of(results), cases_of(results)
    return Comparison(
        results=tuple(results),
        names=tuple(names),
        cases=tuple(cases),
        judged=tuple(judge(results, here)),
        sentences=tuple(answer(results)),
        head=head_table(with_prices, names),
        figures=tuple(figure_tables(cases, names)),
        tails=tuple(tail_tables(results, names)),
        decisions=decision_table(results, names),
        colophon=(
            f"Made by armature {here.version} with `armature bench compare`. Each result: requests over HTTP, a warm-up before each load, "
            "all latencies kept. p99: 99 of 100 took no longer.",
            "The figures hold for these machines, this model and that day; the costs are only as accurate as the prices that were given.",
        ),
    )
