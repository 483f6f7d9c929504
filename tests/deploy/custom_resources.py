"""Validation of custom resources by the types and validators on npm, or by their definitions (CRDs)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from external_tools import CHECKERS, Manifest, node_package, run, tool

# Where each kind's model lies among the packages of npm.
MODELS = {
    "ScaledObject": "@kubernetes-models/keda/keda.sh/v1alpha1",
    "Gateway": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "HTTPRoute": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
    "PodMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
    "ServiceMonitor": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
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
        lines.append(
            f'import type {{ I{kind} as T{number} }} from "{package}/{kind}";\nexport const m{number}: T{number} = {literal};'
        )
        checks.append(
            f'import {{ {kind} as C{number} }} from "{package}/{kind}";\nnew C{number}({literal}).validate();'
        )
    (folder / "types.ts").write_text("\n".join(lines))
    (folder / "values.js").write_text("\n".join(checks))
    typed = run([node, compiler, *TSC, "types.ts"], cwd=folder)
    valid = run([node, "values.js"], cwd=folder)
    return (typed.stdout if typed.returncode else "") + (valid.stderr if valid.returncode else "")


def complaints_of_definition(manifests: Sequence[Manifest], folder: Path) -> str:
    """Of one kind, by its own definition, which allows nothing that it does not name; skips where `make checkers` could not get it."""
    checker = tool("check-jsonschema")
    schema = folder / "schema.json"
    schema.write_text(json.dumps(strict(_definition(manifests[0]), manifests)))
    files = [folder / f"{number}.json" for number in range(len(manifests))]
    for file, manifest in zip(files, manifests, strict=True):
        file.write_text(json.dumps(manifest))
    told = run([checker, "--schemafile", schema, *files])
    return told.stdout + told.stderr if told.returncode else ""


def strict(schema: Schema, values: Sequence[Any]) -> Schema:
    """What a definition says of these values. What it does not name is refused, where a cluster would drop it without a word; and what
    it says of fields that are not there is left out, for a whole pod is part of some, and a megabyte.
    """
    made = dict(schema)
    objects = [each for each in values if isinstance(each, dict)]
    if "properties" in schema:
        present = {name for each in objects for name in each}
        known = {name: each for name, each in schema["properties"].items() if name in present}
        made["properties"] = {
            name: strict(each, [one[name] for one in objects if name in one]) for name, each in known.items()
        }
        if not schema.get("x-kubernetes-preserve-unknown-fields"):
            made["additionalProperties"] = False
    elif isinstance(schema.get("additionalProperties"), dict):
        made["additionalProperties"] = strict(
            schema["additionalProperties"], [one for each in objects for one in each.values()]
        )
    if "items" in schema:
        made["items"] = strict(schema["items"], [one for each in values if isinstance(each, list) for one in each])
    return made


def _definition(manifest: Manifest) -> Schema:
    group, version = manifest["apiVersion"].split("/")
    for file in sorted((CHECKERS / "crds").glob(f"{group}_{manifest['kind'].lower()}*s.yaml")):
        definition = yaml.load(file.read_text(), Loader=yaml.CSafeLoader)
        (found,) = [each for each in definition["spec"]["versions"] if each["name"] == version]
        schema: Schema = found["schema"]["openAPIV3Schema"]
        return schema
    pytest.skip(f"the definition of {manifest['kind']} is not here: `make checkers` gets it where there is a network")
