"""Completion: every command and flag is in each script, and real shells complete with them what the parser knows."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from app.cli.completion import SHELLS, completion_script
from app.cli.main import COMMANDS, main
from app.cli.parser import make_parser, setting_rows
from armature_bench.flags import BENCHES

CASES = [
    (["ser"], ["serve"]),
    (["serve", "--dev"], ["--device"]),
    (["serve", "--device", "c"], ["cpu", "cuda"]),
    (["serve", "--device", ""], ["auto", "cpu", "mps", "cuda"]),
    (["serve", "--no-p"], ["--no-page"]),
    (["serve", "--port", ""], []),
    (["bench", "h"], ["http"]),
    (["bench", "http", "--kind", "e"], ["embed"]),
    (["bench", "compare", "result"], ["result a.json", "result.json"]),
    (["bench", "http", "--json", "result."], ["result.json"]),
    (["bench", "http", "--ki"], ["--kind"]),
    (["probe", "--js"], ["--json"]),
    (["chat", "--temp"], ["--temperature"]),
    (["chat", "--tls"], []),
    (["top", "--on"], ["--once"]),
    (["completion", ""], list(SHELLS)),
]


def script(shell: str) -> str:
    return completion_script(make_parser(), shell)


@pytest.mark.parametrize("shell", SHELLS)
def test_every_command_and_flag_is_completed(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert printed == script(shell)
    words = set(re.findall(r"[\w-]+", printed))
    assert {*COMMANDS, *BENCHES} <= words
    prefix = "" if shell == "fish" else "--"
    assert {f"{prefix}{row.flag.removeprefix('--')}" for row in setting_rows()} <= words


def test_another_shell_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["completion", "tcsh"])
    assert ended.value.code == 2
    assert "bash" in capsys.readouterr().err


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The scripts, and files to complete."""
    for shell in SHELLS:
        (tmp_path / f"armature.{shell}").write_text(script(shell), encoding="utf-8")
    for name in ("result.json", "result a.json", "other"):
        (tmp_path / name).touch()
    return tmp_path


def run(shell: str, code: str, folder: Path) -> list[str]:
    """Run code in a shell without the user's files, after the script was read, and return its lines."""
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"there is no {shell}")
    flags = {"bash": ["--norc", "--noprofile"], "zsh": ["-f"], "fish": ["--no-config"]}[shell]
    command = [program, *flags, "-c", f"source ./armature.{shell}\n{code}"]
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "LC_ALL": "C.UTF-8"}
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr
    assert not ran.stderr
    return ran.stdout.splitlines()


def in_bash(words: list[str], folder: Path) -> list[str]:
    given = shlex.join(["armature", *words])
    code = f"COMP_WORDS=({given}); COMP_CWORD={len(words)}; _armature; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    return [line for line in run("bash", code, folder) if line]


def in_fish(words: list[str], folder: Path) -> list[str]:
    lines = run("fish", f"complete -C {shlex.quote(' '.join(['armature', *words]))}", folder)
    return [line.partition("\t")[0] for line in lines]


@pytest.mark.cases(test=3, ci=12)
@pytest.mark.parametrize("complete", [in_bash, in_fish])
@pytest.mark.parametrize(("words", "expected"), CASES, ids=lambda value: " ".join(value))
def test_a_shell_completes(
    complete: Callable[[list[str], Path], list[str]], words: list[str], expected: list[str], folder: Path
) -> None:
    assert sorted(found.replace("\\ ", " ") for found in complete(words, folder)) == sorted(expected)


@pytest.mark.full
def test_bash_knows_the_function_and_divides_at_the_equals_sign(folder: Path) -> None:
    assert run("bash", "complete -p armature", folder) == ["complete -F _armature armature"]
    assert in_bash(["serve", "--device", "=", "c"], folder) == ["cpu", "cuda"]
    assert in_bash(["serve", "--device", "="], folder) == ["auto", "cpu", "mps", "cuda"]


def test_zsh_reads_the_script(folder: Path) -> None:
    program = shutil.which("zsh")
    if program is None:
        pytest.skip("there is no zsh")
    subprocess.run([program, "-n", folder / "armature.zsh"], check=True)


def test_a_description_breaks_no_quotes() -> None:
    """Each row is between single quotes, and a bar separates its parts."""
    rows = re.findall(r"^        '(.*)'$", script("zsh").partition("rows=(")[2].partition("\n    )\n")[0], re.MULTILINE)
    assert len(rows) > len(setting_rows())
    assert all(row.count("|") == 3 and "'" not in row and row.count(":") == 0 for row in rows)
