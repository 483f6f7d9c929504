"""Files of a release: the version in one place, changelog, bake targets, workflows, and the CycloneDX contents."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from app.version import VERSION
from external_tools import CHECKERS, ROOT, run, tool
from tools.lock import LOCKS
from tools.release_notes import notes
from tools.sbom import document

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
SCRIPTS = [ROOT / ".ci" / "run", *sorted((ROOT / "tools").glob("*.sh")), *sorted((ROOT / "docker").glob("*.sh"))]
# Its place, and what says it again and must go with it, beside the image's tag in manifests.
VERSION_PLACES = {"app/version.py", "CHANGELOG.md", "charts/armature/Chart.yaml"}
EXAMPLES = {"docs/releasing.md"}
# Other people's versions, and results that were measured with one of ours.
OTHERS_VERSIONS = ("requirements/", "docs/sample-report/", "tests/", "docs/proofs")
KINDS_OF_CHANGES = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_the_version_has_one_place() -> None:
    listed = run([tool("git"), "-C", ROOT, "ls-files"])
    if listed.returncode:
        pytest.skip("this is no git checkout")
    paths = [path for path in listed.stdout.splitlines() if not path.startswith(OTHERS_VERSIONS)]
    found = {path for path in paths if (ROOT / path).is_file() and says_version((ROOT / path).read_bytes())}
    assert found - EXAMPLES - tags_of_manifests().keys() == VERSION_PLACES


def test_manifests_ask_for_the_image_of_this_version() -> None:
    """The demo's has the tag that `docker buildx bake` gives without a version."""
    assert set(tags_of_manifests().values()) == {VERSION, f"{VERSION}-cuda", "dev"}


def tags_of_manifests() -> dict[str, str]:
    """The tag of our own image, by the file that says it."""
    files = sorted((ROOT / "k8s").rglob("kustomization.yaml"))
    images = [(file, image) for file in files for image in yaml.safe_load(file.read_text()).get("images", ())]
    return {str(file.relative_to(ROOT)): image["newTag"] for file, image in images if image["name"] == "armature"}


def says_version(content: bytes) -> bool:
    """Return True if a text names the version, except as the past release of a recorded figure."""
    content = re.sub(rb"release \d+\.\d+\.\d+", b"", content)
    return re.search(rb"(?<![\d.])" + re.escape(VERSION.encode()) + rb"(?![\d.])", content) is not None


def test_the_changelog_has_a_word_on_this_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    assert "### " in notes(f"v{VERSION}", VERSION, text)
    headings = re.findall(r"^## \[(.+?)\](?: - (.+))?$", text, re.MULTILINE)
    assert headings[0] == ("Unreleased", "")
    dates = [date.fromisoformat(day) for _, day in headings[1:]]
    assert dates == sorted(dates, reverse=True)
    assert set(re.findall(r"^### (.+)$", text, re.MULTILINE)) <= KINDS_OF_CHANGES


def baked(version: str) -> dict[str, Any]:
    """The targets as buildx reads them, which takes no daemon; skips where there is no buildx."""
    docker = tool("docker")
    if run([docker, "buildx", "version"]).returncode:
        pytest.skip("docker has no buildx here")
    environment = {**os.environ, "VERSION": version, "REGISTRY": "registry.example/"}
    told = run([docker, "buildx", "bake", "--print", "cpu", "cuda", "check", "release"], cwd=ROOT, env=environment)
    assert told.returncode == 0, told.stderr
    targets: dict[str, Any] = json.loads(told.stdout)["target"]
    return targets


def test_bake_makes_one_manifest_for_both() -> None:
    targets = baked("1.2.3")
    for name in ("cpu", "release", "cuda"):
        assert targets[name]["platforms"] == ["linux/amd64", "linux/arm64"], name
    assert (targets["cuda"]["target"], targets["cuda"]["args"]["KIND"]) == ("cuda", "cuda-")
    assert targets["cuda"]["tags"] == ["registry.example/armature:1.2.3-cuda"]
    assert targets["cpu"]["tags"] == ["registry.example/armature:1.2.3"]
    assert targets["cpu"]["args"]["VERSION"] == "1.2.3"
    assert (ROOT / targets["check"]["dockerfile"]).is_file()
    assert targets["check"]["output"] == [{"type": "cacheonly"}]
    assert {each["type"] for each in targets["release"]["attest"]} == {"provenance", "sbom"}


@pytest.mark.parametrize(
    ("version", "tags"), [("1.10.3", ["1.10.3", "1.10", "latest"]), ("0.2.0rc1", ["0.2.0rc1"]), ("dev", ["dev"])]
)
def test_only_a_final_version_moves_tags(version: str, tags: list[str]) -> None:
    assert baked(version)["release"]["tags"] == [f"registry.example/armature:{tag}" for tag in tags]


def test_workflows_are_what_the_forge_reads() -> None:
    check = tool("check-jsonschema")
    for schema, files in (("github-workflows", WORKFLOWS), ("dependabot", [ROOT / ".github" / "dependabot.yml"])):
        told = run([check, "--builtin-schema", f"vendor.{schema}", *files])
        assert told.returncode == 0, told.stdout + told.stderr


def test_zizmor_finds_nothing() -> None:
    told = run([tool("zizmor"), "--offline", "--no-progress", ROOT / ".github"])
    assert told.returncode == 0, told.stdout


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_jobs_bounded(workflow: Path) -> None:
    for action in re.findall(r"uses: (.+)", workflow.read_text()):
        assert action.startswith("./") or re.fullmatch(r"[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", action), action
    content = yaml.safe_load(workflow.read_text())
    assert content["permissions"] == {}
    for name, job in content["jobs"].items():
        assert job["permissions"], name
        assert "timeout-minutes" in job or "uses" in job, name


def test_continuous_integration_does_what_a_person_types_on_both_architectures() -> None:
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    runs = {name: [step["run"] for step in job["steps"] if "run" in step] for name, job in jobs.items()}
    assert ".ci/run" in runs["test"]
    assert {"make image", "docker buildx bake check"} <= set(runs["image"])
    assert {tuple(job["strategy"]["matrix"]["runner"]) for job in jobs.values()} == {
        ("ubuntu-24.04", "ubuntu-24.04-arm")
    }


def steps() -> Iterator[tuple[str, str]]:
    for workflow in WORKFLOWS:
        for name, job in yaml.safe_load(workflow.read_text())["jobs"].items():
            for number, step in enumerate(job.get("steps", ())):
                if "run" in step:
                    yield f"{workflow.stem}-{name}-{number}.sh", step["run"]


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    shellcheck = tool("shellcheck")
    for name, text in steps():
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{text}")
    told = run([shellcheck, *SCRIPTS, *sorted(tmp_path.glob("*.sh"))])
    assert told.returncode == 0, told.stdout


# Within the checkers' own environment, since the schema and its readers come with checkov.
READ_CYCLONEDX = """
import json, sys
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
for name in sys.argv[1:]:
    text = open(name).read()
    if error := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text):
        sys.exit(f"{name}: {str(error)[:1000]}")
    for component in json.loads(text)["components"]:
        assert PackageURL.from_string(component["purl"]).to_string() == component["purl"], component["purl"]
"""


def test_contents_are_cyclonedx(tmp_path: Path) -> None:
    tool("checkov")
    for lock in LOCKS:
        (tmp_path / f"{lock.name}.json").write_text(json.dumps(document(lock.name, datetime.now(UTC))))
    told = run([CHECKERS / "venv" / "bin" / "python", "-c", READ_CYCLONEDX, *sorted(tmp_path.iterdir())])
    assert told.returncode == 0, told.stderr
