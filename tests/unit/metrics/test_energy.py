"""Energy figures of the last minute, with and without idle time, once the idle power is known."""

from __future__ import annotations

import pytest

from app.metrics.power_monitor import EnergyAccount, EnergyReport, WorkCounters


class Machine:
    """A clock, a meter and the work, all moved by hand: `idle_watts` always, `busy_watts` on top while it works."""

    source = "rapl"

    def __init__(self) -> None:
        self.seconds, self.used, self.looks = 1000.0, 0.0, 0
        self.busy, self.tokens, self.vectors = 0.0, 0, 0
        self.ready, self.open = True, 0
        self.idle_watts, self.busy_watts = 40.0, 60.0

    def joules(self) -> float:
        self.looks += 1
        return self.used

    def close(self) -> None:
        """Nothing to close."""

    def work(self) -> WorkCounters:
        return WorkCounters(self.busy, self.tokens, self.vectors, self.ready and not self.open)

    def events_sent(self, seconds: float) -> None:
        self.seconds += seconds
        self.used += self.idle_watts * seconds

    def serve(self, seconds: float, tokens: int = 0, vectors: int = 0) -> None:
        self.events_sent(seconds)
        self.used += self.busy_watts * seconds
        self.busy += seconds
        self.tokens += tokens
        self.vectors += vectors


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def energy(machine: Machine) -> EnergyAccount:
    return EnergyAccount(machine, machine.work, lambda: machine.seconds)


def test_nothing_is_said_before_anything_was_used(energy: EnergyAccount) -> None:
    assert energy.read() == EnergyReport(0.0)


def test_a_token_costs_what_the_machine_took_idle_or_not(machine: Machine, energy: EnergyAccount) -> None:
    machine.serve(5.0, tokens=200)
    spent = energy.read()
    assert (spent.joules, spent.watts, spent.per_token) == pytest.approx((500.0, 100.0, 2.5))
    assert (spent.per_vector, spent.above_idle_per_token, spent.idle_watts) == (None, None, None)
    machine.events_sent(5.0)
    assert energy.read().per_token == pytest.approx(3.5)


def test_idle_watts_are_seen_over_ten_seconds_without_a_request(machine: Machine, energy: EnergyAccount) -> None:
    machine.events_sent(9.9)
    assert energy.read().idle_watts is None
    machine.events_sent(0.1)
    assert energy.read().idle_watts == pytest.approx(40.0)
    machine.serve(10.0, tokens=100, vectors=50)
    spent = energy.read()
    assert spent.per_token == pytest.approx((400 + 1000) / 100)
    assert spent.above_idle_per_token == pytest.approx(6.0)
    assert spent.above_idle_per_vector == pytest.approx(12.0)


def test_the_least_that_was_seen_is_what_idle_takes(machine: Machine, energy: EnergyAccount) -> None:
    for watts in (50.0, 30.0, 45.0):
        machine.idle_watts = watts
        machine.events_sent(10.0)
        energy.read()
    assert energy.read().idle_watts == pytest.approx(30.0)


def test_time_in_which_a_step_ran_is_not_idle(machine: Machine, energy: EnergyAccount) -> None:
    machine.events_sent(6.0)
    machine.serve(0.1)
    machine.events_sent(6.0)
    assert energy.read().idle_watts is None


def test_time_with_an_open_request_is_not_idle_before_its_first_step_ends(
    machine: Machine, energy: EnergyAccount
) -> None:
    machine.events_sent(6.0)
    machine.open = 1
    machine.events_sent(5.0)
    assert energy.read().idle_watts is None
    machine.open = 0
    machine.events_sent(9.0)
    assert energy.read().idle_watts is None, "it began when the request was there"


def test_loading_is_not_idle(machine: Machine) -> None:
    machine.ready = False
    energy = EnergyAccount(machine, machine.work, lambda: machine.seconds)
    machine.events_sent(20.0)
    assert energy.read().idle_watts is None


def test_only_the_last_minute_is_looked_at(machine: Machine, energy: EnergyAccount) -> None:
    machine.serve(20.0, tokens=100)
    energy.read()
    for _ in range(13):
        machine.serve(5.0, tokens=500)
        energy.read()
    spent = energy.read()
    assert spent.joules == pytest.approx(8500.0)
    assert (spent.watts, spent.per_token) == pytest.approx((100.0, 1.0))


def test_a_minute_without_a_token_says_nothing_of_tokens(machine: Machine, energy: EnergyAccount) -> None:
    machine.serve(5.0, tokens=500)
    for _ in range(14):
        energy.read()
        machine.events_sent(5.0)
    spent = energy.read()
    assert spent.per_token is None and spent.above_idle_per_token is None
    assert spent.watts == pytest.approx(40.0)


def test_frequent_readings_are_reported_the_same_and_kept_once_a_second(
    machine: Machine, energy: EnergyAccount
) -> None:
    looks = machine.looks
    energy.read()
    assert machine.looks == looks, "it has just been read"
    for _ in range(2000):
        machine.serve(0.05, tokens=1)
        energy.read()
    assert machine.looks - looks <= 1001
    assert len(energy._recent) <= 62


def test_a_token_never_gives_energy_back(machine: Machine, energy: EnergyAccount) -> None:
    machine.events_sent(10.0)
    energy.read()
    machine.idle_watts = 10.0
    machine.busy_watts = 0.0
    machine.serve(5.0, tokens=10)
    assert energy.read().above_idle_per_token == 0.0
