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
from external_tools import CHECKERS, ROOT, Manifest, built, of_kind, run, tool
from tests.deploy.clusters import HUB, IMAGE, S3, containers, custom, environment, pod, server, servers

CHART = ROOT / "charts" / "armature"
SCHEMA = CHART / "values.schema.json"
ALL_SET, KEDA = "../tests/deploy/overlays/chart", "../tests/deploy/overlays/keda"
CLAIM_KIND = "PersistentVolumeClaim"
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
    "models": {"claim": "armature-models", "create": True},
    "cache": {"claim": "armature-cache"},
    "priority": {"class": "armature", "create": True},
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboards": True},
}
IN_IMAGE = EVERYTHING | {
    "models": {"image": "armature-model"},
    "settings": MIXED["settings"] | {"ARMATURE_MODEL": "/models/my-model"},
}
FROM_HUB = MIXED | {
    "models": {"create": True, "hub": {"enabled": True}},
    "settings": MIXED["settings"] | {"ARMATURE_MODEL": "Qwen/Qwen2.5-0.5B-Instruct"},
}
FROM_STORE = MIXED | {
    "models": {"perPod": "10Gi", "s3": {"source": "s3:my-bucket/my-model"}},
    "cache": {"sizeLimit": "10Gi"},
    "settings": MIXED["settings"] | {"ARMATURE_MODEL": "/models/my-model"},
    "pools": [pool | {"resources": pool["resources"] | {"ephemeral-storage": "21Gi"}} for pool in MIXED["pools"]],
}
# Named as the overlay's suffix says; its Service and account are the chart's.
KEDA_POOL: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())["pools"][0] | {
    "keda": {"minReplicas": 2, "maxReplicas": 8}
}
EXTRAS: dict[str, Any] = {
    "podAnnotations": {"example.com/team": "search"},
    "podLabels": {"objective": "turn-taking"},
    "serviceAccount": {"annotations": {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}},
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "envFrom": [{"secretRef": {"name": "more"}}],
    "extraVolumes": [{"name": "certificates", "secret": {"secretName": "mine"}}],
    "extraVolumeMounts": [{"name": "certificates", "mountPath": "/etc/mine", "readOnly": True}],
    "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
    "egress": [{"ports": [{"protocol": "TCP", "port": 3128}]}],
    "ingress": {
        "enabled": True,
        "className": "alb",
        "annotations": {"alb.ingress.kubernetes.io/target-type": "ip"},
        "hosts": ["llm.example"],
    },
}
OTHER_POOL = {"name": "a", "architecture": "", "settings": {}, "maxSurge": 1, "maxUnavailable": 0}
# Settings are in the chart's pods themselves, and volumes of nodes are their owners'.
LEFT_OUT = {"PersistentVolume"}
CACHE = "armature-cache"  # its claim is its owner's too


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
        metadata = given["metadata"]
        is_settings = given["kind"] == "ConfigMap" and not metadata["name"].startswith("armature-dashboard")
        if given["kind"] in LEFT_OUT or is_settings or (given["kind"], metadata["name"]) == (CLAIM_KIND, CACHE):
            continue
        each = copy.deepcopy(given)
        each["metadata"].pop("annotations", None)
        labels = each["metadata"]["labels"]
        for own in ("app.kubernetes.io/managed-by", "helm.sh/chart"):
            labels.pop(own, None)
        if each["kind"] == "Deployment":
            for one in containers(each):
                one["secrets"] = [*filter(is_secret, one.get("envFrom", [])), *filter(is_secret, one.get("env", []))]
                one["env"] = environment(manifests, one)
                if one["name"] == "server":
                    one["env"].pop("MODEL_SOURCE", None)  # of the init container's use
                else:  # an overlay gives it the ConfigMap, and the chart what it reads
                    told = {"RCLONE_S3_PROVIDER": "AWS"} | one["env"]
                    is_read = lambda name: name.startswith("RCLONE") or name in ("ARMATURE_MODEL", "MODEL_SOURCE")  # noqa: E731
                    one["env"] = {name: value for name, value in told.items() if is_read(name)}
                one.pop("envFrom", None)
                one["volumeMounts"] = {mount["mountPath"]: mount for mount in one["volumeMounts"]}
            each["spec"]["template"]["spec"]["volumes"] = {one["name"]: one for one in pod(each)["volumes"]}
        found[each["kind"], each["metadata"]["name"]] = each
    return found


def is_secret(source: dict[str, Any]) -> bool:
    return "secretRef" in source or "valueFrom" in source


