"""`armature bench http --kind embed` against another kind of server: requests of each dialect, counts, failures."""

from __future__ import annotations

import json
import os
import random
import signal
import statistics
from collections.abc import Sequence
from typing import Any

import pytest

from app.cli.parser import parse_arguments
from app.settings import Settings
from armature_bench.console import BenchOutcome, Figure, MeasurementFailed
from armature_bench.http import loops
from armature_bench.http.dialects import EMBED_DIALECTS, parse_prompt_tokens
from armature_bench.http.embed import EmbedBench, EmbedTiming, EmbedWorkload, num_texts, num_tokens
from armature_bench.http.load import LoadJob, LoadLevel, ServerTarget, measure_load
from armature_bench.http.loops import LoadRun, RunLimits, units_per_second
from armature_bench.http.workload import LogNormalLengths, UniformLengths
from armature_bench.run import run_bench
from scripted_peer import ScriptedPeer, running


def job(
    *peers: ScriptedPeer, api: str = "openai", levels: Sequence[LoadLevel] = (LoadLevel(clients=3),), **changed: Any
) -> LoadJob:
    texts = changed.pop("texts", EmbedWorkload(2, UniformLengths(20, 20)))
    given = {"bounds": RunLimits(num_requests=9), "warm_up": 0} | changed
    return LoadJob("peer", [ServerTarget(peer.url, api=api) for peer in peers], levels, EmbedBench(texts), **given)


def named(outcome: BenchOutcome) -> dict[str, Figure]:
    return {figure.name: figure for figure in outcome.figures}


def asked(peer: ScriptedPeer) -> list[list[str]]:
    """The texts of every request after the two that ask how tokens are counted."""
    return [body["input"] for body in peer.bodies[2:]]


def test_texts_are_as_long_as_the_server_counts_them() -> None:
    with running(ScriptedPeer(count=lambda text: 2 + 3 * len(text.split()))) as peer:
        outcome = measure_load(job(peer))
    figures = named(outcome)
    assert list(figures) == ["×3 samples", "×3 tokens", "×3 latency", "this client, of a core"]
    assert figures["×3 samples"].parts["answered"] == 9
    assert figures["×3 tokens"].value == pytest.approx(20 * figures["×3 samples"].value)
    latency = figures["×3 latency"]
    assert 0 < latency.value <= latency.parts["p90"] <= latency.parts["p95"] <= (latency.p99 or 0)
    assert {len(text.split()) for texts in asked(peer) for text in texts} == {6}
    assert peer.bodies[-1]["model"] == "peer"
    assert [request["texts"] for request in outcome.details["runs"][0]["requests"]] == [2] * 9
    assert "sized by the server's own token count" in "\n".join(outcome.notes)


def test_without_usage_what_was_meant_is_counted_and_said_to_be() -> None:
    with running(ScriptedPeer(usage=False)) as peer:
        outcome = measure_load(job(peer))
    assert "no usage in its answers" in "\n".join(outcome.notes)
    assert named(outcome)["×3 tokens"].value == pytest.approx(20 * named(outcome)["×3 samples"].value)
    assert {len(text.split()) for texts in asked(peer) for text in texts} == {18}, "two tokens stand around a text"


@pytest.mark.parametrize("api", ["native", "tei", "oip"])
def test_every_dialect_is_spoken(api: str) -> None:
    with running(ScriptedPeer(embeds=api)) as peer:
        outcome = measure_load(job(peer, api=api))
    assert named(outcome)["×3 samples"].parts["answered"] == 9
    assert EMBED_DIALECTS[api].body(["a", "b"], "peer").keys() == peer.bodies[-1].keys()


def test_an_answer_without_vectors_is_no_measurement() -> None:
    with (
        running(ScriptedPeer(embeds="native")) as peer,
        pytest.raises(MeasurementFailed, match="/embed answered no vectors"),
    ):
        measure_load(job(peer, api="tei"))


def test_failures_are_reported_by_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "MIN_PAUSE_SECONDS", 0.0)
    with running(ScriptedPeer(fault={4: "429", 6: "cut"}.get)) as peer:
        outcome = measure_load(job(peer))
    failed = {
        name.partition("failed, ")[2]: figure.value for name, figure in named(outcome).items() if "failed" in name
    }
    assert failed == {"status 429": 1, "broken off": 1}
    assert named(outcome)["×3 samples"].parts["answered"] == 7


