"""Weights of upstreams follow the servers' reports; changes below a tenth are not written, and refused files are
reverted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tools import upstream_weights
from tools.upstream_weights import differ, lines, read_weights, replace_safely, requests_per_second, weigh

TRUE, FALSE = [sys.executable, "-c", ""], [sys.executable, "-c", "raise SystemExit('no such directive')"]


def told(**speeds: dict[int, float]) -> str:
    series = [
        f'armature_capacity_tokens_per_second{{phase="{phase}",rows="{rows}"}} {speed}'
        for phase, by_rows in speeds.items()
        for rows, speed in by_rows.items()
    ]
    return "\n".join(["# TYPE armature_capacity_tokens_per_second gauge", *series, "armature_requests_waiting 0.0", ""])


def test_a_request_is_its_prompt_and_its_completion_at_the_full_batch() -> None:
    text = told(decode={1: 50.0, 16: 400.0}, prefill={32: 100.0, 512: 1000.0})
    assert requests_per_second(text, 500, 200) == pytest.approx(1 / (0.5 + 0.5))


def test_an_encoder_reads_and_nothing_else() -> None:
    assert requests_per_second(told(encode={16: 10.0, 512: 1280.0}), 128, 999) == pytest.approx(10.0)


@pytest.mark.parametrize(
    "text", ["", told(decode={1: 50.0}), told(decode={1: 0.0}, prefill={32: 9.0}), "<html>502</html>"]
)
def test_who_reports_too_little_reports_nothing(text: str) -> None:
    assert requests_per_second(text, 128, 128) is None


def test_whole_numbers_in_proportion() -> None:
    assert weigh({"a": 8.0, "b": 2.0, "c": 0.001}, {}) == {"a": 100, "b": 25, "c": 1}


def test_who_is_silent_keeps_its_weight_or_counts_as_the_slowest() -> None:
    assert weigh({"a": 8.0, "b": None, "c": 4.0, "new": None}, {"b": 70}) == {"a": 100, "b": 70, "c": 50, "new": 50}
    assert weigh({"a": None, "b": None}, {}) == {"a": 1, "b": 1}


def test_a_tenth_is_no_change() -> None:
    before = {"a": 100, "b": 25}
    assert not differ({"a": 100, "b": 27}, before)
    assert differ({"a": 100, "b": 29}, before)
    assert differ({"a": 100}, before)
    assert not differ({"a": 50, "b": 12}, before), "shares count, not numbers"


def test_what_was_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "servers.conf"
    assert read_weights(file) == {}
    assert replace_safely(file, lines({"10.0.0.1:8000": 100, "[::1]:8000": 25}), TRUE, TRUE) == ""
    assert read_weights(file) == {"10.0.0.1:8000": 100, "[::1]:8000": 25}
    assert list(tmp_path.iterdir()) == [file]


def test_what_nginx_refuses_is_taken_back(tmp_path: Path) -> None:
    file = tmp_path / "servers.conf"
    assert "no such directive" in replace_safely(file, "bad", FALSE, TRUE)
    assert not file.exists()
    file.write_text("good")
    assert "as it was" in replace_safely(file, "bad", FALSE, TRUE)
    assert file.read_text() == "good"


def test_one_look_from_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It reloads once; as long as nothing changes it leaves everything alone."""
    metrics = {
        "a:1": told(decode={8: 80.0}, prefill={64: 800.0}),
        "b:1": told(decode={8: 20.0}, prefill={64: 200.0}),
    }
    reloads = tmp_path / "reloads"
    reload = f"{sys.executable} -c \"open(r'{reloads}', 'a').write('x')\""
    monkeypatch.setattr(upstream_weights, "scraped", metrics.__getitem__)
    monkeypatch.setattr(
        sys, "argv", ["upstream_weights", "--out", str(tmp_path / "s.conf"), "--reload", reload, "a:1", "b:1"]
    )
    assert [upstream_weights.main(), upstream_weights.main()] == [0, 0]
    assert (
        tmp_path / "s.conf"
    ).read_text() == "server a:1 weight=100 max_fails=0;\nserver b:1 weight=25 max_fails=0;\n"
    assert reloads.read_text() == "x"
    metrics["b:1"] = told(decode={8: 40.0}, prefill={64: 400.0})
    assert upstream_weights.main() == 0
    assert reloads.read_text() == "xx"


def test_it_runs_alone(tmp_path: Path) -> None:
    """Beside nginx there is neither torch nor this project: a script and Python; nobody listens on port 9, so the server is unknown."""
    script = Path(upstream_weights.__file__)
    command = [sys.executable, "-I", "-S", str(script), "--out", str(tmp_path / "s.conf"), "127.0.0.1:9"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, (tmp_path / "s.conf").read_text()) == (0, "server 127.0.0.1:9 weight=1 max_fails=0;\n")
    assert "does not answer" in done.stderr
