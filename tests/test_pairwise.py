"""The pairwise choice of cases leaves no pair of values out, and `make test-all` runs the others."""

from __future__ import annotations

from itertools import combinations, product

import pytest

from pairwise import covering_cases

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 3, 5, 2), (10, 2, 2)])
def test_every_pair_is_in_a_chosen_case(sizes: tuple[int, ...]) -> None:
    cases = [dict(zip("abcd", values, strict=False)) for values in product(*map(range, sizes))]
    chosen = [cases[at] for at in covering_cases(cases)]
    for one, two in combinations(cases[0], 2):
        assert {(case[one], case[two]) for case in chosen} == {(case[one], case[two]) for case in cases}
    assert len(chosen) <= 1.5 * max(
        len({(case[one], case[two]) for case in cases}) for one, two in combinations(cases[0], 2)
    )


def test_two_parameters_keep_their_product() -> None:
    cases = [{"a": a, "b": b} for a, b in product(range(4), range(5))]
    assert covering_cases(cases) == list(range(20))


def test_a_pair_that_no_case_holds_is_not_asked_for() -> None:
    assert covering_cases([{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 1}]) == [0, 1]


def test_the_two_tiers_run_every_case_once(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pairwise, pytest\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    pairwise.mark_other_cases(items)\n"
        "    pairwise.mark_repetitions(items)\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n  cases\n  full\n  nightly\n")
    pytester.makepyfile(
        "import pytest\n"
        "@pytest.mark.parametrize('a', range(4))\n"
        "@pytest.mark.parametrize('b', range(4))\n"
        "@pytest.mark.parametrize('c', range(3))\n"
        "def test_product(a, b, c): pass\n"
        "@pytest.mark.parametrize('a', range(20))\n"
        "def test_list(a): pass\n"
        "@pytest.mark.cases(test=2, ci=6)\n"
        "@pytest.mark.parametrize('a', range(12))\n"
        "def test_repeated(a): pass\n"
    )
    quick, rest = ({*_names(pytester, "-m", expression)} for expression in ("not nightly", "nightly"))
    assert not quick & rest
    assert len(quick | rest) == 80
    assert len([name for name in quick if "test_list" in name]) == 20
    names = [name.partition("::")[2] for name in sorted(quick) if "repeated" in name]
    assert names == [f"test_repeated[{at}]" for at in (0, 10, 2, 4, 6, 8)]
    fast = [name.partition("::")[2] for name in _names(pytester, "-m", "not nightly and not full")]
    assert [name for name in fast if "repeated" in name] == ["test_repeated[0]", "test_repeated[6]"]
    assert 16 <= len([name for name in quick if "test_product" in name]) <= 24


def _names(pytester: pytest.Pytester, *arguments: str) -> list[str]:
    return [
        item.nodeid
        for item in pytester.inline_run("--collect-only", "-p", "no:asyncio", *arguments)
        .getcalls("pytest_collection_finish")[0]
        .session.items
    ]
