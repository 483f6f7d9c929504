"""The chart makes the objects that kustomize makes, rendered by Helm's own engine (PyPI's helm-python-sdk)."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.version import VERSION
from external_tools import CHECKERS, ROOT, Manifest, built, of_kind, run
from tests.deploy.clusters import environment, pod, server, servers

CHART = ROOT / "charts" / "armature"
ALL_SET, IMAGE = "../tests/deploy/overlays/chart", "../tests/deploy/overlays/image"
# Given its chart, values as JSON and a namespace: prints the manifests, or ends with Helm's own sentence.
RENDER = """
import json, sys
from helm_python import Chart, HelmError
from helm_python.chart import lint
chart, values = sys.argv[1], json.loads(sys.argv[2])
try:
    with Chart.load(chart) as loaded:
        print(json.dumps({"manifests": loaded.render(values, name="mine", namespace="armature"), "lint": lint(chart, values, strict=True)}))
except HelmError as error:
    sys.exit(str(error))
"""
MIXED: dict[str, Any] = yaml.safe_load((CHART / "mixed.yaml").read_text())
EVERYTHING = MIXED | {
    "models": {"claim": "armature-models"},
    "cache": {"claim": "armature-cache"},
    "priority": {"class": "armature", "create": True},
    "monitoring": {"serviceMonitor": True},
}
OTHER_POOL = {"name": "a", "architecture": "", "settings": {}, "maxSurge": 1, "maxUnavailable": 0}
# The chart does not make them: claims and what belongs to the cluster's monitoring are their owners'.
LEFT_OUT = {"ConfigMap", "PersistentVolume", "PersistentVolumeClaim", "PrometheusRule"}


def helm(values: dict[str, Any]) -> Any:
    """What the engine made of the chart; skips without it."""
    python = CHECKERS / "venv" / "bin" / "python"
    if not python.exists() or run([python, "-c", "import helm_python"]).returncode:
        pytest.skip("helm-python-sdk is not here: `make checkers` installs it")
    return run([python, "-c", RENDER, CHART, json.dumps(values)])


@cache
def _made(values: str) -> tuple[Manifest, ...]:
    told = helm(json.loads(values))
    assert told.returncode == 0, told.stderr
    texts = json.loads(told.stdout)["manifests"]
    documents = [each for name, text in texts.items() if name.endswith(".yaml") for each in yaml.safe_load_all(text)]
    return tuple(each for each in documents if each)


def made(values: dict[str, Any]) -> tuple[Manifest, ...]:
    return _made(json.dumps(values))


def compared(manifests: Sequence[Manifest]) -> dict[tuple[str, str], Manifest]:
    """By kind and name, without what may differ: Helm's own labels, and by which way settings reach a container."""
    found = {}
    for given in manifests:
        if given["kind"] in LEFT_OUT:
            continue
        each = copy.deepcopy(given)
        labels = each["metadata"]["labels"]
        for own in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            labels.pop(own, None)
        if each["kind"] == "Deployment":
            container = server(given)
            (ours,) = [one for one in pod(each)["containers"] if one["name"] == "server"]
            ours["env"] = environment(manifests, container)
            ours.pop("envFrom", None)
            ours["volumeMounts"] = {one["mountPath"]: one for one in ours["volumeMounts"]}
            each["spec"]["template"]["spec"]["volumes"] = {one["name"]: one for one in pod(each)["volumes"]}
        found[each["kind"], each["metadata"]["name"]] = each
    return found


@pytest.mark.parametrize(
    ("values", "folder"),
    [
        ({}, "base"),
        (MIXED, "overlays/mixed"),
        (EVERYTHING, ALL_SET),
        (MIXED | {"models": {"image": "armature-model"}, "cache": {"claim": "armature-cache"},
                  "settings": {"ARMATURE_MODEL": "/models/my-model"}, "priority": {"class": "armature", "create": True},
                  "monitoring": {"serviceMonitor": True}}, IMAGE),
    ],
    ids=["default", "mixed", "everything", "image"],
)  # fmt: skip
def test_the_chart_makes_what_kustomize_makes(values: dict[str, Any], folder: str) -> None:
    ours, theirs = compared(made(values)), compared(built(folder))
    for each in theirs.values():
        each["metadata"].pop("namespace", None)
    assert ours.keys() == theirs.keys()
    for name, manifest in theirs.items():
        assert ours[name] == manifest, name


def test_a_podmonitor_is_the_components() -> None:
    (ours,) = of_kind(made({"monitoring": {"podMonitor": True}}), "PodMonitor")
    (theirs,) = of_kind(built("components/monitoring"), "PodMonitor")
    assert ours["spec"] == theirs["spec"]


def test_the_engine_finds_nothing_to_complain_of() -> None:
    for values in ({}, MIXED, EVERYTHING):
        findings = json.loads(helm(values).stdout)["lint"]
        assert not [each for each in findings.get("messages", []) if "icon" not in json.dumps(each)], findings


def test_the_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == VERSION
    assert chart["kubeVersion"].startswith(">=1.30")


def test_names_image_and_pulling_are_the_users() -> None:
    values = {
        "name": "small",
        "image": {"repository": "registry.example/you/armature", "tag": "1.2", "pullSecrets": [{"name": "mine"}]},
        "networkPolicy": False,
    }
    manifests = made(values)
    assert {each["metadata"]["name"] for each in manifests} == {"small"}
    (deployment,) = servers(manifests)
    assert server(deployment)["image"] == "registry.example/you/armature:1.2"
    assert pod(deployment)["serviceAccountName"] == "small"
    (account,) = of_kind(manifests, "ServiceAccount")
    assert account["imagePullSecrets"] == [{"name": "mine"}]
    assert not of_kind(manifests, "NetworkPolicy")


def test_a_pools_own_setting_counts_more_and_stays_its_own() -> None:
    pools = [
        OTHER_POOL | {"replicas": 1, "resources": {"cpu": 2}, "settings": {"ARMATURE_DRAIN_SECONDS": "60"}},
        OTHER_POOL | {"name": "b", "replicas": 1, "resources": {"cpu": 2}, "tolerations": [{"key": "gpu"}]},
    ]
    manifests = made({"pools": pools})
    drains = {
        each["metadata"]["name"]: environment(manifests, server(each))["ARMATURE_DRAIN_SECONDS"]
        for each in servers(manifests)
    }
    assert drains == {"armature-a": "60", "armature-b": "540"}
    assert [pod(each).get("tolerations") for each in servers(manifests)] == [None, [{"key": "gpu"}]]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"models": {"claim": "a", "image": "b"}}, "models.claim and models.image are both set"),
        ({"monitoring": {"podMonitor": True, "serviceMonitor": True}}, "scraped twice"),
        ({"priority": {"create": True}}, "priority.create needs priority.class"),
        ({"pools": [OTHER_POOL | {"replicas": 1, "resources": {"cpu": "1500m"}}]}, "plans with whole cores"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], said: str) -> None:
    told = helm(values)
    assert told.returncode != 0
    assert said in told.stderr


def test_every_value_is_explained_and_used() -> None:
    """A comment for each entry of the first level, and each of them in a template."""
    text, templates = (
        (CHART / "values.yaml").read_text(),
        "".join(each.read_text() for each in sorted(Path(CHART / "templates").iterdir())),
    )
    lines = text.splitlines()
    for name in yaml.safe_load(text):
        at = next(number for number, line in enumerate(lines) if line.startswith(f"{name}:"))
        assert lines[at - 1].startswith("#") or lines[at + 1].strip().startswith("#"), name
        assert f".Values.{name}" in templates, name
