"""Embedding servers under comparison: each has its turns, all are sent the same texts, and a failure is no figure."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from app.bench.http.embed import (
    EmbedTiming,
    EmbedWorkload,
)
from app.bench.http.loops import LoadRun
from app.bench.http.workload import LogNormalLengths
from tools import compare_embed_http
from tools.compare_embed_http import Job, Measured, _measured, _report, _specs, _venv
from tools.peers.servers import ServerSpec

STUB = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    seen = 0
    def do_GET(self):
        self.send_error(404)
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        Handler.seen += 1
        print(json.dumps(body["input"]), file=open(sys.argv[2], "a"))
        answer = json.dumps({"data": [{"embedding": [0.5]}], "usage": {"prompt_tokens": len(body["input"][0].split()) + 2}}).encode()
        self.send_response(500 if Handler.seen > int(sys.argv[3]) else 200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
    def log_message(self, *_):
        pass
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def job(folder: Path, **answers: int) -> Job:
    """Servers that answer so many requests and then no more."""
    script = folder / "stub.py"
    script.write_text(STUB)
    texts = EmbedWorkload(1, LogNormalLengths(10, 40))
    specs = [
        ServerSpec.parse(f"{name}={sys.executable} -S {script} {{port}} {folder / name} {number}")
        for name, number in answers.items()
    ]
    return Job(specs, clients=2, rounds=2, seconds=0.1, texts=texts)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare_embed_http, "WARM_UP_REQUESTS", 2)
    monkeypatch.setattr(compare_embed_http, "FEWEST", 2)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_every_server_has_its_turns_with_the_same_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found: dict[str, Measured] = defaultdict(Measured)
    asyncio.run(_measured(job(tmp_path, ours=10**6, other=10**6), found))
    assert [len(measured.samples) for measured in found.values()] == [2, 2]
    sent = [(tmp_path / name).read_text().splitlines()[1:] for name in ("ours", "other")]
    assert len({*sent[0][:3]} & {*sent[1][:3]}) >= 2, "in the same order, but for two clients who overtake each other"
    assert len(set(sent[0])) > 0.8 * len(sent[0]), "and hardly a text twice"
    _report(found)
    ours, other = capsys.readouterr().out.splitlines()
    assert "ours over it  1.00" in ours
    assert other.startswith("other")


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_failure_is_no_figure(tmp_path: Path) -> None:
    found: dict[str, Measured] = defaultdict(Measured)
    with pytest.raises(SystemExit, match="other status 500"):
        asyncio.run(_measured(job(tmp_path, ours=10**6, other=8), found))
    assert not found, "a round counts once it is whole"


def test_busy_and_calm_are_kept_apart() -> None:
    def run(*ends: float) -> LoadRun[EmbedTiming]:
        return LoadRun(0.0, 2.0, cpu_seconds=0.5, answered=[EmbedTiming(0.0, 0, 0.0, end, 1, 40, 42) for end in ends])

    measured = Measured()
    measured.add(run(0.5, 1.0, 1.5), run(0.1), cpu_seconds=3.0)
    it = measured.summary()
    assert (it["samples"], it["tokens"], it["cores"], it["client_cores"]) == pytest.approx((2.0, 84.0, 1.5, 0.25))
    assert (it["busy_p50_ms"], it["busy_p99_ms"], it["calm_p99_ms"]) == pytest.approx((1000, 1500, 100))


def test_peers_are_started_by_their_environments(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.touch()
    venvs = [_venv(f"{name}={tmp_path}") for name in ("openvino", "infinity")]
    given = argparse.Namespace(
        model=tmp_path, venv=venvs, flags="--precision fp32", exports=tmp_path, workers=(1, 2), threads=2, clients=1
    )
    specs = {spec.name: spec for spec in _specs(given)}
    assert list(specs) == ["ours", "openvino 1×2", "openvino 2×1", "infinity"]
    assert specs["openvino 2×1"].command[0] == str(python)
    assert specs["openvino 2×1"].environment == {"OMP_NUM_THREADS": "1"}
    assert "--precision" in specs["ours"].command
    assert all("{port}" in spec.command for spec in specs.values())
    json.dumps([spec.command for spec in specs.values()])
    for wrong in (f"vespa={tmp_path}", "openvino=/nowhere", "openvino"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=DIR"):
            _venv(wrong)
