"""Properties of the image: size, user, labels, no compiler, a passwd entry, and compiled bytecode."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.version import VERSION
from tools.proofs.containers import Image, docker
from tools.proofs.findings import Findings

FETCH = Path(__file__).resolve().parents[2] / "k8s" / "components" / "model-fetch" / "claim" / "fetch_model.py"
MOST_BYTES = 1.2e9  # limit for amd64: all layers unpacked, including the base image
COMPILERS = ("cc", "gcc", "g++", "clang", "tcc", "ld", "as", "make", "cmake", "ninja", "pip", "pip3", "rustc", "go")
LABELS = ("title", "description", "licenses", "version", "revision")
LOOK = f"""
import json, os, pathlib, pwd, shutil
site = pathlib.Path("/opt/armature")
sources = [file for file in site.rglob("*.py") if "tests" not in file.parts and "transformers/models/" not in str(file)]
made = sum(1 for file in sources if (file.parent / "__pycache__").is_dir())
privileged = [name for folder, _, names in os.walk("/usr") for name in names
              if os.lstat(os.path.join(folder, name)).st_mode & 0o6000 == 0o4000]
writable = [str(path) for path in (site, pathlib.Path("/opt"), pathlib.Path("/usr/bin")) if os.access(path, os.W_OK)]
entry = pwd.getpwuid(os.getuid())
print(json.dumps({{"compilers": [name for name in {COMPILERS!r} if shutil.which(name)], "passwd": list(entry),
                  "compiled": made / len(sources), "setuid": privileged, "writable": writable}}))
"""


def run(findings: Findings, images: Sequence[Image]) -> None:
    rows = []
    for image in images:
        facts, found = image.facts(), json.loads(image.python(LOOK))
        named, config = image.architecture, facts["Config"]
        unpacked = _unpacked(image)
        findings.check(
            f"{named}: size", unpacked <= MOST_BYTES, f"{unpacked / 1e9:.2f} GB", f"<= {MOST_BYTES / 1e9:g} GB"
        )
        findings.check(f"{named}: user", config["User"] == "10001:10001", config["User"], "10001:10001")
        name, _, uid, _, _, home, shell = found["passwd"]
        findings.check(f"{named}: passwd entry", (name, uid) == ("armature", 10001), f"{name}, {uid}, {home}, {shell}")
        findings.check(f"{named}: no compiler", not found["compilers"], ", ".join(found["compilers"]) or "none", "none")
        findings.check(
            f"{named}: nothing of it can be written", not found["writable"], found["writable"] or "none", "none"
        )
        findings.check(
            f"{named}: bytecode was compiled", found["compiled"] > 0.99, f"{found['compiled']:.1%} of sources"
        )
        _says(findings, named, config)
        _fetches(findings, image)
        rows.append((named, f"{facts['Size'] / 1e6:.0f} MB", f"{unpacked / 1e6:.0f} MB", len(facts["RootFS"]["Layers"]),
                     _packages(image), ", ".join(found["setuid"]) or "none"))  # fmt: skip
    columns = ("architecture", "compressed", "unpacked", "layers", "torch", "setuid programs, without effect here")
    findings.table("Size", columns, rows)


def _unpacked(image: Image) -> int:
    sizes = docker(
        "image", "history", f"--platform={image.platform}", "--human=false", "--format={{.Size}}", image.tag
    ).stdout
    return sum(map(int, sizes.split()))


def _says(findings: Findings, named: str, config: dict[str, Any]) -> None:
    labels = {name: config["Labels"].get(f"org.opencontainers.image.{name}") for name in LABELS}
    findings.check(
        f"{named}: labels", all(labels.values()), "; ".join(f"{key} {value}" for key, value in labels.items())
    )
    words = config["Entrypoint"] == ["python3", "-P", "-m", "app"] and config["Cmd"] == ["serve"]
    findings.check(f"{named}: command", words, f"{config['Entrypoint']} {config['Cmd']}")
    signal = (config.get("StopSignal"), bool(config.get("Healthcheck")))
    findings.check(f"{named}: STOPSIGNAL and HEALTHCHECK", signal == ("SIGTERM", True), signal)


def _fetches(findings: Findings, image: Image) -> None:
    """Run the init container's script in the image: it copies the demo into a volume."""
    volumes = (f"--volume={FETCH}:/opt/fetch_model.py:ro", "--tmpfs=/models:uid=10001")
    wanted = ("--env=MODEL_SOURCE=/opt/armature/app/demo/llama", "--env=ARMATURE_MODEL=/models/demo")
    said = image.python("import runpy; runpy.run_path('/opt/fetch_model.py', run_name='__main__')", *volumes, *wanted)
    findings.check(
        f"{image.architecture}: its init container copies a model", "/models/demo" in said, said, "/models/demo: ..."
    )


def _packages(image: Image) -> str:
    script = "import importlib.metadata as m; from app.version import VERSION; print(m.version('torch'), VERSION)"
    torch, version = image.python(script).split()
    assert version == VERSION, f"the image holds version {version}, this is {VERSION}"
    return torch
