"""The simulation against what theory knows of such servers, and the rules against what each of them promises."""

from __future__ import annotations

import math
import statistics
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from external_tools import ROOT
from hypothesis_examples import examples
from tools.measure.simulated_balancing import (
    Outcome,
    arrivals,
    clients,
    least_connections,
    predicted_wait,
    row,
    rules,
    weighted,
)
from tools.measure.simulated_server import Job, Server


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_one_server_is_the_processor_sharing_of_the_textbooks(load: float) -> None:
    """The mean stay in an M/M/1 queue under processor sharing is 1 / (capacity − rate)."""
    found = arrivals([Server(0.5)], weighted([1]), load * 0.5, 8_000, seed=3)
    assert statistics.fmean(found.seconds) == pytest.approx(1 / (0.5 * (1 - load)), rel=0.1)
    assert found.per_second == pytest.approx(load * 0.5, rel=0.03)


def test_one_alone_takes_its_work_over_the_speed() -> None:
    server = Server(0.25)
    server.take(Job(0, 0.0, 2.0))
    assert server.next_end == 8.0
    server.take(Job(1, 0.0, 1.0))
    assert server.next_end == 8.0, "two share: the shorter one ends when a second of work was done for each"


def test_a_batch_that_costs_little_makes_more_of_a_server() -> None:
    assert Server(1.0, cost=1.0, places=8).capacity == pytest.approx(1.0)
    assert Server(1.0, cost=0.1, places=8).capacity == pytest.approx(8 / 1.7)


def test_a_prompt_holds_the_batch_up() -> None:
    """Two of five seconds are done when a prompt of three comes; after it both progress."""
    server, other = Server(1.0, cost=0.0, prompt_rate=10.0), Job(1, 2.0, 1.0, prompt=30.0)
    server.take(Job(0, 0.0, 5.0))
    server.advance(2.0)
    server.take(other)
    server.take(Job(2, 2.0, 0.0, prompt=10.0))
    assert (server.next_end, server.prompt_backlog(3.0), server.num_waiting) == (5.0, 3.0, 1)
    server.advance(5.0)
    assert server.end_next() == (other, False)
    assert server.next_end == 6.0
    server.advance(6.0)
    assert server.end_next() == (Job(2, 2.0, 0.0, prompt=10.0), True), "nothing comes after its prompt"
    assert server.next_end == 7.0
    server.advance(7.0)
    assert server.end_next() == (other, True)
    assert server.next_end == 9.0
    assert [job.number for job in server.remove_all()] == [0]
    assert server.num_here == 0


def test_turns_follow_the_weights_and_lie_apart() -> None:
    rule, servers = weighted([4, 1]), [Server(1.0), Server(0.25)]
    turns = [rule(servers, 0.0) for _ in range(10)]
    assert turns == [0, 0, 1, 0, 0] * 2


def test_fewest_connections_for_the_weight() -> None:
    servers = [Server(1.0), Server(0.25)]
    rule = least_connections([4, 1])
    sent = Counter[int]()
    for number in range(100):
        index = rule(servers, 0.0)
        servers[index].take(Job(number, 0.0, 1.0))
        sent[index] += 1
    assert sent == {0: 80, 1: 20}


def test_the_slow_one_is_asked_once_the_quick_one_would_take_longer() -> None:
    rule, servers = predicted_wait(), [Server(1.0), Server(0.25)]
    assert [rule(servers, 0.0) for _ in range(8)] == [0, 0, 0, 0, 1, 0, 0, 0]


@pytest.mark.parametrize("name", ["weights", "least_conn, weights", "predicted wait"])
def test_who_knows_the_speeds_beats_plain_turns(name: str) -> None:
    """At half the capacity of both, every other request is more than the slow server can do."""
    outcomes = {}
    for each in ("round-robin", name):
        servers = [Server(1.0), Server(0.25)]
        outcomes[each] = arrivals(servers, rules(servers)[each], 0.5 * 1.25, 4000, seed=5)
    assert outcomes["round-robin"].refused > 0 == outcomes[name].refused
    assert outcomes[name].percentile(0.99) < outcomes["round-robin"].percentile(0.99) / 5
    assert outcomes[name].per_second > outcomes["round-robin"].per_second


def test_clients_in_turns_go_as_fast_as_twice_the_slow_server() -> None:
    plain, able = [Server(1.0), Server(0.25)], [Server(1.0), Server(0.25)]
    assert clients(plain, rules(plain)["round-robin"], 16, 4000, 1).per_second == pytest.approx(0.5, rel=0.1)
    assert clients(able, rules(able)["least_conn, weights"], 16, 4000, 1).per_second == pytest.approx(1.25, rel=0.1)


@given(
    st.lists(st.floats(0.1, 4.0), min_size=1, max_size=4),
    st.sampled_from(["round-robin", "weights", "least_conn", "least_conn, weights", "predicted wait"]),
    st.floats(0.1, 3.0),
    st.integers(0, 9),
)
@settings(max_examples=examples(20), deadline=None)
def test_every_request_ends_once(speeds: list[float], name: str, load: float, seed: int) -> None:
    servers = [Server(speed, cost=0.3, places=2, queue=3) for speed in speeds]
    rate = load * sum(server.capacity for server in servers)
    found = arrivals(servers, rules(servers)[name], rate, 300, seed)
    assert len(found.seconds) + found.refused == 270
    assert min(found.seconds) >= 0.0
    assert all(server.num_here == 0 for server in servers)
    assert arrivals_again(speeds, name, rate, seed) == found.seconds, "the same seed tells the same story"


def arrivals_again(speeds: list[float], name: str, rate: float, seed: int) -> list[float]:
    servers = [Server(speed, cost=0.3, places=2, queue=3) for speed in speeds]
    return arrivals(servers, rules(servers)[name], rate, 300, seed).seconds


def test_percentiles_are_of_what_was_answered() -> None:
    assert Outcome(list(map(float, range(1, 101)))).percentile(0.99) == 99.0
    assert Outcome().percentile(0.5) == math.inf


@pytest.mark.parametrize("name", ["round-robin", "least_conn, weights"])
def test_the_documents_figures_are_of_this_simulation(name: str) -> None:
    servers = [Server(1.0), Server(0.25)]
    found = arrivals(servers, rules(servers)[name], 0.5 * 1.25, 20_000, seed=1)
    assert row("0.5", name, found) in (ROOT / "docs" / "fleet.md").read_text().splitlines()
