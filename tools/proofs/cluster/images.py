"""The images that the cluster's nodes are given: the server's, models in images, and the pause container's."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from app.version import VERSION
from tools.proofs.cluster.node import PAUSE_IMAGE
from tools.proofs.containers import Image, docker

DEMO = Path(__file__).resolve().parents[3] / "app" / "demo" / "llama"
SERVER_TAGS = ("armature:dev", f"armature:{VERSION}")  # of overlays/demo, and of the base
SECONDS = 900.0


def pause(programs: Path, into: Path) -> None:
    """Save an image that does nothing, which holds a pod's namespaces open."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(programs / "busybox", folder)
        entry = 'ENTRYPOINT ["/busybox", "sleep", "2147483647"]'
        _build(Path(folder), f"FROM scratch\nCOPY busybox /busybox\n{entry}\n", PAUSE_IMAGE)
    docker("save", PAUSE_IMAGE, "-o", str(into))


def server(image: Image, into: Path) -> None:
    """Save the server's image for its platform alone, under the names that the manifests have."""
    for each in SERVER_TAGS:
        if each != image.tag:
            docker("tag", image.tag, each)
    docker("save", f"--platform={image.platform}", *SERVER_TAGS, "-o", str(into), seconds=SECONDS)


def model(checkpoint: Path, name: str, into: Path) -> str:
    """Save an image of this checkpoint alone, in the folder `name`. Returns its tag."""
    tag = f"{name}:1"
    _build(checkpoint, f"FROM scratch\nCOPY --chmod=755 . /{name}\n", tag)
    docker("save", tag, "-o", str(into), seconds=SECONDS)
    return tag


def _build(context: Path, dockerfile: str, tag: str) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".Dockerfile") as file:
        file.write(dockerfile)
        file.flush()
        docker("buildx", "build", "--load", f"--tag={tag}", f"--file={file.name}", str(context), seconds=SECONDS)
