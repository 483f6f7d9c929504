"""`armature tco` on files: what it prints, what it refuses, and with which status it ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import synthetic_results
from app.cli.main import main
from armature_bench.compare.result import CompareResult, write_result
from armature_bench.console import MeasurementFailed
from armature_bench.tco.command import CostArguments, run_tco

X86 = synthetic_results.Machine("xeon", "x86_64", "Intel", "Xeon", cores=8, threads_a_core=2)
ARM = synthetic_results.Machine("arm", "arm64", "Arm", "Neoverse-V1", cores=16, threads_a_core=1)


def saved(tmp_path: Path, *results: CompareResult) -> tuple[Path, ...]:
    paths = tuple(tmp_path / f"{index}.json" for index in range(len(results)))
    for path, result in zip(paths, results, strict=True):
        write_result(result, path)
    return paths


def printed(capsys: pytest.CaptureFixture[str], **asked: Any) -> str:
    assert run_tco(CostArguments(**asked)) == 0
    return capsys.readouterr().out


def two(tmp_path: Path) -> tuple[Path, ...]:
    return saved(
        tmp_path,
        synthetic_results.made_encoder(X86, instance="c6i.4xlarge"),
        synthetic_results.made_encoder(ARM, instance="c7g.4xlarge"),
    )


def test_tables_pairs_and_assumptions_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, paths=two(tmp_path), target="1000/s", p99_ms=5000)
    assert "texts of 128 tokens: 1,000 samples a second" in out
    assert "c6i.16xlarge" in out
    assert "Arm against x86, with the same number of vCPUs" in out
    assert "within 5000 ms" in out
    assert "as of 2026-07-20, https://github.com/aws/" in out
    assert "in proportion to cores" in out
    assert "$/year" in out
    assert "Cheapest: " in out
    assert "Missing prices" not in out


def test_a_narrow_terminal_cuts_nothing_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert "measured (rapl)" in printed(capsys, paths=two(tmp_path)[:1], target="1/s"), "the last column"


def test_without_prices_the_table_goes_on_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = saved(
        tmp_path,
        synthetic_results.made_decoder(X86, doubts=["The host was noisy."], complete=False),
        synthetic_results.made_decoder(ARM, instance="ours"),
    )
    out = printed(capsys, paths=paths, target="5000tok/s")
    assert "$/year" not in out
    assert "names no instance" in out
    assert "ours is not in the price table" in out
    assert "xeon-int4: The host was noisy." in out
    assert "xeon-int4: the measurement was interrupted" in out
    assert "answers of 128 tokens to prompts of 512: 5,000 tokens a second" in out


def test_json_is_one_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fields = json.loads(printed(capsys, paths=two(tmp_path), target="1000/s", published=True, json=True))
    assert fields["target"] == {"per_second": 1000.0, "unit": "samples"}
    assert fields["sheets"][0]["rows"][0]["machines"] > 0
    assert fields["sheets"][0]["pairs"]
    assert [line["machines"] for line in fields["published"]["lines"]] == [34, 24, 9, 7, 11], "at the given target"


def test_the_published_comparison_needs_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tco", "--published"]) == 0
    out = capsys.readouterr().out
    for figure in ("84", "61", "2,001,485", "1,116,812", "884,672", "44.2%", "38.1%", "334", "239", "1.58"):
        assert figure in out


def test_the_published_comparison_takes_a_target_and_a_p99(capsys: pytest.CaptureFixture[str]) -> None:
    out = printed(capsys, published=True, target="500/s", p99_ms=30)
    assert "As published: BERT-Large at 500 samples a second" in out
    assert "c6i.4xlarge is left out: its p99 of 35 ms is above 30 ms." in out
    assert "left out" in printed_status(capsys, 1, published=True, p99_ms=1)


def printed_status(capsys: pytest.CaptureFixture[str], status: int, **asked: Any) -> str:
    assert run_tco(CostArguments(**asked)) == status
    return capsys.readouterr().out


def test_a_price_of_the_server_is_named_beside_list_prices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = saved(tmp_path, synthetic_results.made_encoder(X86, instance="c6i.4xlarge", hourly_price=0.5))
    out = printed(capsys, paths=paths, target="1000/s")
    cells = {line.split()[1]: line.split() for line in out.splitlines() if " batch " in line}
    price = {
        name: row[row.index(basis) - 1] for name, row in cells.items() for basis in row if basis in {"server", "list"}
    }
    assert (price["c6i.4xlarge"], price["c6i.8xlarge"]) == ("0.5", "1.36")
    assert "server" in cells["c6i.4xlarge"]
    assert "list" in cells["c6i.8xlarge"]
    assert "c6i.4xlarge: 0.5 dollars an hour are its server's --hourly-price; the table has 0.68 for it" in out


def test_hours_are_those_of_the_target(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"paths": two(tmp_path), "target": "1000/s", "json": True}
    year = json.loads(printed(capsys, **asked))["sheets"][0]["rows"][0]
    half = json.loads(printed(capsys, **asked, hours_a_day=12))["sheets"][0]["rows"][0]
    assert half["annual_dollars"] == pytest.approx(year["annual_dollars"] / 2)
    assert half["dollars_per_million_samples"] == pytest.approx(year["dollars_per_million_samples"])
    assert "during 4,380 hours of a year" in printed(capsys, **asked | {"json": False}, hours_a_day=12)


def test_a_p99_that_nothing_keeps_ends_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_tco(CostArguments(paths=two(tmp_path), target="1/s", p99_ms=0.001)) == 1
    assert "no measured load kept a p99 of 0.001 ms" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        ({}, "no result files"),
        ({"paths": (Path("a.json"),)}, "--target is missing"),
        ({"paths": (Path("a.json"),), "target": "0/s"}, "above 0"),
        ({"paths": (Path("a.json"),), "target": "1/s", "p99_ms": 0.0}, "--p99-ms must be above 0"),
        ({"paths": (Path("a.json"),), "target": "1/s", "p99_ms": float("nan")}, "--p99-ms must be above 0"),
        ({"paths": (Path("a.json"),), "target": "1/s"}, "a.json cannot be read"),
    ],
)
def test_what_says_nothing_is_refused(
    asked: dict[str, Any], complaint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MeasurementFailed, match=complaint):
        run_tco(CostArguments(**asked))


def test_different_models_are_refused(tmp_path: Path) -> None:
    paths = saved(tmp_path, synthetic_results.made_encoder(X86), synthetic_results.made_decoder(ARM))
    with pytest.raises(MeasurementFailed, match="different models"):
        run_tco(CostArguments(paths=paths, target="1/s"))


def test_results_of_one_name_are_distinguished_by_precision(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    paths = saved(
        tmp_path, *(synthetic_results.made_encoder(X86, precision, name="ours") for precision in ("int8", "bf16"))
    )
    out = printed(capsys, paths=paths, target="1/s")
    assert "ours int8" in out
    assert "ours bf16" in out


def test_two_results_of_one_name_and_precision_are_refused(tmp_path: Path) -> None:
    paths = saved(tmp_path, synthetic_results.made_encoder(X86), synthetic_results.made_encoder(X86))
    with pytest.raises(MeasurementFailed, match="are called xeon-int8 int8"):
        run_tco(CostArguments(paths=paths, target="1/s"))


def test_the_command_line_ends_with_a_sentence_and_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tco"]) == 2
    assert capsys.readouterr().err.startswith("armature tco: no result files")
