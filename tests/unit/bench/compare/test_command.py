"""`armature bench compare` as it is typed: from the command line to the file, and what is refused before anything is measured."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from app.cli import main
from app.cli.parser import parse_arguments
from app.errors import UnknownArgument
from armature_bench.compare.result import read_result
from scripted_machine import ScriptedMachine, running


def test_from_the_command_line_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.json"
    with running(ScriptedMachine()) as machine:
        words = [
            "--url",
            machine.url,
            "--seconds",
            "0.01",
            "--output",
            str(path),
            "--name",
            "desk",
            "--hourly-price",
            "0.25",
        ]
        assert main.main(["bench", "compare", *words]) == 0
    result = read_result(path)
    assert (result.name, result.url, result.hourly_price, result.flags) == ("desk", machine.url, 0.25, [])
    captured = capsys.readouterr()
    told = json.loads(captured.out)
    assert (told["bench"], told["details"]["file"], told["complete"]) == ("compare", str(path), True)
    assert "1 client, prompts of 128" in captured.err
    assert "The server has version 1.2.3" in captured.err


def test_a_server_that_was_interrupted_half_way_ends_with_the_shells_status(tmp_path: Path) -> None:
    machine = ScriptedMachine()
    machine.on_request = lambda number: setattr(machine, "dead", machine.paths.count("/metrics") >= 4)
    with running(machine):
        words = ["--url", machine.url, "--seconds", "0.01", "--output", str(tmp_path / "part.json")]
        assert main.main(["bench", "compare", *words]) == 130
    assert not read_result(tmp_path / "part.json").complete


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["a.json", "--precision", "int4"], "--precision: these flags apply to a measurement, but RESULTs are given"),
        (
            ["a.json", "--seconds", "2", "--url", "x"],
            "--url, --seconds: these flags apply to a measurement, but RESULTs are given",
        ),
        (["a.json"], "a.json cannot be read"),
        (["--report", "here"], "--report and --force need RESULTs"),
        (["--force"], "--report and --force need RESULTs"),
        (
            ["--url", "http://127.0.0.1:9", "--threads", "2"],
            "--threads does not apply to a server that is already running",
        ),
        (["--url", "http://127.0.0.1:9"], "http://127.0.0.1:9 is not ready"),
        (["--seconds", "0"], "--seconds 0"),
        (["--seconds", "nan"], "--seconds nan"),
        (["--output", os.sep], "cannot be written"),
    ],
)
def test_what_makes_no_sense_is_refused(
    words: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(["bench", "compare", *words]) == (2 if words[0] == "a.json" else 1)
    captured = capsys.readouterr()
    assert captured.err.startswith("armature bench compare: ")
    assert complaint in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_files_stand_together() -> None:
    given = parse_arguments(["bench", "compare", "--report", "here", "a.json", "b.json"])
    assert (given.results, given.report) == ([Path("a.json"), Path("b.json")], Path("here"))
    assert parse_arguments(["tco", "a.json", "--target", "3/s"]).results == [Path("a.json")]
    with pytest.raises(UnknownArgument, match=r"'b.json' is not understood: give all result files together"):
        parse_arguments(["bench", "compare", "a.json", "--report", "here", "b.json"])
    with pytest.raises(UnknownArgument, match=r"armature tco: there is no flag --targt\. Did you mean --target\?"):
        parse_arguments(["tco", "--targt", "3"])
