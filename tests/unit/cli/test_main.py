"""The command line: what it understands, how it refuses, and that it does without torch until something computes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from app.cli import main
from app.cli.parser import parse_arguments, setting_rows
from app.errors import CheckpointInvalid, RequestTimeout, StartupError, UnknownArgument
from app.hardware.facts import Core, Cpu, Facts
from app.settings import SETTING_GROUPS, given_settings
from app.version import VERSION
from armature_bench.flags import BENCHES

FACTS = Facts("linux", "x86_64", Cpu("Maker", "Processor"), (Core((0,)), Core((1,))), 2**34, 2**33, (0, 1))


@pytest.fixture
def recorded_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "probe", lambda: FACTS)


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"armature {VERSION}\n"


@pytest.mark.parametrize("command", [["serve"], ["probe"], *(["bench", name] for name in BENCHES)], ids=" ".join)
def test_every_setting_is_a_flag_with_its_variable_in_the_help(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main.main([*command, "--help"])
    shown = capsys.readouterr().out
    for row in setting_rows():
        assert f"  {row.flag} " in shown
        assert row.variable in shown


def test_each_setting_is_under_the_heading_of_its_group(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main.main(["serve", "--help"])
    parts = re.split(r"^(\w+) settings:$", capsys.readouterr().out, flags=re.MULTILINE)
    assert parts[1::2] == ["model", "machine", "network", "limits", "tuning"]
    shown = {
        group: re.findall(r"^  --([\w-]+)(?= )", text, re.MULTILINE)
        for group, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    for group in SETTING_GROUPS:
        flags = [flag for flag in shown[group] if not flag.startswith("no-")]
        assert flags == [row.flag.removeprefix("--") for row in setting_rows([group])]


def test_settings_reach_the_command_as_they_were_given() -> None:
    arguments = parse_arguments(["serve", "--max-model-len", "512", "--model=some/where"])
    assert given_settings(arguments) == {"model": "some/where", "max_model_len": "512"}
    assert parse_arguments(["bench", "itl", "--tokens", "7"]).tokens == 7
    assert parse_arguments(["bench", "prefix"]).tokens == 1000


def test_a_load_is_said_in_numbers() -> None:
    given = parse_arguments(["bench", "http", "--concurrency", "1,8", "--prompt-tokens", "64:256", "--no-ignore-eos"])
    assert (given.concurrency, given.prompt_tokens, given.max_tokens, given.ignore_eos) == (
        (1, 8),
        (64, 256),
        None,
        False,
    )
    assert parse_arguments(["bench", "http", "--rate", "0.5,2"]).rate == (0.5, 2.0)
    assert parse_arguments(["bench", "engine", "--rows", "1,8", "--steps", "2000"]).rows == (1, 8)


@pytest.mark.parametrize(
    "flag", ["--prompt-tokens=64:32", "--max-tokens=0", "--rate=0", "--concurrency=0", "--api=grpc"]
)
def test_a_load_that_cannot_be_is_refused(flag: str) -> None:
    with pytest.raises(SystemExit) as ended:
        parse_arguments(["bench", "http", flag])
    assert ended.value.code == 2


@pytest.mark.parametrize(
    "argv, expected",
    [
        (["serve", "--prot", "9000"], "armature serve: there is no flag --prot. Did you mean --port?"),
        (["serve", "--max-model-length=9"], "Did you mean --max-model-len?"),
        (["serve", "--xyzzy"], "there is no flag --xyzzy. armature serve --help"),
        (["serve", "a/b", "c/d"], "'c/d' is not understood. A model is given as --model c/d."),
        (["serve", "a/b", "--model", "c/d"], "the model is given twice, as a/b and as --model c/d."),
        (["srve"], "armature: there is no command 'srve'. Did you mean armature serve?"),
        (["bench", "enigne"], "armature bench: there is no command 'enigne'. Did you mean armature bench engine?"),
        (["Qwen/Qwen3-0.6B"], "Did you mean armature serve Qwen/Qwen3-0.6B?"),
        (["xyzzy"], "There are: serve, probe, pack,"),
        (["bench", "start", "--url", "http://x"], "armature bench start: there is no flag --url."),
        (["serve", "--por", "1"], "there is no flag --por."),
    ],
)
def test_what_is_not_understood_is_named_with_what_was_meant(
    argv: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UnknownArgument):
        parse_arguments(argv)
    assert main.main(argv) == 2
    captured = capsys.readouterr()
    assert expected in captured.err
    assert captured.out == ""


@pytest.mark.parametrize("command", ["serve", "probe", "pack", "calibrate"])
def test_a_model_may_be_given_without_its_flag(command: str) -> None:
    assert parse_arguments([command, "a/b", "--threads", "1"]).model == "a/b"
    assert not hasattr(parse_arguments([command]), "model")


@pytest.mark.parametrize("argv", [["bench"], ["bench", "itl", "--rounds", "0"], ["serve", "--port"]])
def test_a_command_line_that_cannot_be_ends_with_status_2(argv: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    assert ended.value.code == 2


class Unmendable(StartupError):
    exit_code = 1


@pytest.mark.parametrize(
    "error, status", [(CheckpointInvalid("No config."), 2), (Unmendable("No memory."), 1), (RequestTimeout("Late."), 1)]
)
def test_a_refusal_is_one_sentence_and_a_status(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(arguments: Namespace) -> int:
        raise error

    monkeypatch.setattr(main, "COMMANDS", {"serve": refuse})
    assert main.main(["serve"]) == status
    assert capsys.readouterr().err == f"armature: {error}\n"


def test_ctrl_c_has_the_shells_status(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(arguments: Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(main, "COMMANDS", {"serve": interrupted})
    assert main.main(["serve"]) == 130


def test_a_mistaken_setting_names_flag_and_variable(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["probe", "--threads", "none"]) == 2
    assert "threads (--threads, ARMATURE_THREADS)" in capsys.readouterr().err


@pytest.mark.usefixtures("recorded_machine")
def test_a_warning_goes_to_standard_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("ARMATURE_PORT", "tcp://10.0.0.1:8000")
    assert main.main(["probe", "--json"]) == 0
    captured = capsys.readouterr()
    assert "ARMATURE_PORT was injected by Kubernetes" in captured.err
    json.loads(captured.out)


@pytest.mark.usefixtures("recorded_machine")
def test_probe_says_what_it_found_and_decided(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["probe", "--json", "--threads", "1"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["cpu"]["vendor"] == "Maker"
    assert printed["plan"]["threads"]["value"] == 1
    assert printed["plan"]["threads"]["reason"]
    assert printed["needs"] is None
    assert main.main(["probe"]) == 0
    assert "Maker Processor" in capsys.readouterr().out


@pytest.mark.usefixtures("recorded_machine")
def test_probe_shows_the_facts_even_where_nothing_can_be_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["probe", "--json", "--device", "cuda"]) == 2
    captured = capsys.readouterr()
    assert json.loads(captured.out)["plan"] is None
    assert "cuda" in captured.err


@pytest.mark.usefixtures("recorded_machine")
def test_probe_refuses_a_checkpoint_that_is_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["probe", "--model", str(tmp_path)]) == 2
    assert "config.json" in capsys.readouterr().err


def test_a_bench_that_cannot_measure_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["bench", "itl", "--url", "http://127.0.0.1:1"]) == 1
    captured = capsys.readouterr()
    assert "armature bench itl: http://127.0.0.1:1 is not ready" in captured.err
    assert captured.out == ""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "app", *arguments], capture_output=True, text=True, check=False)


def test_the_module_is_the_command() -> None:
    assert run("--version").stdout == f"armature {VERSION}\n"
    assert run("serve", "--prot").returncode == 2


@pytest.mark.cases(test=1)
@pytest.mark.parametrize("argv", [["--version"], ["serve", "--help"], ["probe", "--json"]], ids=" ".join)
def test_torch_is_not_imported_to_speak(argv: list[str]) -> None:
    script = (
        "import sys\n"
        "from app.cli.main import main\n"
        "try:\n"
        "    main(sys.argv[1:])\n"
        "except SystemExit:\n"
        "    pass\n"
        "sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", script, *argv], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_a_reader_that_has_enough_is_no_error() -> None:
    command = f"{sys.executable} -m app probe --json | head -c 1"
    result = subprocess.run(command, shell=True, capture_output=True, text=True, check=False)
    assert result.stdout == "{"
    assert "Traceback" not in result.stderr


def test_the_command_alone_says_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    for line in said.err.splitlines()[2:]:
        words = re.split(r" {3,}", line.strip())[0].split()
        if words[-1] == "--help":
            continue
        assert parse_arguments(words[1:]).command == words[1], line


def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback() -> None:
    script = (
        "import os, signal, sys\n"
        "class Interrupter:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'app.cli.main':\n"
        "            os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupter())\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from app.__main__ import run\n"
        "run()\n"
    )
    ended = subprocess.run([sys.executable, "-c", script, "--version"], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (130, "")
