"""The walk in k8s/README.md, command by command: kubectl against an API that remembers, the questions against a real server."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

from app.version import VERSION
from armature_bench.http.server import running_server
from external_tools import ROOT, Manifest, tool
from tests.deploy.clusters import pod, server
from tests.deploy.stub_cluster import StubCluster, stub_cluster

README = (ROOT / "k8s" / "README.md").read_text(encoding="utf-8")
ADDRESS = "http://127.0.0.1:8000"
# Nothing is built or pushed: what it was told, and its input, are kept.
DOCKER = """#!/bin/sh
printf '%s\\n' "$*" >> docker.log
case "$*" in *"--file -"*) cat >> docker.log ;; esac
"""


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


COMMANDS = [block for block in blocks("bash") if ADDRESS not in block]
(QUESTIONS,) = [block for block in blocks("bash") if ADDRESS in block]


def walk(home: Path, cluster: StubCluster) -> None:
    """In a copy of what the repository has, with nothing on the path that would leave the machine."""
    shutil.copytree(ROOT / "k8s", home / "k8s")
    (home / "app").mkdir()
    shutil.copy(ROOT / "app" / "version.py", home / "app")
    (home / "my-model").mkdir()
    (home / "bin").mkdir()
    (home / "bin" / "docker").write_text(DOCKER)
    (home / "bin" / "docker").chmod(stat.S_IRWXU)
    (home / "kubeconfig").write_text(cluster.kubeconfig())
    paths = os.pathsep.join([str(home / "bin"), str(Path(tool("kubectl")).parent), os.environ["PATH"]])
    environment = {"PATH": paths, "HOME": str(home), "KUBECONFIG": str(home / "kubeconfig")}
    script = "set -euxo pipefail\n" + "\n".join(COMMANDS)
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=home,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def walked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StubCluster]:
    tool("kubectl")
    home = tmp_path_factory.mktemp("walk")
    with stub_cluster() as cluster:
        walk(home, cluster)
    return home, cluster


@pytest.mark.full
def test_both_pools_are_there_with_the_images_that_were_pushed(walked: tuple[Path, StubCluster]) -> None:
    deployments = walked[1].of_kind("Deployment")
    assert set(deployments) == {"armature-amd64", "armature-arm64"}
    for deployment in deployments.values():
        assert deployment["metadata"]["namespace"] == "armature"
        assert server(deployment)["image"] == f"registry.example/you/armature:{VERSION}"
        (fetch,) = pod(deployment)["initContainers"]
        assert fetch["image"] == "registry.example/you/my-model:1"
    told = (walked[0] / "docker.log").read_text().splitlines()
    assert told == [
        "buildx bake --push",
        "buildx build --push --platform linux/amd64,linux/arm64 --tag registry.example/you/my-model:1 --file - my-model",
        f"FROM registry.example/you/armature:{VERSION}",
        "COPY --chmod=755 . /model",
    ]
    assert '"${REGISTRY}armature:${VERSION}"' in (ROOT / "docker-bake.hcl").read_text(encoding="utf-8")


def settings(cluster: StubCluster, deployment: Manifest) -> dict[str, str]:
    (source,) = server(deployment)["envFrom"]
    return dict(cluster.of_kind("ConfigMap")[source["configMapRef"]["name"]]["data"])


def test_model_and_keys_are_where_the_settings_say(walked: tuple[Path, StubCluster]) -> None:
    cluster = walked[1]
    for deployment in cluster.of_kind("Deployment").values():
        said = settings(cluster, deployment)
        assert said["ARMATURE_MODEL"] == "/models/my-model"
        assert said["ARMATURE_DRAIN_SECONDS"] == "540", "the base's own settings stay"
        mounts = {each["mountPath"]: each["name"] for each in server(deployment)["volumeMounts"]}
        volumes = {each["name"]: each for each in pod(deployment)["volumes"]}
        secret = cluster.of_kind("Secret")[volumes[mounts["/etc/armature/keys"]]["secret"]["secretName"]]
        assert said["ARMATURE_API_KEY_FILE"] == f"/etc/armature/keys/{next(iter(secret['data']))}"
        assert "emptyDir" in volumes[mounts["/models"]]
    assert not cluster.of_kind("PersistentVolumeClaim"), "nobody would bind it"


def test_a_pools_own_price_is_written_over(walked: tuple[Path, StubCluster]) -> None:
    arm = server(walked[1].of_kind("Deployment")["armature-arm64"])
    assert {"name": "ARMATURE_HOURLY_PRICE", "value": "0.319"} in arm["env"]


def test_pods_are_admitted_under_the_restricted_standard(walked: tuple[Path, StubCluster]) -> None:
    labels = walked[1].of_kind("Namespace")["armature"]["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


@pytest.mark.full
async def test_the_questions_are_answered(walked: tuple[Path, StubCluster]) -> None:
    if shutil.which("curl") is None:
        pytest.skip("the questions are curl's")
    keys = walked[0] / "fleet" / "keys"
    async with running_server(
        None, ("--threads=1", "--served-model-name=my-model", f"--api-key-file={keys}")
    ) as started:
        script = QUESTIONS.replace(ADDRESS, started.url)
        done = subprocess.run(["bash", "-euc", script], cwd=walked[0], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert '"my-model"' in done.stdout
    assert '"text_completion"' in done.stdout


def test_every_folder_that_the_readme_names_is_there() -> None:
    for name in set(re.findall(r"`((?:base|overlays|components)/[\w/-]*)`", README)):
        assert (ROOT / "k8s" / name).is_dir(), name
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / "k8s" / link).exists(), link
