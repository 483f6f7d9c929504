"""The SBOM of the image: every line of the lock, package metadata, and Debian's packages."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from app.version import VERSION
from tools import sbom
from tools.install import ROOT
from tools.sbom import Wheel, debian_packages, document, licences, read_lock

NOON = datetime(2026, 11, 22, 12, tzinfo=UTC)
HASH = "0" * 64
STATUS = """Package: libc6
Status: install ok installed
Architecture: arm64
Version: 2.36-9+deb12u10
Description: shared libraries
 Version: of a description is none

Package: gone
Status: deinstall ok config-files
Architecture: arm64
Version: 1.0

Package: python3-minimal
Status: install ok installed
Architecture: arm64
Version: 1:3.11.2-1~b1
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "var/lib/dpkg").mkdir(parents=True)
    (tmp_path / "etc").mkdir()
    (tmp_path / "var/lib/dpkg/status").write_text(STATUS)
    (tmp_path / "etc/os-release").write_text('NAME="Debian GNU/Linux"\nID=debian\nVERSION_CODENAME=bookworm\n')
    return tmp_path


def by_name(made: dict[str, Any]) -> dict[str, Any]:
    return {component["name"]: component for component in made["components"]}


def test_every_line_of_the_lock_is_a_component() -> None:
    lines = (ROOT / "requirements/image-arm64.txt").read_text().splitlines()[1:]
    made = document("arm64", NOON)
    told = [
        f"{each['name']}=={each['version']} --hash=sha256:{each['hashes'][0]['content']}"
        for each in made["components"]
        if each["purl"].startswith("pkg:pypi/")
    ]
    assert told == lines
    assert made["metadata"]["component"]["version"] == VERSION
    assert made["metadata"]["timestamp"] == "2026-11-22T12:00:00+00:00"


def test_every_library_in_the_web_page_is_a_component_with_its_licence() -> None:
    made = {each["purl"]: each for each in document("amd64", NOON)["components"] if "pkg:npm" in each["purl"]}
    folders = sorted(path for path in sbom.VENDOR.iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == sorted(sbom.VENDORED)
    for folder in folders:
        name, number, licence, file = sbom.VENDORED[folder.name]
        known = made[f"pkg:npm/{name.replace('@', '%40')}@{number}"]
        assert number in (folder / file).read_text(encoding="utf-8")[:300], "the version in the file's first lines"
        text = (folder / "LICENSE").read_text(encoding="utf-8")
        assert {"MIT": "MIT License", "BSD-3-Clause": "BSD 3-Clause"}[licence] in text
        assert known["licenses"][0]["license"]["id"] == licence


def test_the_same_contents_have_the_same_number() -> None:
    first, later, other = (
        document("amd64", NOON),
        document("amd64", datetime(2027, 1, 1, tzinfo=UTC)),
        document("arm64", NOON),
    )
    assert first["serialNumber"] == later["serialNumber"] != other["serialNumber"]


def test_a_line_without_a_hash_is_refused() -> None:
    with pytest.raises(SystemExit, match=r"h11==0\.16\.0"):
        read_lock(f"# a comment\nidna==3.20 --hash=sha256:{HASH}\nh11==0.16.0\n")


def test_a_local_version_names_its_own_index() -> None:
    assert Wheel("Typing_Extensions", "4.16.0", HASH).purl == "pkg:pypi/typing-extensions@4.16.0"
    index = "repository_url=https://download.pytorch.org/whl/cpu"
    assert Wheel("torch", "2.13.0+cpu", HASH).purl == f"pkg:pypi/torch@2.13.0%2Bcpu?{index}"


def test_only_the_very_version_speaks_for_itself() -> None:
    here = Wheel("fastapi", version("fastapi"), HASH)
    assert here.installed() is not None
    assert Wheel("fastapi", "0.0.1", HASH).installed() is None
    assert Wheel("no-such-package", "1.0", HASH).installed() is None


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ({"License-Expression": "MIT AND Zlib", "License": "x"}, [{"expression": "MIT AND Zlib"}]),
        (
            {"Classifier": "License :: OSI Approved :: BSD License", "License": "BSD"},
            [{"license": {"name": "BSD License"}}],
        ),
        ({"License": "MPL-2.0 AND MIT"}, [{"license": {"name": "MPL-2.0 AND MIT"}}]),
        ({"License": "All of a licence\nin many lines"}, []),
        ({"Classifier": "Typing :: Typed"}, []),
    ],
)
def test_licences_are_reported_as_they_were_declared(said: dict[str, str], told: list[Any]) -> None:
    class Installed:
        class metadata:  # noqa: N801
            get_all = staticmethod(lambda name: [said[name]] if name in said else None)

            def __class_getitem__(cls, name: str) -> str | None:
                return said.get(name)

    found = licences(Installed)  # type: ignore[arg-type]
    for each in found:
        assert (each.get("license") or each).pop("acknowledgement") == "declared"
    assert found == told


def test_who_asks_for_whom_is_reported_by_markers() -> None:
    wheels = {
        name: Wheel(name, version(name), HASH) for name in ("fastapi", "pydantic", "pydantic-core", "uvicorn", "uvloop")
    }
    graph = {each["ref"]: each["dependsOn"] for each in sbom.dependencies(list(wheels.values()), "aarch64")}
    asked = [ref for ref in graph["armature"] if ref.startswith("pkg:pypi/")]
    assert asked == [wheels[name].purl for name in ("fastapi", "pydantic", "uvicorn", "uvloop")]
    assert graph[wheels["pydantic"].purl] == [wheels["pydantic-core"].purl]
    assert graph[wheels["uvicorn"].purl] == []  # it asks for uvloop in an extra alone


def test_debian_packages_are_those_that_are_installed(root: Path) -> None:
    assert [each["purl"] for each in debian_packages(root)] == [
        "pkg:deb/debian/libc6@2.36-9%2Bdeb12u10?arch=arm64&distro=bookworm",
        "pkg:deb/debian/python3-minimal@1:3.11.2-1~b1?arch=arm64&distro=bookworm",
    ]
    assert by_name(document("arm64", NOON, root))["libc6"]["version"] == "2.36-9+deb12u10"
