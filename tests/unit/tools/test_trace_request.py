"""The request trace records the files of one folder by thread while it is on; a real request passes the layers in
order.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tools.trace_request import ROOT, CallRecorder, as_json, as_text


def module(folder: Path, name: str) -> Any:
    file = folder / f"{name}.py"
    file.write_text("def work():\n    return sum(number for number in range(3))\n")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_calls_are_recorded_by_thread_and_only_in_the_folder_while_recording(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    first, second = (module(tmp_path / "inside", name) for name in ("first", "second"))
    outside = module(tmp_path, "outside")
    recorder = CallRecorder(tmp_path / "inside")
    previous = sys.getprofile()
    recorder.install()
    try:
        second.work()  # not recorded yet
        recorder.recording = True
        first.work()
        outside.work()
        thread = threading.Thread(target=second.work, name="worker")
        thread.start()
        thread.join()
    finally:
        recorder.uninstall()
        sys.setprofile(previous)
    assert recorder.files() == {"MainThread": ["first.py"], "worker": ["second.py"]}
    totals = as_json(recorder)
    assert (totals["files"], totals["functions"]) == (2, 4)  # each `work` and its generator expression
    assert as_text(recorder).endswith(f"\n2 files of app/, 4 functions, {recorder.num_calls} calls")


@pytest.mark.full
def test_one_request_passes_the_event_loop_and_the_worker() -> None:
    command = [sys.executable, "-m", "tools.trace_request", "--json"]
    done = subprocess.run(command, cwd=ROOT.parent, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    traced = json.loads(done.stdout)
    assert "api/openai/routes.py" in traced["threads"]["MainThread"]
    assert "engine/scheduler/scheduler.py" in traced["threads"]["armature-worker"]
    assert traced["files"] >= len(traced["threads"]["armature-worker"])
