"""Cost and energy that a real server reports: dollars by the clock, joules by a counter or by declared watts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from app.hardware import power
from app.hardware.facts import PowerCounter, PowerMeter
from tests.live.live_server import LiveServer, live, until
from tiny_encoders import Modules, write_encoder

PRICE, WATTS = 3.6, 50.0


def scraped(server: LiveServer) -> dict[str, float]:
    """Samples by name and labels; under the name alone, the sum of all that have it."""
    found: dict[str, float] = {}
    for family in parse_text(server.client.get("/metrics").text):
        for sample in family.samples:
            labels = ",".join(f"{key}={value}" for key, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    return found


def asked(server: LiveServer, path: str, body: dict[str, Any]) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text


@pytest.fixture(scope="module")
def decoder(tiny: Path) -> Iterator[LiveServer]:
    with live(tiny, hourly_price=PRICE, watts=WATTS) as server:
        yield server


def test_declared_watts_while_steps_run(decoder: LiveServer) -> None:
    asked(decoder, "/generate", {"prompt": "the fox", "max_tokens": 12, "ignore_eos": True})

    def agrees() -> bool:
        """The last step is counted when it has ended, after its tokens went out; a look may be a tenth of a second old."""
        seen = scraped(decoder)
        joules, steps = (
            seen.get("armature_energy_joules_total{source=modelled}", 0.0),
            seen["armature_step_seconds_sum"],
        )
        tokens = seen["armature_tokens_total{kind=prompt}"] + seen["armature_tokens_total{kind=completion}"]
        each = seen.get("armature_energy_joules_per_token{source=modelled}", 0.0)
        return steps > 0.0 and joules == pytest.approx(WATTS * steps) and each == pytest.approx(joules / tokens)

    until(agrees)
    assert not any("idle" in name for name in scraped(decoder)), "what it takes when idle is not known"


def test_dollars_by_the_clock_and_by_the_token(decoder: LiveServer) -> None:
    before = scraped(decoder)["armature_cost_dollars_total{}"]
    asked(decoder, "/generate", {"prompt": "the fox", "max_tokens": 12, "ignore_eos": True})
    after = scraped(decoder)
    assert 0.0 < before < after["armature_cost_dollars_total{}"] < 600 * PRICE / 3600
    speeds = [after[f"armature_throughput_per_second{{kind={kind}_tokens}}"] for kind in ("prompt", "completion")]
    dollars = after["llm_cost_per_million_tokens{cost_basis=allocation,model_name=tiny}"]
    assert dollars == pytest.approx(PRICE / 3600 / sum(speeds) * 1e6, rel=0.1)


def test_info_says_what_counts_and_why(decoder: LiveServer) -> None:
    place = decoder.client.get("/info").json()["place"]
    assert (place["hourly_price"], place["watts"], place["energy_source"]) == (PRICE, WATTS, "modelled")
    assert "declared watts" in place["energy_reason"]


def test_vectors_by_the_counter_of_a_machine_that_has_one(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A counter that is moved by hand, past its end."""
    counter = PowerCounter("package-0", str(tmp_path / "energy_uj"), "energy", wraps_at=262_143_328_850)
    monkeypatch.setattr(
        power, "find_power_meter", lambda files: PowerMeter("rapl", (counter,), "The processor's own counters.")
    )
    Path(counter.file).write_text("262143000000")
    directory = write_encoder(tmp_path_factory.mktemp("encoders") / "embedder", "BertModel", modules=Modules())
    with live(directory, hourly_price=PRICE, watts=WATTS) as server:
        asked(server, "/encode", {"inputs": ["the fox", "said hello"]})
        Path(counter.file).write_text(str(30_000_000 - 328_850))
        until(lambda: scraped(server).get("armature_energy_joules_total{source=rapl}") == pytest.approx(30.0))
        seen = scraped(server)
        assert seen["armature_energy_joules_per_vector{source=rapl}"] == pytest.approx(15.0)
        assert seen["armature_cost_per_million_vectors{}"] > 0.0
        info = server.client.get("/info").json()
        assert [told["name"] for told in info["facts"]["power"]["counters"]] == ["package-0"]
        assert info["place"]["energy_source"] == "rapl", "a counter goes before what was declared"
