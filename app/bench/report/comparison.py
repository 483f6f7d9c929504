"""All that a report says, before anybody draws it: judged, in sentences and in tables. Needs nothing that draws."""

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
    """Of results in the order they were given; the first is what the others are held against."""

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
        model = part(self.results[0].info, "model").get("name", "a model")
        return f"{model}: {' against '.join(self.names)}"

    @property
    def tables(self) -> list[Table]:
        return [self.head, *self.figures, *self.tails, *([self.decisions] if self.decisions else [])]


def compare(given: Sequence[Result], here: Here) -> Comparison:
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
            f"Made by armature {here.version} with `armature bench compare`. Each result: requests over HTTP, each load warmed up first, "
            "every latency kept. p99: 99 of 100 took no longer.",
            "Figures hold for these machines, with this model, on that day; what they cost is as good as the prices that were given.",
        ),
    )