def test_arrivals_wait_for_nobody_and_servers_take_turns() -> None:
    with running(ScriptedPeer(hold=8, num_asking=2)) as mine, running(ScriptedPeer()) as theirs:
        outcome = measure_load(
            job(mine, theirs, levels=[LoadLevel(rate=500.0)], rounds=1, bounds=RunLimits(num_requests=6))
        )
    requests = outcome.details["runs"][0]["requests"]
    assert min(each["intended"] + each["answered"] for each in requests) >= max(each["intended"] for each in requests)
    assert [(run["server"] == mine.url) for run in outcome.details["runs"]] == [True, False]
    assert sorted(asked(mine)) == sorted(asked(theirs)), (
        "every server is sent the same texts, whichever of two arrives first"
    )
    assert (outcome.figures[0].ratio or 0.0) > 0.0


def test_ctrl_c_keeps_what_was_answered() -> None:
    def interrupt(number: int) -> None:
        if number == 8:
            os.kill(os.getpid(), signal.SIGINT)

    with running(ScriptedPeer(on_request=interrupt)) as peer:
        outcome = measure_load(job(peer, bounds=RunLimits(seconds=600.0)))
    assert not outcome.complete
    assert named(outcome)["×3 samples"].parts["answered"] >= 3


def test_speed_is_counted_while_all_clients_wait() -> None:
    def one(client: int, ended: float) -> EmbedTiming:
        return EmbedTiming(0.0, client, 0.0, ended, 4, 40, 44)

    run = LoadRun(0.0, 10.0, answered=[one(0, 1.0), one(1, 2.0), one(0, 3.0), one(1, 4.0), one(0, 5.0)])
    assert units_per_second(run, True, num_texts) == pytest.approx(4 * 2 / 2), (
        "from 2.0, when both had an answer, to 4.0"
    )
    assert units_per_second(run, True, num_tokens) == pytest.approx(44.0)
    assert units_per_second(run, False, num_texts) == pytest.approx(4 * 5 / 5), "arrivals: from the first to the last"


def test_lengths_have_the_median_that_was_asked_for() -> None:
    source = random.Random(0)
    drawn = [LogNormalLengths(40, 512).draw(source) for _ in range(4000)]
    assert 37 <= statistics.median(drawn) <= 43
    assert 300 < max(drawn) <= 512
    assert {LogNormalLengths(40, 40).draw(source) for _ in range(20)} == {40}


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"data": [[0.1]], "usage": {"prompt_tokens": 12, "total_tokens": 12}}, 12),
        ({"usage": {"prompt_tokens": 7}, "embeddings": [[0.1]]}, 7),
        ({"usage": {"prompt_tokens": None}}, None),
        ([[0.5]], None),
    ],
)
@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_tokens_are_found_without_reading_vectors(body: Any, tokens: int | None, separators: tuple[str, str]) -> None:
    assert parse_prompt_tokens(json.dumps(body, separators=separators).encode()) == tokens


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--kind=embed", "--max-tokens=4"], "--max-tokens does not apply to --kind embed"),
        (["--texts=4"], "--texts does not apply to --kind generate"),
        (["--kind=embed", "--api=completions"], "--api completions does not support --kind embed"),
    ],
)
def test_what_means_nothing_is_refused(flags: list[str], complaint: str) -> None:
    with pytest.raises(MeasurementFailed, match=complaint):
        run_bench(Settings(), parse_arguments(["bench", "http", *flags]))


def test_lengths_are_read_as_they_are_written() -> None:
    def lengths(text: str) -> object:
        return parse_arguments(["bench", "http", f"--lengths={text}"]).lengths

    assert (lengths("128"), lengths("8:16")) == (("even", 128, 128), ("even", 8, 16))
    assert lengths("lognormal:40:512") == ("lognormal", 40, 512)
    for wrong in ("lognormal:", "normal:40:512", "9:3"):
        with pytest.raises(SystemExit):
            lengths(wrong)
