"""The parts of the cluster's proof that need no cluster: what is applied, what clients count, and what is missing."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from external_tools import ROOT, run, tool
from tools.proofs.cluster import namespaces, part, starts
from tools.proofs.cluster.load import Outcome, ask
from tools.proofs.cluster.namespaces import Lab, Unready
from tools.proofs.cluster.node import MODELS
from tools.proofs.cluster.programs import KUBERNETES, NEEDED, Missing, gather
from tools.proofs.cluster.service import REPLICAS, SMALL, Fleet
from tools.proofs.containers import Image
from tools.proofs.findings import Findings, TooLong

MODEL_VOLUME = "armature-models"


def test_what_is_applied_is_the_two_pools_as_the_readme_has_them(tmp_path: Path) -> None:
    """Only sizes, the number of pods and names differ: those that a machine of two cores cannot give."""
    kubectl = tool("kubectl")
    applied: list[tuple[str, ...]] = []
    lab = SimpleNamespace(folder=ROOT / "build" / "cluster-test" / tmp_path.name)
    lab.folder.mkdir(parents=True)
    try:
        fleet = Fleet(SimpleNamespace(lab=lab, kubectl=lambda *words: applied.append(words)), "fleet", "my-model")
        fleet.apply("ARMATURE_PRECISION=int4")
        built = run([kubectl, "kustomize", str(fleet.folder)])
    finally:
        subprocess.run(["rm", "-r", str(lab.folder)], check=True)
    assert applied == [("apply", "-k", str(fleet.folder))]
    assert built.returncode == 0, built.stderr
    manifests = list(yaml.safe_load_all(built.stdout))
    deployments = [each for each in manifests if each["kind"] == "Deployment"]
    assert sorted(each["metadata"]["name"] for each in deployments) == ["armature-amd64", "armature-arm64"]
    for each in deployments:
        spec = each["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        assert container["resources"] == {"requests": SMALL, "limits": SMALL}
        volumes = {volume.pop("name"): volume for volume in spec["volumes"]}
        assert volumes["models"]["image"]["reference"] == "my-model:1"
        assert volumes["cache"] == {"persistentVolumeClaim": {"claimName": "armature-cache"}}
    assert all(
        each["spec"]["minReplicas"] == REPLICAS for each in manifests if each["kind"] == "HorizontalPodAutoscaler"
    )
    (settings,) = [each["data"] for each in manifests if each["kind"] == "ConfigMap"]
    assert settings["ARMATURE_PRECISION"] == "int4"
    assert settings["ARMATURE_MODEL"] == "/models/my-model"


def test_a_large_model_is_mounted_from_a_claim_and_not_copied(tmp_path: Path) -> None:
    kubectl = tool("kubectl")
    lab = SimpleNamespace(folder=ROOT / "build" / "cluster-test" / tmp_path.name)
    lab.folder.mkdir(parents=True)
    try:
        Fleet(SimpleNamespace(lab=lab, kubectl=lambda *words: None), "large", "big", claim=True, memory="4Gi").apply()
        built = run([kubectl, "kustomize", str(lab.folder / "large")])
    finally:
        subprocess.run(["rm", "-r", str(lab.folder)], check=True)
    assert built.returncode == 0, built.stderr
    manifests = list(yaml.safe_load_all(built.stdout))
    (volume,) = [each for each in manifests if each["metadata"]["name"] == MODEL_VOLUME and "hostPath" in each["spec"]]
    (claim,) = [each["spec"] for each in manifests if each["metadata"]["name"] == MODEL_VOLUME and each is not volume]
    assert (claim["volumeName"], claim["storageClassName"]) == (MODEL_VOLUME, "")
    assert volume["spec"]["hostPath"]["path"] == MODELS
    for each in (each for each in manifests if each["kind"] == "Deployment"):
        spec = each["spec"]["template"]["spec"]
        assert {"name": "models", "persistentVolumeClaim": {"claimName": MODEL_VOLUME}} in spec["volumes"]
        assert spec["containers"][0]["resources"]["limits"]["memory"] == "4Gi"


class Answers(BaseHTTPRequestHandler):
    """Whole answers, a refusal, an empty text, and half an answer, by turns."""

    turns = iter(())

    def do_POST(self) -> None:
        status, body, length = next(self.turns)
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def test_only_a_whole_answer_counts() -> None:
    whole, empty = (json.dumps({"choices": [{"text": text}]}).encode() for text in ("a fox", ""))
    Answers.turns = iter(
        [
            (200, whole, len(whole)),
            (503, b"", 0),
            (200, empty, len(empty)),
            (200, whole, len(whole) + 9),
            (200, b"{", 1),
        ]
    )
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}"
        assert [ask(url) for _ in range(5)] == ["", "503", "empty", "IncompleteRead", "JSONDecodeError"]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert ask(url) == "ConnectionRefusedError"


def test_an_outcome_names_its_failures() -> None:
    assert str(Outcome([0.5, 1.25])) == "2 answers, the slowest after 1.2 s; 0 failed"
    assert (
        str(Outcome([], Counter({"503": 2, "ConnectionResetError": 1})))
        == "0 answers; 3 failed (2 503, 1 ConnectionResetError)"
    )


def test_a_pod_is_timed_from_its_scheduling_to_its_readiness(monkeypatch: pytest.MonkeyPatch) -> None:
    """What kubectl prints of a watch: old pods, then a new one that is scheduled once, not ready twice, then ready."""
    clock = iter(range(100))
    monkeypatch.setattr(starts.time, "monotonic", lambda: float(next(clock)))
    moments: dict[tuple[str, str], float] = {}
    lines = [
        "old True True \n",
        "new  \n",
        "new True False \n",
        "new True False \n",
        "new True True \n",
        "old True False \n",
    ]
    starts.note(io.StringIO("".join(lines)), moments)
    assert moments == {("old", "PodScheduled"): 0, ("old", "Ready"): 1, ("new", "PodScheduled"): 2, ("new", "Ready"): 5}


def test_a_start_is_that_of_a_pod_scheduled_since() -> None:
    """A pod of a former rollout, whose end was watched, is none."""
    moments = {("old", starts.SCHEDULED): 1.0, ("old", starts.READY): 9.0, ("new", starts.SCHEDULED): 6.0}
    assert starts.seconds_of_new_pods(moments, 5.0) == []
    moments["new", starts.READY] = 8.5
    assert starts.seconds_of_new_pods(moments, 5.0) == [2.5]


def test_a_program_that_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_text("#!/bin/sh\necho 'no such flag' >&2\nexit 3\n")
    program.chmod(0o755)
    lab = Lab(tmp_path, tmp_path)
    lab.start("etcd", SimpleNamespace(command=lambda *words: list(words)), "etcd")
    with pytest.raises(Unready, match="etcd ended with status 3: no such flag"):
        lab.until(lambda: False, 600, "etcd")


def test_programs_that_are_no_longer_needed_end_and_the_others_stay(tmp_path: Path) -> None:
    lab = Lab(tmp_path, tmp_path)
    place = SimpleNamespace(command=lambda *words: list(words))
    for name in ("nginx", "etcd"):
        lab.start(name, place, "/bin/sleep", "600")
    ended, stays = (process for _, process in lab.processes)
    try:
        lab.end("nginx")
        assert ended.returncode == -signal.SIGTERM
        assert stays.poll() is None
    finally:
        lab.end("etcd")


def test_closing_waits_for_control_groups_that_are_still_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel refuses to remove a group until what was killed in it has ended."""
    monkeypatch.setattr(namespaces, "CGROUPS", tmp_path / "groups")
    lab = Lab(tmp_path / "lab", tmp_path)
    lab.folder.mkdir()
    pod = tmp_path / "groups" / "cpu" / f"{lab.group}-node-1" / "kubepods" / "pod1"
    pod.mkdir(parents=True)
    member = subprocess.Popen(["sleep", "infinity"])
    (pod / "cgroup.procs").write_text(f"{member.pid}\n")
    refused = threading.Event()
    remove = Path.rmdir

    def rmdir(folder: Path) -> None:
        try:
            remove(folder)
        except OSError:
            refused.set()
            raise

    def kernel() -> None:
        assert member.wait(60) == -signal.SIGKILL
        assert refused.wait(60)
        (pod / "cgroup.procs").unlink()

    monkeypatch.setattr(Path, "rmdir", rmdir)
    thread = threading.Thread(target=kernel)
    thread.start()
    lab.close()
    thread.join(60)
    assert list((tmp_path / "groups" / "cpu").iterdir()) == []
    assert not lab.folder.exists()


