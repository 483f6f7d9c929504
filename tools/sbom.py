"""Write the SBOM of an image as CycloneDX 1.6: `python -m tools.sbom amd64 > sbom.json` (`cuda-amd64` for CUDA).

The components are the wheels of the image's lock with their hashes, and the libraries in the web page. Licences and
dependencies come from the metadata of installed packages of the locked version; inside the image (docs/releasing.md)
that is all of them. `--debian /` adds the Debian packages of that root.
`cyclonedx-py` does not replace it: it would have to be installed in the image that it describes, since it reads either
an environment, without the hashes of the wheels, or a requirements file, without licences and dependencies, and it
knows no Debian packages. This module uses the standard library and `packaging`, which the image has.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from app.version import VERSION
from tools.install import CPU_INDEX, ROOT
from tools.lock import LOCKS, PYTHON

Json = dict[str, Any]
VENDOR = ROOT / "app" / "web" / "vendor"
# Libraries in the web page, by their folder: package of npm, version, licence, and the file that has their code.
VENDORED = {
    "highlight": ("@highlightjs/cdn-assets", "11.12.0", "BSD-3-Clause", "highlight.min.js"),
    "temml": ("temml", "0.13.5", "MIT", "temml.min.js"),
}
LINE = re.compile(r"(?P<name>[^=\s]+)===?(?P<version>\S+) --hash=sha256:(?P<sha256>[0-9a-f]{64})")


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    version: str
    sha256: str

    @property
    def purl(self) -> str:
        """Package URL. A version with a local part such as +cpu comes from torch's own index, not from PyPI."""
        index = f"?repository_url={quote(CPU_INDEX, safe=':/')}" if "+" in self.version else ""
        return f"pkg:pypi/{canonicalize_name(self.name)}@{quote(self.version)}{index}"

    def installed(self) -> Distribution | None:
        """Return the installed distribution if it has exactly this version."""
        try:
            found = distribution(self.name)
        except PackageNotFoundError:
            return None
        return found if found.version == self.version else None


