"""Weights of upstreams follow the servers' reports; changes below a tenth are not written, and refused files are
reverted.
"""

from __future__ import annotations

import io
import json
import socket
import struct
import subprocess
import sys
import threading
from pathlib import Path
from urllib.request import Request

import pytest

from examples.nginx import upstream_weights
from examples.nginx.upstream_weights import (
    differ,
    find,
    lines,
    read_records,
    read_weights,
    replace_safely,
    requests_per_second,
    weigh,
)

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
    assert (done.returncode, (tmp_path / "s.conf").read_text()) == (
        0,
        "server 127.0.0.1:9 weight=1 max_fails=0; # a guess\n",
    )
    assert "does not answer" in done.stderr
    assert "a guess, since no capacity was ever reported: the weight of 127.0.0.1:9" in done.stderr


def looked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> int:
    monkeypatch.setattr(sys, "argv", ["upstream_weights", "--out", str(tmp_path / "s.conf"), *words])
    return upstream_weights.main()


def test_a_guess_is_said_until_the_server_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A weight that was measured and whose server is silent for once is no guess."""
    metrics = {"a:1": told(decode={8: 80.0}, prefill={64: 800.0}), "b:1": ""}
    monkeypatch.setattr(upstream_weights, "scraped", metrics.__getitem__)
    assert looked(tmp_path, monkeypatch, "a:1", "b:1") == 0
    assert capsys.readouterr().err == "a guess, since no capacity was ever reported: the weight of b:1\n"
    assert [line.endswith("a guess") for line in (tmp_path / "s.conf").read_text().splitlines()] == [False, True]
    metrics["c:1"] = told(decode={8: 20.0}, prefill={64: 200.0})
    assert looked(tmp_path, monkeypatch, "a:1", "b:1", "c:1") == 0
    assert capsys.readouterr().out == "a:1 weight 100, b:1 weight 1 (a guess), c:1 weight 25\n"
    metrics["b:1"] = told(decode={8: 80.0}, prefill={64: 800.0})
    assert looked(tmp_path, monkeypatch, "a:1", "b:1") == 0
    assert "guess" not in (tmp_path / "s.conf").read_text()
    metrics["b:1"] = ""
    assert looked(tmp_path, monkeypatch, "a:1", "b:1") == 0
    assert "guess" not in (tmp_path / "s.conf").read_text() + capsys.readouterr().err


def test_the_first_file_is_there_before_any_server_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """nginx, which refuses to start without it, is started first or second; a reload that fails leaves the file."""
    seen: list[str] = []

    def scraped(server: str) -> str:
        seen.append((tmp_path / "s.conf").read_text())
        return told(decode={8: 80.0 if server == "a:1" else 20.0}, prefill={64: 800.0})

    monkeypatch.setattr(upstream_weights, "scraped", scraped)
    assert looked(tmp_path, monkeypatch, "--reload", " ".join(FALSE), "a:1", "b:1") == 1
    first = "server a:1 weight=1 max_fails=0; # a guess\nserver b:1 weight=1 max_fails=0; # a guess\n"
    assert seen == [first, first]
    assert (tmp_path / "s.conf").read_text() == first


# ---- where servers are found ----------------------------------------------------------------------------------------


def test_a_file_is_read_again_in_both_forms(tmp_path: Path) -> None:
    place = tmp_path / "servers"
    place.write_text("# ours\n10.0.0.2:8000\n\n10.0.0.1:8000\n")
    assert find(["127.0.0.1:1", f"file:{place}"]) == ["127.0.0.1:1", "10.0.0.1:8000", "10.0.0.2:8000"]
    place.write_text('[{"targets": ["10.0.0.3:8000"], "labels": {}}, {"targets": ["10.0.0.1:8000"]}]')
    assert find([f"file:{place}"]) == ["10.0.0.1:8000", "10.0.0.3:8000"]


def test_every_address_of_a_name_is_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    addresses = ["10.0.0.2", "10.0.0.1", "fd00::1"]
    monkeypatch.setattr("socket.getaddrinfo", lambda *_, **__: [(0, 0, 0, "", (each, 80)) for each in addresses])
    assert find(["dns:armature.internal:8000"]) == ["10.0.0.1:8000", "10.0.0.2:8000", "[fd00::1]:8000"]


def reply(number: int, question: bytes, targets: list[tuple[bytes, int]], flags: int = 0x8180) -> bytes:
    """A DNS reply as name servers write it: the question's name by a pointer, each target in full."""
    text = struct.pack(">6H", number, flags, 1, len(targets), 0, 0) + question + struct.pack(">2H", 33, 1)
    for target, port in targets:
        data = struct.pack(">3H", 0, 0, port) + target
        text += b"\xc0\x0c" + struct.pack(">2HIH", 33, 1, 30, len(data)) + data
    return text


