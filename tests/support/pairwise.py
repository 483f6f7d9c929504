"""Chooses the cases of a test that each command runs: pairs of a product's values, or some of a list of repetitions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

import pytest

MIN_CASES = 16
Case = Mapping[str, Hashable]


def covering_cases(cases: Sequence[Case]) -> list[int]:
    """Return positions of cases, in order, that hold every pair of values of two parameters that any case holds.

    Greedy: each step takes the first case with the most pairs that no chosen case holds.
    """
    pairs = [set(combinations(sorted(case.items()), 2)) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda at: (len(pairs[at] & missing), -at))
        chosen.append(best)
        missing -= pairs[best]
    return sorted(chosen)


def mark_other_cases(items: Sequence[pytest.Item]) -> None:
    """Mark as `nightly` the cases of large products that are not needed to hold every pair of values.

    Only tests with at least `MIN_CASES` cases of three or more parameters have such cases.
    """
    cases: dict[str, list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            cases[item.nodeid.partition("[")[0]].append(item)
    for group in cases.values():
        if len(group) >= MIN_CASES and len(group[0].callspec.params) > 2:
            needed = set(covering_cases([_case(item) for item in group]))
            for at, item in enumerate(group):
                if at not in needed:
                    item.add_marker(pytest.mark.nightly)


def _case(item: pytest.Function) -> Case:
    """Return the case's values by identity: all cases of a parameter share the objects of one list."""
    return {name: id(value) for name, value in item.callspec.params.items()}


def mark_repetitions(items: Sequence[pytest.Item]) -> None:
    """Mark the cases beyond the numbers of `@pytest.mark.cases(test=1, ci=4)` as `full`, or as `nightly`.

    `make test` runs `test` of the cases and `.ci/run` `ci`, all without `ci`; the chosen ones are evenly spread.
    """
    repeated: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("cases") and not item.get_closest_marker("nightly"):
            repeated[item.nodeid.partition("[")[0]].append(item)
    for group in repeated.values():
        numbers = group[0].get_closest_marker("cases").kwargs  # type: ignore[union-attr]
        in_ci = _spread(group, numbers.get("ci", len(group)))
        quick = _spread(in_ci, numbers.get("test", len(in_ci)))
        for item in group:
            if item not in in_ci:
                item.add_marker(pytest.mark.nightly)
            elif item not in quick:
                item.add_marker(pytest.mark.full)


def _spread(group: list[pytest.Item], number: int) -> list[pytest.Item]:
    return group if number >= len(group) else [group[at * len(group) // number] for at in range(number)]
