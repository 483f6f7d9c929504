"""Build the images and test them: `make prove`, or `python -m tools.prove [--image TAG] [--only quota,image]`.

Needs Docker, root (for control groups) and half an hour on an idle machine. The other architecture runs emulated. It
writes docs/proofs.md from docs/proofs.json, which has all findings: a later run of one part keeps the sections of the
other parts. The environment variable WHEELS names a folder with torch's wheel if its index is slow.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

import httpx

from app.hardware.probe.probe import probe
from app.version import VERSION
from armature_bench.console import MeasurementFailed
from tools.proofs import image, kernels, quota, refusals, serving, start
from tools.proofs.cluster import part as cluster
from tools.proofs.containers import Image, docker, remove_all
from tools.proofs.findings import ROOT, Findings, Section, TooLong, code_digest, page

REPORT, KEPT = ROOT / "docs" / "proofs.md", ROOT / "docs" / "proofs.json"
BAKE_SECONDS = 3600
PLATFORMS = ("linux/amd64", "linux/arm64")
UNEXPECTED = (
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    AssertionError,
    subprocess.SubprocessError,
    MeasurementFailed,
    httpx.HTTPError,
)
LIMITS = ("--cpus=2", "--memory=4g")


@dataclass(frozen=True, slots=True)
class Subject:
    """The image of each platform, this machine's first, and the command-line arguments."""

    images: tuple[Image, ...]
    arguments: argparse.Namespace

    @property
    def native(self) -> Image:
        return self.images[0]


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `about` is its description in the report; it is ended after `minutes`. `code`: the files it proves."""

    title: str
    about: str
    minutes: int
    run: Callable[[Findings, Subject], None]
    code: tuple[str, ...] = ()


def _kernels(findings: Findings, subject: Subject) -> None:
    arm = next((each for each in subject.images if each.architecture == "arm64"), None)
    if arm is None:
        findings.skipped.append("int4 on 64-bit Arm: no image of it was given.")
    else:
        kernels.run(findings, arm, subject.native, LIMITS)


def _quota(findings: Findings, subject: Subject) -> None:
    asked = subject.arguments
    load = quota.Load(asked.model or refusals.DEMO, asked.flags.split(), asked.rounds)
    quota.run(findings, subject.native, load)


PARTS: Mapping[str, Part] = {
    "image": Part(
        "The image", "Read from the image and from within a container of it.", 5, lambda f, s: image.run(f, s.images)
    ),
    "serving": Part(
        "Both architectures serve",
        "Containers with a read-only root, no capabilities, no new privileges, user 10001 and no shell, limited to 2 cores and 4 GiB.",
        40,
        lambda f, s: serving.run(f, s.images, LIMITS),
    ),
    "kernels": Part(
        "int4 on 64-bit Arm",
        "The levels of our library, and torch's operator with our library hidden.",
        60,
        _kernels,
        ("armature_kernels/csrc", "armature_kernels/linear", "tools/proofs/kernels.py", "tools/proofs/kleidi_probe.py"),
    ),
    "start": Part(
        "Start", "The demo, its calibration kept, from the command to `/readyz` 200.", 10, lambda f, s: start.run(f, s.native)
    ),
    "quota": Part(
        "CPU quotas",
        f"Prompts of {quota.PROMPT_TOKENS} tokens, completions of {quota.MAX_TOKENS}, closed loop. *Throttled* is the time for which "
        "runnable threads were stopped, summed over processors, as a share of the run.",
        60,
        _quota,
    ),
    "refusals": Part(
        "Refusals",
        "Each in a container with a file at `/dev/termination-log`, as in Kubernetes.",
        20,
        lambda f, s: refusals.run(f, s.native, s.arguments.model),
    ),
    "cluster": Part(
        "A real cluster",
        "The manifests applied to Kubernetes as k8s/README.md does, with pods of one core, and disturbed under load. "
        "Failures are requests without a whole answer.",
        90,
        lambda f, s: cluster.run(
            f, s.native, s.arguments.kubernetes, s.arguments.model
        ),
    ),
}  # fmt: skip


def main() -> int:
    """Run the parts; progress goes to stderr. Return 1 if a check failed and 130 after Ctrl-C."""
    arguments = _arguments()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    if shutil.which("docker") is None or docker("version", check=False).returncode != 0:
        print("prove: the Docker daemon does not answer; set DOCKER_HOST if it is not local", file=sys.stderr)
        return 2
    try:
        tag = arguments.image or bake()
        subject = Subject(
            tuple(Image(tag, each) for each in sorted(arguments.platforms, key=lambda name: Image("", name).emulated)),
            arguments,
        )
        kept = json.loads(arguments.json.read_text()) if arguments.json.exists() else {"parts": {}}
        failed = [name for name in arguments.only if not _proved(name, subject, kept)]
    except KeyboardInterrupt:
        print("prove: interrupted", file=sys.stderr)
        return 130
    finally:
        remove_all()
    print(f"prove: {arguments.report}; " + (f"failed: {', '.join(failed)}" if failed else "every check passed"))
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--image", metavar="TAG", help="use this image instead of building both")
    parser.add_argument(
        "--platforms", default=PLATFORMS, type=_listed, help=f"platforms of the image; default {','.join(PLATFORMS)}"
    )
    parser.add_argument("--only", default=tuple(PARTS), type=_parts, help=f"run only some of {','.join(PARTS)}")
    parser.add_argument(
        "--model",
        type=Path,
        help="checkpoint for the quota part, for a memory limit that is too small, and for the second start of a pod; "
        "default: the demo, and no second start",
    )
    parser.add_argument(
        "--kubernetes",
        type=Path,
        metavar="DIR",
        help="folder of Kubernetes' server programs, for the cluster part; prometheus-adapter may be there too",
    )
    parser.add_argument(
        "--flags", default="", help="flags of armature serve under quotas, in one string: '--precision int4'"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each load under each quota")
    parser.add_argument("--report", type=Path, default=REPORT)
    parser.add_argument("--json", type=Path, default=KEPT)
    return parser.parse_args()


def bake() -> str:
    """Build both architectures with visible progress, load the image, and return its tag."""
    revision = subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    environment = os.environ | {"VERSION": VERSION, "REVISION": revision.stdout.strip() or "unknown"}
    wheels = os.environ.get("WHEELS")
    command = ["docker", "buildx", "bake", *([f"--allow=fs.read={wheels}"] if wheels else []), "cpu", "--load"]
    made = subprocess.run(command, cwd=ROOT, env=environment, stdout=sys.stderr, timeout=BAKE_SECONDS)
    if made.returncode != 0:
        raise SystemExit(f"prove: docker buildx bake ended with {made.returncode}; see the output above")
    return f"armature:{VERSION}"


def _listed(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _parts(text: str) -> tuple[str, ...]:
    unknown = [name for name in _listed(text) if name not in PARTS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: there are {', '.join(PARTS)}")
    return _listed(text)


def _proved(name: str, subject: Subject, kept: dict[str, Any]) -> bool:
    """Run one part, write the report so far, and return True if all checks passed."""
    part, findings, began = PARTS[name], Findings(), time.monotonic()
    findings.code = code_digest(part.code)
    findings.began = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    print(f"prove: {part.title} ...", file=sys.stderr, flush=True)
    try:
        with _at_most(part.minutes):
            part.run(findings, subject)
    except UNEXPECTED as error:
        findings.check("the part ran to its end", False, f"{type(error).__name__}: {error}")
    except SystemExit as error:
        if not isinstance(error.code, str):  # SIGTERM has a number; a sentence comes from a tool that cannot continue
            raise
        findings.check("the part ran to its end", False, error.code)
    findings.seconds = round(time.monotonic() - began, 1)
    for check in findings.failed:
        print(f"prove: FAILED {check.name}: {check.found} (wanted: {check.wanted})", file=sys.stderr, flush=True)
    kept["facts"] = facts = _facts(subject)
    findings.machine = facts["machine"]
    kept["parts"][name] = findings.to_json()
    _write(kept, subject.arguments)
    return not findings.failed


@contextmanager
def _at_most(minutes: int) -> Iterator[None]:
    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"ended after {minutes} minutes")

    signal.signal(signal.SIGALRM, late)
    signal.alarm(minutes * 60)
    try:
        yield
    finally:
        signal.alarm(0)


def _facts(subject: Subject) -> dict[str, str]:
    seen, tags = probe(), ", ".join(f"{each.platform}{' (emulated)' * each.emulated}" for each in subject.images)
    engine = docker("version", "--format={{.Server.Version}}").stdout.strip()
    return {
        "image": f"armature {VERSION}: {tags}",
        "revision": subject.native.facts()["Config"]["Labels"].get("org.opencontainers.image.revision", "unknown"),
        "machine": f"{seen.cpu.name}, {len(seen.cores)} cores, {seen.memory_bytes / 2**30:.0f} GiB, Linux {platform.release()}",
        "Docker": f"{engine}, control groups version {seen.cgroup.version if seen.cgroup else 'unknown'}",
    }


def _write(kept: Mapping[str, Any], arguments: argparse.Namespace) -> None:
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(kept, indent=1) + "\n")
    sections = [
        Section(
            part.title, part.about, Findings.of_json(kept["parts"][name]) if name in kept["parts"] else None, part.code
        )
        for name, part in PARTS.items()
    ]
    arguments.report.write_text(page(kept["facts"], sections))


if __name__ == "__main__":
    sys.exit(main())
