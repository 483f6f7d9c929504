"""The simulated day against what theory knows of such servers, Kubernetes' arithmetic, and the page that shows it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from armature_bench.compare.result import SCHEMA, CompareResult, LoadPoint, LoadSpec, write_result
from armature_bench.console import MeasurementFailed
from external_tools import ROOT
from hypothesis_examples import examples
from tools.fleet_day.__main__ import main
from tools.fleet_day.autoscaler import COMPONENT, MIXED, RUNNING, WAIT, WAITING, Autoscaler, ScalingRules, read_rules
from tools.fleet_day.pictures import title
from tools.fleet_day.pools import PLACES, Pool, decode_rates, default_pools, pool_of_result, read_pool
from tools.fleet_day.report import figures, percentile, read, row, tables
from tools.fleet_day.scenarios import Fleets, arm_speeds, by_size, by_waits_alone, changes
from tools.fleet_day.simulation import BALANCERS, Day, FleetPlan, PoolPlan, Spot, Starts, simulate
from tools.fleet_day.traffic import DAY, Lengths, Traffic
from tools.measure.simulated_balancing import _run_until, arrivals, weighted
from tools.measure.simulated_server import Job, Server

RESULTS = ROOT / "docs" / "results"
RULES = read_rules()
STEADY = Traffic(1.0, trough=1.0, bursts=0.0)


def pool(prefill: float = 100.0, decode: float = 1000.0, price: float = 1.0) -> Pool:
    return Pool("here", "machine", price, prefill, decode_rates([(1, decode)]), "declared")


def fixed(pods: int) -> ScalingRules:
    return replace(RULES, min_pods=pods, max_pods=pods)


def plan(pools: Sequence[tuple[Pool, int]], traffic: Traffic, **fields: object) -> FleetPlan:
    made = FleetPlan(tuple(PoolPlan(each, fixed(pods), pods) for each, pods in pools), traffic)
    return replace(made, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_one_pod_with_prompts_alone_waits_as_pollaczek_and_khinchine_say(sigma: float) -> None:
    """The mean stay in M/G/1, first come first served, is s + λ E[s²] / 2(1 − ρ)."""
    lengths = Lengths(100, sigma, 1000)
    drawn = lengths.draw(numpy.random.default_rng(5), 200_000) / 100
    rate = 0.7 / drawn.mean()
    day = simulate(
        plan([(pool(), 1)], replace(STEADY, peak_rate=rate, prompts=lengths, completions=Lengths(1, 0, 1))), 1
    )
    expected = drawn.mean() + rate * (drawn**2).mean() / 2 / (1 - 0.7)
    assert statistics.fmean(day.first_token) == pytest.approx(expected, rel=0.05)
    assert day.first_token == day.whole


def test_two_pods_do_what_the_simulation_of_balancing_does() -> None:
    """The same requests through its loop, with the rule of the predicted wait, end at the same moments."""
    fast, slow = pool(prefill=4000, decode=400), pool(prefill=1100, decode=130)
    traffic = replace(STEADY, peak_rate=3.0)
    day = simulate(plan([(fast, 1), (slow, 1)], traffic, seconds=900.0), 4)
    servers, ended = [fast.server(), slow.server()], []
    means = traffic.prompts.mean, traffic.completions.mean
    each = [1 / one.requests_per_second(*means) for one in (fast, slow)]
    for number, (moment, prompt, completion) in enumerate(traffic.arrivals(4, 900.0)):
        run(servers, moment, ended)
        chosen = min((0, 1), key=lambda index: (servers[index].num_here + 1) * each[index])
        assert servers[chosen].take(Job(number, moment, completion - 1.0, float(prompt)))
    run(servers, 1e9, ended)
    assert len(ended) == len(day.whole) > 2000
    assert ended == pytest.approx(day.whole, abs=1e-6)


def run(servers: Sequence[Server], moment: float, ended: list[float]) -> None:
    """Run to a moment and note the seconds of each request that ended. A request is reported twice: its prompt too."""
    seen = run.__dict__.setdefault("seen", set())

    def end(job: Job) -> None:
        if job.work > 0 and job.number not in seen:
            seen.add(job.number)
            return
        seen.discard(job.number)
        ended.append(servers[0].now - job.arrived)

    _run_until(servers, moment, end)


def test_servers_without_batching_are_erlangs() -> None:
    """With `cost` 0 a server of c places is M/M/c: the mean wait is C(c, a) / (cμ − λ)."""
    places, load = 8, 0.8 * 8
    term, total = 1.0, 0.0
    for index in range(places):
        total += term
        term *= load / (index + 1)
    waits = term / (1 - load / places) / (total + term / (1 - load / places))
    found = arrivals([Server(1.0, cost=0.0, places=places, queue=10**6)], weighted([1]), load, 40_000, seed=2)
    assert statistics.fmean(found.seconds) == pytest.approx(1 + waits / (places - load), rel=0.03)


@given(
    st.integers(1, 4),
    st.sampled_from(BALANCERS),
    st.floats(0.2, 4.0),
    st.sampled_from([0.0, 20.0]),
    st.integers(0, 99),
)
@settings(max_examples=examples(15), deadline=None)
def test_every_request_ends_once_and_every_second_is_paid(
    pods: int, balancer: str, load: float, notice: float, seed: int
) -> None:
    small = replace(pool(prefill=2000), decode_rates=decode_rates([(1, 300.0)]))
    traffic = replace(STEADY, peak_rate=load * small.requests_per_second(272, 127) * pods)
    rules = replace(RULES, min_pods=1, max_pods=2 * pods)
    made = FleetPlan(
        (PoolPlan(small, rules, pods),),
        traffic,
        balancer,
        starts=Starts(10, 5, 5),
        spot=Spot(share=1.0, price=1.0, losses=30.0, notice=notice),
        seconds=900.0,
    )
    day = simulate(made, seed)
    assert len(day.whole) + day.refused == day.sent
    assert len(set(day.arrived)) == len(day.arrived), "no request was answered twice"
    assert all(first <= whole for first, whole in zip(day.first_token, day.whole, strict=True))
    assert sum(day.dollars) == pytest.approx(sum(day.pod_seconds) / 3600)
    assert simulate(made, seed).whole == day.whole, "the same seed tells the same story"


def test_what_was_on_a_lost_machine_is_sent_again_and_a_notice_saves_most_of_it() -> None:
    lost = {}
    for notice in (0.0, 120.0):
        one = pool(prefill=2000, decode=300)
        spot = Spot(share=1.0, losses=6.0, notice=notice)
        rules = replace(RULES, min_pods=1, max_pods=4)
        made = FleetPlan((PoolPlan(one, rules, 4),), replace(STEADY, peak_rate=3.0), spot=spot, seconds=3600.0)
        lost[notice] = simulate(made, 3)
    assert lost[0.0].retried > 10
    assert lost[120.0].retried == 0, "no answer takes two minutes"
    assert lost[0.0].lost_pods > 3
    assert all(day.dollars[0] < 0.8 * day.pod_seconds[0] / 3600 for day in lost.values()), "spot machines cost less"


@pytest.mark.parametrize("load", [0.6, 0.9])
def test_a_sample_of_a_large_fleet_waits_as_the_fleet(load: float) -> None:
    x86 = default_pools()["x86"]
    rate = x86.requests_per_second(STEADY.prompts.mean, STEADY.completions.mean)
    made = plan([(x86, 96)], replace(STEADY, peak_rate=96 * load * rate), seconds=600.0)
    whole, sample = (simulate(replace(made, most_simulated=most), 1) for most in (96, 32))
    assert whole.scale == 1.0
    assert sample.scale == 3.0
    assert sample.sent * 3 == pytest.approx(whole.sent, rel=0.05)
    assert percentile(sample.first_token, 50) == pytest.approx(percentile(whole.first_token, 50), rel=0.1)
    assert percentile(sample.first_token, 99) == pytest.approx(percentile(whole.first_token, 99), rel=0.1)
    assert percentile(sample.whole, 99) == pytest.approx(percentile(whole.whole, 99), rel=0.1)


def test_the_autoscalers_are_those_of_the_manifests() -> None:
    assert (RULES.min_pods, RULES.max_pods) == (2, 8)
    assert RULES.targets == {RUNNING: 16.0, WAITING: 4.0, WAIT: 1.0}
    assert (RULES.up_window, RULES.down_window) == (0, 600)
    dear = read_rules(COMPONENT, MIXED / "amd64" / "scaling.yaml")
    assert dear.targets == {RUNNING: 16.0, WAITING: 4.0}
    assert (dear.external, dear.min_pods, dear.down) == (2.0, 1, RULES.down)


def wanted(scaler: Autoscaler, moment: float, current: int, wait: float, ready: int | None = None) -> int:
    known = current if ready is None else ready
    return scaler.wanted(moment, current, known, {RUNNING: 0.0, WAITING: 0.0, WAIT: wait * known}, None)


def test_pods_double_at_most_and_then_not_for_four_minutes() -> None:
    scaler = Autoscaler(replace(RULES, max_pods=100))
    assert wanted(scaler, 0, 4, 1.09) == 4, "within a tenth of the target nothing changes"
    assert wanted(scaler, 15, 4, 9.0) == 8
    assert wanted(scaler, 30, 8, 9.0) == 8
    assert wanted(scaler, 240, 8, 9.0) == 8
    assert wanted(scaler, 255, 8, 9.0) == 16
    assert wanted(Autoscaler(RULES), 0, 2, 9.0) == 4, "two pods more where twice is less"


def test_pods_that_start_count_as_idle_while_more_are_needed() -> None:
    assert wanted(Autoscaler(replace(RULES, max_pods=100)), 0, 8, 1.5, ready=4) == 8, "1.5 × 4 / 8 is below the target"
    assert wanted(Autoscaler(replace(RULES, max_pods=100)), 0, 8, 3.0, ready=4) == 12


def test_pods_go_one_at_a_time_and_only_after_ten_quiet_minutes() -> None:
    scaler, pods, seen = Autoscaler(RULES), 6, []
    wanted(scaler, 0, 6, 1.0)
    for moment in range(15, 1200, 15):
        following = wanted(scaler, moment, pods, 0.1)
        if following != pods:
            seen.append(moment)
        pods = following
    assert seen == [615, 735, 855, 975], "and two stay"
    assert pods == 2


def test_of_many_pods_two_percent_go_at_a_time() -> None:
    scaler = Autoscaler(replace(RULES, max_pods=1000))
    wanted(scaler, 0, 400, 1.0)
    assert wanted(scaler, 615, 400, 0.1) == 392


def test_pods_come_before_anybody_waits_if_many_requests_run() -> None:
    for running, pods in ((17.0, 4), (24.0, 6)):
        sums = {RUNNING: 4 * running, WAITING: 0.0, WAIT: 0.0}
        assert Autoscaler(RULES).wanted(0, 4, 4, sums, None) == pods, running


def test_scaling_by_waits_alone_has_none_of_the_three() -> None:
    """The rules of the manifests before load became a signal, with which the page compares them."""
    fleets = Fleets(default_pools(), Traffic(1.0), Starts(), Spot())
    for each in by_waits_alone(fleets.mixed(10)).pools:
        assert RUNNING not in each.rules.targets and WAITING in each.rules.targets
        assert [policy.period_seconds for policy in each.rules.up] == [120, 120]
        assert [(policy.percent, policy.value) for policy in each.rules.down] == [(False, 1)]


def test_a_measured_curve_is_linear_between_its_points_and_flat_beyond() -> None:
    rates = decode_rates([(1, 10.0), (5, 30.0)])
    assert len(rates) == PLACES
    assert (rates[0], rates[2], rates[4], rates[-1]) == (10.0, 20.0, 30.0, 30.0)


def test_a_pool_of_a_result_has_the_rates_that_clients_saw(tmp_path: Path) -> None:
    def point(clients: int, token_seconds: float) -> LoadPoint:
        load = LoadSpec(kind="generate", clients=clients, tokens=512, max_tokens=64)
        return LoadPoint(
            load=load, began=0, seconds=1, samples=1, first_token_seconds=[0.5], tpot_seconds=[token_seconds]
        )

    points = [point(1, 0.02), point(8, 0.04)]
    fields = {"schema": SCHEMA, "name": "mine", "began_at": 0.0, "measured_by": "1", "info": {}, "points": points}
    result = CompareResult.model_validate(fields | {"instance": "c7i.xlarge"})
    write_result(result, tmp_path / "mine.json")
    found = read_pool(f"x86={tmp_path / 'mine.json'}")
    assert (found.prefill_rate, found.decode_rates[0], found.decode_rates[7]) == (1024.0, 50.0, 200.0)
    assert (found.machine, found.hourly_price) == ("c7i.xlarge", 0.1785)
    assert read_pool(f"x86={tmp_path / 'mine.json'},0.5").hourly_price == 0.5
    with pytest.raises(MeasurementFailed, match="no price"):
        pool_of_result("x86", result.model_copy(update={"instance": None}))
    with pytest.raises(MeasurementFailed, match="no completions of one client"):
        pool_of_result("x86", result.model_copy(update={"points": points[1:]}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("arm", "is not understood"),
        ("arm=0.1,500", "is not understood"),
        ("arm=0.1,500,1:x", "is not understood"),
        ("arm=0.1,0,1:30", "above 0"),
        ("=0.1,500,1:30", "must have a name"),
        ("arm=nothing.json", "cannot be read"),
    ],
)
def test_a_pool_that_is_not_understood_is_refused(text: str, words: str) -> None:
    with pytest.raises(MeasurementFailed, match=words):
        read_pool(text)


def test_the_command_takes_two_pools_and_writes_tables_a_file_and_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--pool", "arm=0.1,2000,1:30/8:200", "--pool", "x86=0.2,2000,1:40/8:240", "--hours", "0.1", "--into"]
    assert main([*flags, str(tmp_path), "--pods", "2", "4"]) == 0
    told = capsys.readouterr().out
    assert "| mixed | 4 |" in told
    assert "declared on the command line" in told
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".svg"}
    assert main([*flags, str(tmp_path), "--pods", "2", "--keep"]) == 0
    assert len(read(tmp_path / "fleet-day.json")["runs"]) == 12
    with pytest.raises(SystemExit, match="other assumptions"):
        main([*flags, str(tmp_path), "--pods", "2", "--keep", "--trough", "0.5"])
    assert main(["--pool", "nothing"]) == 2


def test_the_page_has_the_recorded_figures() -> None:
    recorded = read(RESULTS / "fleet-day.json")
    page = (ROOT / "docs" / "fleet.md").read_text(encoding="utf-8")
    assert [line for line in tables(recorded["runs"]) if line and line not in page.splitlines()] == []
    words = " ".join(page.split())
    assert [each for each in recorded["assumptions"] if each not in words] == []


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pictures_show_the_recorded_day(theme: str) -> None:
    runs = read(RESULTS / "fleet-day.json")["runs"]
    picture = (RESULTS / f"fleet-day-{theme}.svg").read_text(encoding="utf-8")
    shown = [title(run) for run in runs if "series" in run and (run["table"] == "sizes" or run["name"] == "mixed")]
    assert len(shown) == 4
    assert [each for each in shown if each not in picture] == []


def test_recorded_days_are_of_the_fleets_that_the_code_has() -> None:
    fleets = Fleets(default_pools(), Traffic(1.0), Starts(), Spot())
    named = {(each.table, each.name, each.pods) for each in by_size(fleets, (10, 100, 1_000, 10_000))}
    named |= {(each.table, each.name, each.pods) for each in changes(fleets, 100)}
    named |= {(each.table, each.name, each.pods) for each in arm_speeds(fleets, 100, (0.6, 0.8, 1.2, 1.4))}
    runs = read(RESULTS / "fleet-day.json")["runs"]
    assert {(run["table"], run["name"], run["pods"]) for run in runs} == named


@pytest.mark.full
def test_a_recorded_day_comes_out_again() -> None:
    """Within a little: another version of numpy may draw a length differently."""
    fleets = Fleets(default_pools(), Traffic(1.0), Starts(), Spot())
    scenario = next(each for each in by_size(fleets, (10,)) if each.name == "x86")
    again = figures(scenario, simulate(scenario.plan, 1), False)
    recorded = next(
        run
        for run in read(RESULTS / "fleet-day.json")["runs"]
        if (run["name"], run["pods"], run["table"]) == ("x86", 10, "sizes")
    )
    assert sum(again["dollars"]) == pytest.approx(sum(recorded["dollars"]), rel=0.03)
    assert again["first_token"] == pytest.approx(recorded["first_token"], rel=0.1)
    assert row(again).startswith("| x86 | 10 |")


def test_bursts_and_the_time_of_day() -> None:
    traffic = Traffic(10.0)
    assert traffic.shape(15 * 3600) == pytest.approx(1.0)
    assert traffic.shape(3 * 3600) == pytest.approx(0.25)
    quiet = replace(traffic, bursts=0.0).slice_rates(1, DAY)
    loud = traffic.slice_rates(1, DAY)
    ratios = {round(float(ratio), 6) for ratio in loud / quiet}
    assert ratios == {1.0, 1.5}
    assert isinstance(Day(1.0).sent, int)
