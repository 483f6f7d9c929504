"""Chooses, of a test's product of parameters, cases that together hold every pair of values."""

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