def main() -> int:
    """Print one document. It does not depend on the clock if SOURCE_DATE_EPOCH is set."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.sbom", description="Write the SBOM of an image as CycloneDX 1.6."
    )
    parser.add_argument("image", choices=[lock.name for lock in LOCKS])
    parser.add_argument("--debian", type=Path, metavar="ROOT", help="add the Debian packages of this root")
    asked = parser.parse_args()
    seconds = os.environ.get("SOURCE_DATE_EPOCH")
    now = datetime.fromtimestamp(int(seconds), UTC) if seconds else datetime.now(UTC)
    json.dump(document(asked.image, now, asked.debian), sys.stdout, indent=1)
    print()
    return 0


def document(name: str, now: datetime, debian: Path | None = None) -> Json:
    """Return the document. The serial number is derived from the contents, so equal images have equal numbers."""
    wheels = read_lock((ROOT / "requirements" / f"image-{name}.txt").read_text(encoding="utf-8"))
    components = [*map(component, wheels), *map(vendored, VENDORED)]
    if debian is not None:
        components += debian_packages(debian)
    machine = next(lock.machine for lock in LOCKS if lock.name == name)
    described = {"components": components, "dependencies": dependencies(wheels, machine)}
    contents = json.dumps([VERSION, name, described], sort_keys=True)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": uuid.uuid5(uuid.NAMESPACE_URL, contents).urn,
        "version": 1,
        "metadata": {
            "timestamp": now.isoformat(timespec="seconds"),
            "tools": {"components": [{"type": "application", "name": "armature tools.sbom", "version": VERSION}]},
            "component": {
                "type": "container",
                "bom-ref": "armature",
                "name": "armature",
                "version": VERSION,
                "licenses": [{"expression": project()["license"]}],
                "properties": [{"name": "armature:platform", "value": f"linux/{name.removeprefix('cuda-')}"}],
            },
        },
        **described,
    }


def project() -> Json:
    found: Json = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return found


def read_lock(text: str) -> list[Wheel]:
    """Parse a lock. Every line that is not a comment must have a hash."""
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found = [LINE.fullmatch(line) for line in lines]
    if broken := [line for line, match in zip(lines, found, strict=True) if match is None]:
        raise SystemExit(f"sbom: the lock has a line that is not NAME==VERSION --hash=sha256:…: {broken[0]}")
    return [Wheel(**match.groupdict()) for match in found if match]


def component(wheel: Wheel) -> Json:
    about: Json = {
        "type": "library",
        "bom-ref": wheel.purl,
        "name": wheel.name,
        "version": wheel.version,
        "hashes": [{"alg": "SHA-256", "content": wheel.sha256}],
        "purl": wheel.purl,
    }
    installed = wheel.installed()
    if installed and (declared := licences(installed)):
        about["licenses"] = declared
    return about


def vendored(folder: str) -> Json:
    """Return the component of a library that is part of the web page, with the hash of our copy."""
    name, version, licence, file = VENDORED[folder]
    purl = f"pkg:npm/{quote(name, safe='/')}@{version}"
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": version,
        "hashes": [{"alg": "SHA-256", "content": sha256((VENDOR / folder / file).read_bytes()).hexdigest()}],
        "purl": purl,
        "licenses": [{"license": {"id": licence, "acknowledgement": "declared"}}],
    }


def licences(installed: Distribution) -> list[Json]:
    """Return the SPDX expression if there is one, else the declared names unchanged: "BSD" may be any of several."""
    said = installed.metadata
    if expression := said["License-Expression"]:
        return [{"expression": expression, "acknowledgement": "declared"}]
    names = [each.rpartition(" :: ")[2] for each in said.get_all("Classifier") or [] if each.startswith("License ::")]
    names = names or [line for line in [said["License"]] if line and "\n" not in line]
    return [{"license": {"name": name, "acknowledgement": "declared"}} for name in names]


def dependencies(wheels: list[Wheel], machine: str) -> list[Json]:
    """Return the dependency graph among the components."""
    refs = {canonicalize_name(wheel.name): wheel.purl for wheel in wheels}
    here = {"platform_machine": machine, "sys_platform": "linux", "python_version": PYTHON, "extra": ""}

    def asked_for(requirements: list[str]) -> list[str]:
        """Return the components that these requirements name, without those of extras."""
        parsed = [Requirement(each) for each in requirements]
        wanted = {canonicalize_name(each.name) for each in parsed if each.marker is None or each.marker.evaluate(here)}
        return sorted(refs[name] for name in wanted if name in refs)

    graph = [{"ref": "armature", "dependsOn": asked_for(project()["dependencies"])}]
    graph[0]["dependsOn"] += [vendored(folder)["purl"] for folder in VENDORED]
    for wheel in wheels:
        installed = wheel.installed()
        graph.append({"ref": wheel.purl, "dependsOn": asked_for((installed.requires if installed else None) or [])})
    return graph


def debian_packages(root: Path) -> Iterator[Json]:
    """Yield the packages that dpkg lists as installed."""
    release = dict(
        re.findall(r'^(\w+)="?([^"\n]*)"?$', (root / "etc/os-release").read_text(encoding="utf-8"), re.MULTILINE)
    )
    for paragraph in (root / "var/lib/dpkg/status").read_text(encoding="utf-8").split("\n\n"):
        said = dict(re.findall(r"^([\w-]+): (.*)$", paragraph, re.MULTILINE))
        if said.get("Status") != "install ok installed":
            continue
        name, version = said["Package"], said["Version"]
        place = f"arch={said['Architecture']}&distro={release['VERSION_CODENAME']}"
        purl = f"pkg:deb/{release['ID']}/{quote(name)}@{quote(version, safe=':~')}?{place}"
        yield {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


if __name__ == "__main__":
    sys.exit(main())