@pytest.mark.parametrize(
    ("values", "folder"),
    [
        ({}, "base"),
        (MIXED, "overlays/mixed"),
        (EVERYTHING, ALL_SET),
        (IN_IMAGE, IMAGE),
        (FROM_HUB, HUB),
        (FROM_STORE, S3),
        ({"name": "armature-small", "pools": [KEDA_POOL]}, KEDA),
    ],
    ids=["default", "mixed", "everything", "image", "hub", "store", "keda"],
)
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
    for values in ({}, MIXED, EVERYTHING, FROM_HUB, FROM_STORE, EXTRAS):
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
        ({"models": {"claim": "a", "perPod": "1Gi"}}, "models.perPod is set beside"),
        ({"models": {"s3": {"source": "s3:a/b"}}}, "models.s3 needs models.claim or models.perPod"),
        (
            {"pools": [KEDA_POOL | {"autoscaling": {"minReplicas": 1, "maxReplicas": 2}}]},
            "KEDA makes an autoscaler too",
        ),
        ({"models": {"hub": {"enabled": True}}}, "need settings.ARMATURE_MODEL"),
        ({"podAnnotation": {"a": "b"}}, "podAnnotation"),
        ({"models": {"clam": "a"}}, "clam"),
        ({"pools": [OTHER_POOL | {"replicas": 1, "resources": {"cpu": "1500m"}}]}, "plans with whole cores"),
    ],
)
def test_what_cannot_work_is_refused(values: dict[str, Any], said: str) -> None:
    told = helm(values)
    assert told.returncode != 0
    assert said in told.stderr


def test_what_a_cluster_adds_is_where_it_belongs() -> None:
    """Annotations, labels, variables, volumes, an Ingress: each once, beside what is ours."""
    manifests = made(EXTRAS)
    (deployment,) = servers(manifests)
    template, container = deployment["spec"]["template"], server(deployment)
    assert template["metadata"]["annotations"]["example.com/team"] == "search"
    assert len(template["metadata"]["annotations"]) == 2
    assert template["metadata"]["labels"]["objective"] == "turn-taking"
    assert "objective" not in deployment["spec"]["selector"]["matchLabels"]
    assert {"name": "HTTPS_PROXY", "value": "http://proxy:3128"} in container["env"]
    assert container["envFrom"] == [{"secretRef": {"name": "more"}}]
    assert {"name": "certificates", "mountPath": "/etc/mine", "readOnly": True} in container["volumeMounts"]
    assert {"name": "certificates", "secret": {"secretName": "mine"}} in pod(deployment)["volumes"]
    (account,) = of_kind(manifests, "ServiceAccount")
    assert account["metadata"]["annotations"] == {"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/a"}
    (service,) = of_kind(manifests, "Service")
    assert (service["spec"]["type"], service["metadata"]["annotations"]) == ("LoadBalancer", {"a": "b"})
    (policy,) = of_kind(manifests, "NetworkPolicy")
    assert policy["spec"]["egress"] == EXTRAS["egress"]
    (ingress,) = of_kind(manifests, "Ingress")
    assert ingress["spec"]["ingressClassName"] == "alb"
    assert ingress["metadata"]["annotations"] == {"alb.ingress.kubernetes.io/target-type": "ip"}
    (rule,) = ingress["spec"]["rules"]
    assert rule["host"] == "llm.example"
    assert rule["http"]["paths"][0]["backend"]["service"] == {"name": "armature", "port": {"name": "http"}}


def test_an_ingress_without_hosts_takes_all() -> None:
    (ingress,) = of_kind(made({"ingress": {"enabled": True}}), "Ingress")
    assert [set(rule) for rule in ingress["spec"]["rules"]] == [{"http"}]


def test_runbooks_are_where_the_values_say() -> None:
    manifests = made({"monitoring": {"rules": True, "runbooks": "https://wiki.example/alerts"}})
    told = yaml.safe_dump_all(of_kind(manifests, "PrometheusRule"))
    assert told.count("runbook_url: https://wiki.example/alerts#armature") == told.count("runbook_url:") > 0


def test_a_pool_scales_by_its_own_queries() -> None:
    pools = [KEDA_POOL | {"name": "arm64", "keda": {"minReplicas": 0, "maxReplicas": 3, "prometheus": "http://p:1"}}]
    (scaled,) = of_kind(made({"pools": pools}), "ScaledObject")
    assert (scaled["metadata"]["name"], scaled["spec"]["scaleTargetRef"]) == (
        "armature-arm64",
        {"name": "armature-arm64"},
    )
    assert (scaled["spec"]["minReplicaCount"], scaled["spec"]["maxReplicaCount"]) == (0, 3)
    for trigger in scaled["spec"]["triggers"]:
        assert trigger["metadata"]["serverAddress"] == "http://p:1"
        assert 'namespace="armature",pool="arm64"' in trigger["metadata"]["query"]


@pytest.mark.full
def test_kubernetes_takes_every_field_of_the_chart(tmp_path: Path) -> None:
    validator = tool("kubernetes-validate")
    plain = [each for values in (EVERYTHING, FROM_HUB, FROM_STORE, EXTRAS) for each in made(values) if not custom(each)]
    (tmp_path / "all.yaml").write_text(yaml.safe_dump_all(plain))
    told = run([validator, "--strict", "--kubernetes-version", "1.30", tmp_path / "all.yaml"])
    assert told.returncode == 0, told.stdout + told.stderr
    assert (told.stdout + told.stderr).count(" passed ") == len(plain)


def test_the_schema_knows_the_values_and_no_others() -> None:
    values, schema = yaml.safe_load((CHART / "values.yaml").read_text()), json.loads(SCHEMA.read_text())
    assert schema["additionalProperties"] is False
    assert set(schema["properties"]) == set(values) | {"global"}
    for name, value in values.items():
        if isinstance(value, dict) and "properties" in schema["properties"][name]:
            assert set(schema["properties"][name]["properties"]) == set(value), name
            assert schema["properties"][name]["additionalProperties"] is False, name


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
