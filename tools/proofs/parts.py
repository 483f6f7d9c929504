"""The parts of the proofs in order: title, description and time limit of each."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tools.proofs import image, kernels, quota, refusals, serving, start
from tools.proofs.cluster import part as cluster
from tools.proofs.containers import Image
from tools.proofs.findings import Findings

LIMITS = ("--cpus=2", "--memory=4g")


@dataclass(frozen=True, slots=True)
class Subject:
    """The image of each platform, this machine's first, and the command-line arguments."""

    images: tuple[Image, ...]
    arguments: argparse.Namespace

    @property
    def native(self) -> Image:
        return self.images[0]

    def of(self, architecture: str) -> Image | None:
        return next((each for each in self.images if each.architecture == architecture), None)


@dataclass(frozen=True, slots=True)
class Part:
    """One part. `about` is its description in the report; it is ended after `minutes`."""

    title: str
    about: str
    minutes: int
    run: Callable[[Findings, Subject], None]


def _kernels(findings: Findings, subject: Subject) -> None:
    arm = subject.of("arm64")
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
        "The levels of our library, and with our library hidden torch's operator on KleidiAI's packed weights.",
        60,
        _kernels,
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
