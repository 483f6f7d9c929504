"""The programs that make a cluster: Debian's packages, unpacked into a folder, and those of Kubernetes from a folder.

No Debian release has the server side of Kubernetes, only kubectl. The folder holds what Kubernetes publishes as its
server programs, or what Go compiles from the module k8s.io/kubernetes. prometheus-adapter may be there too.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

KUBERNETES = ("kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl")
ADAPTER = "prometheus-adapter"
# Of the newest Debian, since its own containerd and etcd may be older than what this Kubernetes accepts. Both are
# static enough to run on older releases.
NEWEST = ("etcd-server", "containerd", "busybox-static")
# Of this machine's own release: they need its libraries.
OWN = ("runc", "containernetworking-plugins", "prometheus", "nginx")
FROM_DEBIAN = ("etcd", "containerd", "containerd-shim-runc-v2", "ctr", "busybox", "runc", "prometheus", "nginx")
NEEDED = {"ip": "iproute2", "iptables": "iptables", "nsenter": "util-linux", "openssl": "openssl", "dpkg": "dpkg",
          "mkfs.ext4": "e2fsprogs", "curl": "curl"}  # fmt: skip
KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"


class Missing(Exception):
    """Something that a cluster needs is not here. The message is a sentence that says what to do."""


def gather(folder: Path, kubernetes: Path) -> Path:
    """Put every program into `folder`/bin, and the network plugins into `folder`/cni. Returns the former.

    Raises `Missing` if a program is not in the folder of Kubernetes, or a package is not installed.
    """
    if absent := sorted({package for program, package in NEEDED.items() if shutil.which(program) is None}):
        raise Missing(f"apt-get install {' '.join(absent)}")
    if absent := [name for name in KUBERNETES if not (kubernetes / name).is_file()]:
        raise Missing(f"{kubernetes} lacks {', '.join(absent)}: --kubernetes names the folder of Kubernetes' programs")
    programs = folder / "bin"
    programs.mkdir(parents=True, exist_ok=True)
    for name in (*KUBERNETES, ADAPTER):
        if (kubernetes / name).is_file() and not (programs / name).exists():
            (programs / name).symlink_to((kubernetes / name).resolve())
    if not all((programs / name).exists() for name in FROM_DEBIAN):
        _unpack(folder)
        for name in FROM_DEBIAN:
            found = next((each for each in (folder / "debian").rglob(f"*bin/{name}") if each.is_file()), None)
            if found is None:
                raise Missing(f"no {name} among Debian's packages {', '.join((*NEWEST, *OWN))}")
            (programs / name).symlink_to(found)
        (folder / "cni").symlink_to(folder / "debian" / "usr" / "lib" / "cni")
    return programs


def _unpack(folder: Path) -> None:
    """Fetch the packages by name with apt, from the mirror that this machine uses, and unpack them."""
    into, state = folder / "debian", folder / "apt"
    shutil.rmtree(into, ignore_errors=True)
    into.mkdir()
    for each in ("lists/partial", "cache/archives/partial"):
        (state / each).mkdir(parents=True, exist_ok=True)
    (state / "sources.list").write_text(f"deb [signed-by={KEYRING}] {_mirror()} sid main\n")
    (state / "apt.conf").write_text(
        f'Dir::State::Lists "{state}/lists";\nDir::Cache "{state}/cache";\n'
        f'Dir::Etc::SourceList "{state}/sources.list";\nDir::Etc::SourceParts "/dev/null";\n'
        'APT::Sandbox::User "root";\n'
    )
    for environment, packages in (({}, OWN), ({"APT_CONFIG": f"{state}/apt.conf"}, NEWEST)):
        for words in (["update", "-q"], ["download", "-q", "-o", "APT::Sandbox::User=root", *packages]):
            made = subprocess.run(
                ["env", *(f"{key}={value}" for key, value in environment.items()), "apt-get", *words],
                cwd=into, capture_output=True, text=True, check=False,
            )  # fmt: skip
            if made.returncode:
                raise Missing(f"apt-get {' '.join(words)}: {made.stderr.strip().splitlines()[-1]}")
    for package in into.glob("*.deb"):
        subprocess.run(["dpkg", "-x", package, into], check=True)


def _mirror() -> str:
    """Return the address of this machine's Debian mirror, as its apt sources have it."""
    files = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*"))]
    for file in filter(Path.is_file, files):
        if found := re.search(
            r"^(?:URIs:|deb(?: \[[^]]*\])?) +(https?://\S+/debian/?)(?: |$)", file.read_text(), re.MULTILINE
        ):
            return found[1]
    raise Missing("no Debian mirror in this machine's apt sources")