def test_a_folder_is_removed_and_what_its_links_name_stays(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "kept").touch()
    for number in range(40):
        inner = tmp_path / "lab" / str(number % 3) / str(number)
        inner.mkdir(parents=True)
        (inner / "file").touch()
    (tmp_path / "lab" / "link").symlink_to(other)
    namespaces.remove_folder(tmp_path / "lab")
    assert not (tmp_path / "lab").exists() and (other / "kept").exists()


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None if name == "ip" else f"/bin/{name}")
    with pytest.raises(Missing, match=f"apt-get install {NEEDED['ip']}"):
        gather(tmp_path / "made", tmp_path)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    for name in KUBERNETES[1:]:
        (tmp_path / name).touch()
    with pytest.raises(Missing, match="lacks kube-apiserver: --kubernetes names the folder"):
        gather(tmp_path / "made", tmp_path)


def test_a_step_that_breaks_off_has_failed_and_does_not_end_the_part() -> None:
    findings = Findings()

    def breaks() -> None:
        raise TimeoutError("the pod does not end")

    part.attempt(findings, "a drain", breaks)
    (check,) = findings.checks
    assert not check.passed
    assert (check.name, check.found) == ("a drain: the step ran to its end", "TimeoutError: the pod does not end")

    def takes_too_long() -> None:
        raise TooLong("ended after 60 minutes")

    with pytest.raises(TooLong):
        part.attempt(findings, "a drain", takes_too_long)


def test_without_a_checkpoint_no_second_start_is_claimed() -> None:
    findings = Findings()
    starts.second_start(findings, SimpleNamespace(), [], None)
    assert not findings.checks
    assert "--model DIR" in findings.skipped[0]


def test_without_kubernetes_nothing_is_claimed() -> None:
    findings = Findings()
    part.run(findings, Image("armature:dev", "linux/amd64"), None, None)
    assert not findings.checks
    assert "--kubernetes DIR" in findings.skipped[0]


def test_the_clients_run_alone_and_end_with_their_input() -> None:
    words = [sys.executable, "-m", "tools.proofs.cluster.load", "http://127.0.0.1:9", "2", "24"]
    done = subprocess.run(words, input="", capture_output=True, text=True, cwd=ROOT, timeout=60, check=True)
    told = json.loads(done.stdout)
    assert told["answers"] == []
    assert set(told["failures"]) <= {"ConnectionRefusedError"}
