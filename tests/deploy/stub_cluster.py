"""A Kubernetes API on loopback that remembers objects and runs nothing, so that commands for kubectl can be tried for real.

It knows the kinds that ours are, takes create, apply, patch and delete, and says of every Deployment that it has been rolled out.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

Json = dict[str, Any]
# Group and version → kinds; those with a star are the cluster's own, in no namespace.
KINDS = {
    "v1": "Namespace* ConfigMap Service ServiceAccount Secret PersistentVolumeClaim Pod Node*",
    "apps/v1": "Deployment ReplicaSet",
    "policy/v1": "PodDisruptionBudget",
    "networking.k8s.io/v1": "NetworkPolicy",
    "autoscaling/v2": "HorizontalPodAutoscaler",
    "discovery.k8s.io/v1": "EndpointSlice",
    "monitoring.coreos.com/v1": "PodMonitor PrometheusRule",
}
VERBS = ["create", "delete", "get", "list", "patch", "update", "watch"]
_OBJECTS = re.compile(r"^(/api/v1|/apis/[^/]+/[^/]+)(?:/namespaces/([^/]+)(?=/))?/([a-z]+)(?:/([^/]+))?$")


def plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("y") else kind.lower() + "s"


def root(version: str) -> str:
    return "/api/v1" if version == "v1" else f"/apis/{version}"


def resources(version: str) -> list[Json]:
    named = [(kind.rstrip("*"), not kind.endswith("*")) for kind in KINDS[version].split()]
    return [
        {"name": plural(kind), "singularName": kind.lower(), "kind": kind, "namespaced": inside, "verbs": VERBS}
        for kind, inside in named
    ]


@dataclass
class StubCluster:
    """`objects` by (namespace, kind, name)."""

    url: str = ""
    objects: dict[tuple[str, str, str], Json] = field(default_factory=dict)

    def kubeconfig(self) -> str:
        """YAML is a superset of JSON."""
        return json.dumps(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "stub",
                "clusters": [{"name": "stub", "cluster": {"server": self.url}}],
                "contexts": [{"name": "stub", "context": {"cluster": "stub", "user": "stub"}}],
                "users": [{"name": "stub", "user": {}}],
            }
        )

    def of_kind(self, kind: str) -> dict[str, Json]:
        return {name: each for (_, its, name), each in self.objects.items() if its == kind}

    # ---- what it answers -------------------------------------------------------------------------------------------

    def discovery(self, path: str) -> Json | None:
        versions = {root(version): version for version in KINDS}
        if path == "/api":
            return {"kind": "APIVersions", "versions": ["v1"]}
        if path == "/apis":
            names = [version.split("/") for version in KINDS if "/" in version]
            groups = [(group, {"groupVersion": f"{group}/{number}", "version": number}) for group, number in names]
            listed = [{"name": group, "versions": [its], "preferredVersion": its} for group, its in groups]
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": listed}
        if path in versions:
            return {"kind": "APIResourceList", "groupVersion": versions[path], "resources": resources(versions[path])}
        if path == "/openapi/v3":
            return {"paths": {place[1:]: {"serverRelativeURL": f"/openapi/v3{place}"} for place in versions}}
        if path.startswith("/openapi/v3/"):
            return openapi(versions[path.removeprefix("/openapi/v3")])
        return {"major": "1", "minor": "34", "gitVersion": "v1.34.0"} if path == "/version" else None

    def answer(self, method: str, url: str, body: Json) -> tuple[int, Json]:
        parts = urlsplit(url)
        found = self.discovery(parts.path)
        if found is not None:
            return 200, found
        match = _OBJECTS.match(parts.path)
        if match is None:
            return refused(404, "NotFound", f"nothing is at {parts.path}")
        place, namespace, collection, name = match.groups()
        version = "v1" if place == "/api/v1" else place.removeprefix("/apis/")
        kind = next((each["kind"] for each in resources(version) if each["name"] == collection), "")
        if namespace is not None and ("", "Namespace", namespace) not in self.objects:
            return refused(404, "NotFound", f'namespaces "{namespace}" not found')
        if name is None and method == "GET":
            return 200, self.listed(version, kind, parse_qs(parts.query))
        return self.one(method, (namespace or "", kind, name or body.get("metadata", {}).get("name", "")), body)

    def listed(self, version: str, kind: str, query: dict[str, list[str]]) -> Json:
        wanted = query.get("fieldSelector", [""])[0].removeprefix("metadata.name=")
        items = [each for name, each in self.of_kind(kind).items() if wanted in ("", name)]
        return {"kind": f"{kind}List", "apiVersion": version, "metadata": {"resourceVersion": "1"}, "items": items}

    def one(self, method: str, key: tuple[str, str, str], body: Json) -> tuple[int, Json]:
        there = self.objects.get(key)
        if method == "POST":
            if there is not None:
                return refused(409, "AlreadyExists", f"{key[2]} is there already")
            self.objects[key] = finished(body, key)
            return 201, self.objects[key]
        if there is None:
            return refused(404, "NotFound", f"{key[1]} {key[2]} not found")
        if method == "PATCH":
            self.objects[key] = finished(merged(there, body), key)
        elif method == "DELETE":
            return 200, self.objects.pop(key)
        return 200, self.objects[key]


def openapi(version: str) -> Json:
    """Only as much as kubectl looks for before it asks a server to check fields strictly."""
    group, _, number = version.rpartition("/")
    parameters = [{"name": "fieldValidation", "in": "query"}, {"name": "dryRun", "in": "query"}]
    paths = {
        f"{root(version)}/{each['name']}/{{name}}": {
            "patch": {
                "x-kubernetes-group-version-kind": {"group": group, "version": number, "kind": each["kind"]},
                "parameters": parameters,
            }
        }
        for each in resources(version)
    }
    return {"openapi": "3.0.0", "info": {"title": version, "version": number}, "paths": paths}


def refused(status: int, reason: str, message: str) -> tuple[int, Json]:
    said = {
        "kind": "Status",
        "apiVersion": "v1",
        "status": "Failure",
        "reason": reason,
        "message": message,
        "code": status,
    }
    return status, said


def merged(there: Any, patch: Any) -> Any:
    """RFC 7386: enough for labels and for what was applied before."""
    if not isinstance(patch, dict):
        return patch
    result = dict(there) if isinstance(there, dict) else {}
    for name, value in patch.items():
        result[name] = merged(result.get(name), value)
    return {name: value for name, value in result.items() if value is not None}


def finished(body: Json, key: tuple[str, str, str]) -> Json:
    """As a controller leaves it behind when all has gone well."""
    known = {"name": key[2], "uid": "-".join(key), "resourceVersion": "1", "generation": 1}
    made = {**body, "metadata": body["metadata"] | known | ({"namespace": key[0]} if key[0] else {})}
    if key[1] == "Deployment":
        count = made["spec"].get("replicas", 1)
        everywhere = dict.fromkeys(("replicas", "updatedReplicas", "readyReplicas", "availableReplicas"), count)
        made["status"] = {"observedGeneration": 1, **everywhere}
    return made


@contextmanager
def stub_cluster() -> Iterator[StubCluster]:
    cluster = StubCluster()

    class Api(BaseHTTPRequestHandler):
        def answer(self) -> None:
            size = int(self.headers.get("Content-Length") or 0)
            status, body = cluster.answer(self.command, self.path, json.loads(self.rfile.read(size) or b"{}"))
            text = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_PATCH = do_DELETE = answer  # noqa: N815  # http.server looks for these names

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Api)
    cluster.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield cluster
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
