"""`armature bench http` against somebody else's server: what it counts, what it says of failures, and how its requests come."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Sequence
from typing import Any

import pytest
from rich.console import Console

from armature_bench.console import BenchOutcome, Figure, MeasurementFailed, outcome_table
from armature_bench.http import loops
from armature_bench.http.generate import GenerateBench
from armature_bench.http.load import LoadJob, LoadLevel, ServerTarget, measure_load
from armature_bench.http.loops import RunLimits
from armature_bench.http.tally import GenerateWorkload, LatencyObjective
from armature_bench.http.workload import UniformLengths
from scripted_peer import ScriptedPeer, running


def job(*peers: ScriptedPeer, levels: Sequence[LoadLevel] = (LoadLevel(clients=3),), **changed: Any) -> LoadJob:
    wanted = GenerateWorkload(UniformLengths(20, 20), changed.pop("max_tokens", UniformLengths(8, 8)))
    given = {"bounds": RunLimits(num_requests=9), "warm_up": 0} | changed
    work = GenerateBench(wanted, given.pop("objective", LatencyObjective()))
    return LoadJob("peer", [ServerTarget(peer.url) for peer in peers], levels, work, **given)


def named(outcome: BenchOutcome) -> dict[str, Figure]:
    return {figure.name: figure for figure in outcome.figures}


def notes(outcome: BenchOutcome) -> str:
    return "\n".join(outcome.notes)


@pytest.mark.parametrize("cut", [1, 7, 10_000])
def test_every_request_is_counted_however_its_bytes_were_cut(cut: int) -> None:
    with running(ScriptedPeer(cut=cut)) as peer:
        outcome = measure_load(job(peer))
    figures = named(outcome)
    assert list(figures) == ["×3 tokens", "×3 TTFT", "×3 ITL", "×3 TPOT", "×3 E2E", "this client, of a core"]
    assert figures["×3 tokens"].parts["answered"] == 9
    assert figures["×3 tokens"].value > 0
    ttft = figures["×3 TTFT"]
    assert 0 < ttft.value <= ttft.parts["p90"] <= ttft.parts["p95"] <= (ttft.p99 or 0)
    requests = outcome.details["runs"][0]["requests"]
    assert [request["tokens"] for request in requests] == [8] * 9
    assert {request["client"] for request in requests} == {0, 1, 2}
    assert outcome.complete


def test_the_servers_count_wins_over_pieces() -> None:
    with running(ScriptedPeer(tokens_per_piece=4)) as peer:
        outcome = measure_load(job(peer))
    # Pieces that one read returned count as one chunk, so a busy machine shows more than the peer's four.
    average = re.search(r"a chunk has (\S+) tokens on average", notes(outcome))
    assert average is not None and float(average[1]) >= 4
    assert {request["tokens"] for request in outcome.details["runs"][0]["requests"]} == {8}


def test_without_usage_pieces_are_counted_and_said_to_be() -> None:
    with running(ScriptedPeer(usage=False)) as peer:
        outcome = measure_load(job(peer))
    assert "each chunk is counted as one token" in notes(outcome)
    assert "the server does not report prompt tokens" in notes(outcome)
    assert {request["tokens"] for request in outcome.details["runs"][0]["requests"]} == {8}


def test_text_is_as_long_as_the_server_counts_it() -> None:
    with running(ScriptedPeer(count=lambda prompt: 5 + 3 * len(prompt.split()))) as peer:
        outcome = measure_load(job(peer))
    assert "text, by the server's own count, 20 tokens" in notes(outcome)


def test_ids_are_prompts_where_the_server_takes_them() -> None:
    with running(ScriptedPeer(token_ids=True)) as peer:
        outcome = measure_load(job(peer))
    assert "prompts are token ids, 20 tokens" in notes(outcome)
    assert [len(body["prompt"]) for body in peer.bodies[1:]] == [20] * 9
    assert len({tuple(body["prompt"][:8]) for body in peer.bodies[1:]}) == 9, "no prompt begins like another"
    assert peer.bodies[-1]["model"] == "peer"
    assert peer.bodies[-1]["ignore_eos"] is True


def test_failures_are_reported_by_kind_and_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MIN_PAUSE_SECONDS", 0.0)
    faults = {4: "429", 6: "cut", 7: "429", 9: "error", 11: "garbage"}  # the first two ask how long texts are
    with running(ScriptedPeer(fault=faults.get)) as peer:
        outcome = measure_load(job(peer, bounds=RunLimits(num_requests=12)))
    failed = {
        name.partition("failed, ")[2]: figure.value for name, figure in named(outcome).items() if "failed" in name
    }
    assert failed == {"status 429": 2, "broken off": 1, "ended by an error": 1, "not JSON": 1}
    assert named(outcome)["×3 tokens"].parts["answered"] == 7
    assert named(outcome)["×3 failed, status 429"].met is False
    assert "out of memory" in notes(outcome)


def test_a_server_that_answers_nothing_is_no_measurement() -> None:
    with (
        running(ScriptedPeer(fault=lambda number: "429" if number > 2 else None)) as peer,
        pytest.raises(MeasurementFailed, match="429"),
    ):
        measure_load(job(peer, bounds=RunLimits(num_requests=2)))


def test_arrivals_wait_for_nobody() -> None:
    # Nobody is answered until all have come: clients who wait for their answers would wait for ever. (The first asks whether ids do.)
    with running(ScriptedPeer(token_ids=True, hold=7)) as peer:
        outcome = measure_load(job(peer, levels=[LoadLevel(rate=200.0)], bounds=RunLimits(num_requests=6)))
    assert named(outcome)["200/s tokens"].parts["answered"] == 6
    intended = [request["intended"] for request in outcome.details["runs"][0]["requests"]]
    first = [request["intended"] + request["first_token"] for request in outcome.details["runs"][0]["requests"]]
    assert min(first) >= max(intended), "latency is counted from when the request should have been sent"


def test_another_server_takes_turns() -> None:
    with running(ScriptedPeer()) as mine, running(ScriptedPeer()) as theirs:
        outcome = measure_load(
            job(
                mine,
                theirs,
                levels=[LoadLevel(clients=1), LoadLevel(clients=2)],
                rounds=2,
                bounds=RunLimits(num_requests=3),
            )
        )
    assert [(run["level"], run["server"] == mine.url) for run in outcome.details["runs"]] == [
        ("×1", True), ("×1", True), ("×1", False), ("×1", False), ("×2", True), ("×2", True), ("×2", False), ("×2", False),
    ]  # fmt: skip
    figures = named(outcome)
    mine_at, theirs_at = mine.url.removeprefix("http://"), theirs.url.removeprefix("http://")
    ours, other = figures[f"×2 {mine_at} tokens"], figures[f"×2 {theirs_at} tokens"]
    assert (ours.ratio or 0.0) > 0.0
    assert ours.against == theirs_at
    assert other.ratio is None
    assert sorted(body["prompt"] for body in mine.bodies[2:]) == sorted(body["prompt"] for body in theirs.bodies[2:])


def test_who_begins_changes_from_round_to_round() -> None:
    asked: list[str] = []
    mine = ScriptedPeer(token_ids=True, on_request=lambda number: asked.append("mine"))
    with (
        running(mine),
        running(ScriptedPeer(token_ids=True, on_request=lambda number: asked.append("theirs"))) as theirs,
    ):
        measure_load(job(mine, theirs, levels=[LoadLevel(clients=1)], rounds=2, bounds=RunLimits(num_requests=1)))
    assert asked[2:] == ["mine", "theirs", "theirs", "mine"]


def test_goodput_is_what_was_soon_enough() -> None:
    with running(ScriptedPeer()) as peer:
        never = measure_load(job(peer, objective=LatencyObjective(ttft_seconds=0.0)))
        always = measure_load(job(peer, objective=LatencyObjective(ttft_seconds=60.0, itl_seconds=60.0)))
    assert (named(never)["×3 goodput"].ratio, named(always)["×3 goodput"].ratio) == (0.0, 1.0)


def test_ctrl_c_keeps_what_was_answered() -> None:
    def interrupt(number: int) -> None:
        if number == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with running(ScriptedPeer(on_request=interrupt)) as peer:
        outcome = measure_load(job(peer, bounds=RunLimits(seconds=600.0)))
    assert not outcome.complete
    assert named(outcome)["×3 tokens"].parts["answered"] >= 3


def test_requests_that_warm_up_are_not_counted() -> None:
    with running(ScriptedPeer(token_ids=True)) as peer:
        outcome = measure_load(job(peer, warm_up=None, max_tokens=UniformLengths(64, 64)))
    assert [body["max_tokens"] for body in peer.bodies] == [8] + [16] * 3 + [64] * 9
    assert named(outcome)["×3 tokens"].parts["answered"] == 9


def test_the_table_fits_a_terminal() -> None:
    with running(ScriptedPeer()) as mine, running(ScriptedPeer()) as theirs:
        load = job(
            mine,
            theirs,
            levels=[LoadLevel(clients=32)],
            objective=LatencyObjective(1.0),
            bounds=RunLimits(num_requests=64),
        )
        outcome = measure_load(load)
    assert Console(width=1000).measure(outcome_table(outcome)).maximum <= 120
