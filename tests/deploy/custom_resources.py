"""Whether custom resources are as those who defined them want: by their types and validators from npm, or by their definitions (CRDs)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from outside_tools import CHECKERS, Manifest, node_package, run, tool

# Where each kind's model lies among the packages of npm.
MODELS = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "Gateway": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "PrometheusRule": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
}
TSC = "--noEmit --strict --skipLibCheck --module nodenext --moduleResolution nodenext --target es2022".split()
Schema = dict[str, Any]


def complaints_of_models(manifests: Sequence[Manifest], folder: Path) -> str:
    """What TypeScript says of fields (those that nobody knows too) and the models' own validators of values; empty where all is well."""
    node, compiler = tool("node"), node_package("typescript") / "bin" / "tsc"
    for package in {MODELS[each["kind"]] for each in manifests}:
        node_package("/".join(package.split("/")[:2]))
    (folder / "node_modules").symlink_to(CHECKERS / "node_modules")
    (folder / "package.json").write_text('{"type": "module"}')
    lines, checks = [], []
    for number, each in enumerate(manifests):
        kind, package = each["kind"], MODELS[each["kind"]]
        literal = json.dumps({"apiVersion": each["apiVersion"], **each})
        lines.append(f'import type {{ I{kind} as T{number} }} from "{package}/{kind}.js";\nexport const m{number}: T{number} = {literal};')
        checks.append(f'import {{ {kind} as C{number} }} from "{package}/{kind}.js";\nnew C{number}({literal}).validate();')
    (folder / "types.ts").write_text("\n".join(lines))
    (folder / "values.js").write_text("\n".join(checks))
    typed = run([node, compiler, *TSC, "types.ts"], cwd=folder)
    valid = run([node, "values.js"], cwd=folder)
    return (typed.stdout if typed.returncode else "") + (valid.stderr if valid.returncode else "")


def complaints_of_definition(manifest: Manifest, folder: Path) -> str:
    """By the kind's own definition, in which nothing is allowed that it does not name; skips where `make checkers` could not get it."""
    checker = tool("check-jsonschema")
    schema, instance = folder / "schema.json", folder / "instance.json"
    schema.write_text(json.dumps(strict(_definition(manifest))))
    instance.write_text(json.dumps(manifest))
    told = run([checker, "--schemafile", schema, instance])
    return told.stdout + told.stderr if told.returncode else ""


def strict(schema: Schema) -> Schema:
    """As a cluster prunes: what is not named is not there. Kubernetes would drop it without a word, so here it is refused."""
    made: Schema = {
        key: {name: strict(each) for name, each in value.items()} if key == "properties" else _strict_part(value)
        for key, value in schema.items()
    }
    if "properties" in made and "additionalProperties" not in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    return made


def _strict_part(value: Any) -> Any:
    return strict(value) if isinstance(value, dict) and "type" in value else value


def _definition(manifest: Manifest) -> Schema:
    group, version = manifest["apiVersion"].split("/")
    for file in sorted((CHECKERS / "crds").glob(f"{group}_*.yaml")):
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        if definition["spec"]["names"]["kind"] == manifest["kind"]:
            (found,) = [each for each in definition["spec"]["versions"] if each["name"] == version]
            schema: Schema = found["schema"]["openAPIV3Schema"]
            return schema
    pytest.skip(f"the definition of {manifest['kind']} is not here: `make checkers` gets it where there is a network")