def test_service_records_are_read_from_a_name_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    question = b"\x05_http\x04_tcp\x05fleet\0"
    asked: list[bytes] = []

    def answer(listener: socket.socket) -> None:
        connection, _ = listener.accept()
        with connection:
            packet = connection.recv(512)
            asked.append(packet[14:])
            number = struct.unpack(">H", packet[2:4])[0]
            text = reply(number, question, [(b"\x01b\xc0\x17", 8001), (b"\x01a\x05fleet\0", 8000)])
            connection.sendall(struct.pack(">H", len(text)) + text)

    (tmp_path / "resolv.conf").write_text("search x\nnameserver 127.0.0.1\n")
    monkeypatch.setattr(upstream_weights, "RESOLVER", tmp_path / "resolv.conf")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        there, connect = listener.getsockname(), socket.create_connection
        monkeypatch.setattr("socket.create_connection", lambda _, timeout: connect(there, timeout))
        server = threading.Thread(target=answer, args=(listener,))
        server.start()
        assert find(["srv:_http._tcp.fleet."]) == ["a.fleet:8000", "b.fleet:8001"]
        server.join()
    assert asked == [question + struct.pack(">2H", 33, 1)]


def test_a_reply_that_is_wrong_is_no_list() -> None:
    with pytest.raises(ValueError, match="error 3"):
        read_records(reply(7, b"\x01x\0", [], flags=0x8183), 7, 3)
    with pytest.raises(ValueError, match="error 0"):
        read_records(reply(8, b"\x01x\0", []), 7, 3)
    with pytest.raises(ValueError, match="points forwards"):
        read_records(reply(7, b"\x01x\0", [(b"\xc0\xff", 1)]), 7, 3)


def test_ready_endpoints_of_a_service_are_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    slices = {
        "items": [
            {
                "ports": [{"name": "metrics", "port": 9}, {"name": "http", "port": 8000}],
                "endpoints": [
                    {"addresses": ["10.1.0.2"], "conditions": {"ready": True}},
                    {"addresses": ["10.1.0.3"], "conditions": {"ready": False}},
                    {"addresses": ["10.1.0.1"], "conditions": {}},
                ],
            },
            {"ports": [{"port": 8000}], "endpoints": None},
        ]
    }
    asked: list[str] = []

    def urlopen(request: Request, **_: object) -> io.BytesIO:
        asked.append(request.full_url)
        return io.BytesIO(json.dumps(slices).encode())

    monkeypatch.setattr("urllib.request.urlopen", urlopen)
    assert find(["kubernetes:models/armature"], "http://127.0.0.1:8001") == ["10.1.0.1:8000", "10.1.0.2:8000"]
    path = (
        "/apis/discovery.k8s.io/v1/namespaces/models/endpointslices?labelSelector=kubernetes.io/service-name=armature"
    )
    assert asked == [f"http://127.0.0.1:8001{path}"]


@pytest.mark.parametrize("place", ["file:/nowhere", "dns:nameless", "srv:", "kubernetes:a/b"])
def test_a_place_that_does_not_answer_changes_nothing(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(upstream_weights, "RESOLVER", tmp_path / "none")
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    (tmp_path / "s.conf").write_text(lines({"a:1": 100}))
    assert looked(tmp_path, monkeypatch, place) == 1
    assert (tmp_path / "s.conf").read_text() == lines({"a:1": 100})
    assert capsys.readouterr().err.startswith(place)
