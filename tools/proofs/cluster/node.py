"""A node of the cluster: containerd, kubelet and kube-proxy in namespaces and a control group of their own."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from tools.proofs.cluster.control_plane import API, NODES, PODS, ControlPlane, route
from tools.proofs.cluster.namespaces import CGROUPS, Lab, Place

READY_SECONDS = 120.0
PAUSE_IMAGE = "localhost/pause:1"
CACHE = "/var/cache/armature"  # of components/cache/node, prepared as k8s/README.md says
USER = "10001"
DISK_BYTES = 16 * 2**30  # of a node, in a sparse file
MODELS = "/var/lib/models"  # checkpoints that pods read through the claim armature-models


@dataclass(frozen=True, slots=True)
class Node:
    name: str
    place: Place
    lab: Lab
    link: str  # of the cluster's namespace to the node

    @property
    def disk(self) -> Path:
        """The folder that is the node's own disk; only in its mount namespace."""
        return self.lab.folder / self.name / "disk"

    def give(self, image: Path) -> None:
        """Import an image that `docker save` wrote."""
        self.place.run(str(self.lab.programs / "ctr"), "-n", "k8s.io", "images", "import", str(image), seconds=900)

    def mount_model(self, checkpoint: Path, name: str) -> None:
        """Let the node have this checkpoint, as it is, as a folder of `MODELS`."""
        self.place.run("mkdir", "-p", f"{MODELS}/{name}")
        self.place.run("mount", "--bind", str(checkpoint.resolve()), f"{MODELS}/{name}")


def join(cluster: ControlPlane, number: int) -> Node:
    """Start a node with the machine's programs, and wait until Kubernetes calls it ready."""
    lab, name = cluster.lab, f"node-{number}"
    folder = lab.folder / name
    for each in ("network", "addresses", "disk"):
        (folder / each).mkdir(parents=True)
    place = lab.place(name, mounts=True)
    link = _network(cluster.place, place, number)
    _mounts(place, folder)
    group = _control_group(lab, name)
    (folder / "containerd.toml").write_text(_containerd(lab, folder))
    (folder / "network" / "10-ptp.conflist").write_text(json.dumps(_plugins(folder, number)))
    (folder / "kubelet.json").write_text(json.dumps(_kubelet(cluster, group)))
    lab.start(f"containerd-{name}", place, "containerd", "--config", str(folder / "containerd.toml"))
    ctr = str(lab.programs / "ctr")
    lab.until(lambda: "Server" in place.run(ctr, "version", check=False), 60, f"containerd-{name}")
    node = Node(name, place, lab, link)
    node.give(lab.folder / "pause.tar")
    config = cluster.configure(f"kubelet-{name}", f"/O=system:nodes/CN=system:node:{name}")
    lab.start(
        f"kubelet-{name}", place, "kubelet", f"--config={folder / 'kubelet.json'}", f"--kubeconfig={config}",
        f"--hostname-override={name}", f"--node-ip={NODES}.{10 + number}",
    )  # fmt: skip
    lab.start(
        f"kube-proxy-{name}", place, "kube-proxy", f"--kubeconfig={cluster.keys / 'kube-proxy.kubeconfig'}",
        f"--hostname-override={name}", "--proxy-mode=iptables", f"--cluster-cidr={PODS}.0.0/16",
        "--conntrack-max-per-core=0", "--conntrack-tcp-timeout-established=0", "--conntrack-tcp-timeout-close-wait=0",
    )  # fmt: skip
    ready = "jsonpath={.status.conditions[?(@.type=='Ready')].status}"
    lab.until(
        lambda: cluster.kubectl("get", "node", name, "-o", ready, check=False) == "True",
        READY_SECONDS,
        f"kubelet-{name}",
    )
    return node


def _network(cluster: Place, node: Place, number: int) -> str:
    """Connect a node. Returns the name of its link in the cluster's namespace."""
    link = f"node{number}"
    cluster.run(*f"ip link add {link} type veth peer name eth0 netns {node.holder.pid}".split())
    cluster.run(*f"ip link set {link} master lab up".split())
    for words in (
        "ip link set lo up",
        "ip link set eth0 up",
        f"ip addr add {NODES}.{10 + number}/24 dev eth0",
        f"ip route add default via {API}",
        "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0"
        " net.ipv4.conf.all.route_localnet=1",
    ):
        node.run(*words.split())
    route(cluster, number)
    return link


def _mounts(node: Place, folder: Path) -> None:
    """Give the node its own disk, /run, /var/lib, /var/log and /var/cache; the machine's own are not touched."""
    node.run("mount", "--make-rshared", "/")
    image, disk = folder / "disk.img", folder / "disk"
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    node.run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
    node.run("mount", "-o", "loop,noinit_itable", str(image), str(disk))
    for each in ("/run", "/var/lib", "/var/log", "/var/cache"):
        node.run("mount", "-t", "tmpfs", "-o", "mode=755", "lab", each)
    for source, target in (("kubelet", "/var/lib/kubelet"), ("log", "/var/log"), ("cache", CACHE)):
        node.run("mkdir", "-p", target, str(disk / source))
        node.run("mount", "--bind", str(disk / source), target)
    node.run("install", "-d", "-o", USER, "-g", USER, CACHE)


def _control_group(lab: Lab, name: str) -> str:
    """Make a control group in which the kubelet keeps its pods: it clears away pods that it does not know."""
    group = f"{lab.group}-{name}"
    if (CGROUPS / "cgroup.controllers").exists():
        controllers = " ".join(f"+{each}" for each in (CGROUPS / "cgroup.controllers").read_text().split())
        (CGROUPS / group).mkdir()
        (CGROUPS / group / "cgroup.subtree_control").write_text(controllers)
        return group
    for controller in [
        each for each in CGROUPS.iterdir() if (each / "cgroup.procs").exists() and not each.is_symlink()
    ]:
        (controller / group).mkdir()
        for file in ("cpuset.cpus", "cpuset.mems"):
            if (controller / file).exists():
                (controller / group / file).write_text((controller / file).read_text())
    return group


def _containerd(lab: Lab, folder: Path) -> str:
    return f"""version = 3
root = "{folder / "disk" / "containerd"}"
state = "/run/containerd"
[plugins."io.containerd.cri.v1.images".pinned_images]
  sandbox = "{PAUSE_IMAGE}"
[plugins."io.containerd.cri.v1.runtime"]
  restrict_oom_score_adj = true
[plugins."io.containerd.cri.v1.runtime".cni]
  bin_dirs = ["{lab.programs.parent / "cni"}"]
  conf_dir = "{folder / "network"}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
  runtime_type = "io.containerd.runc.v2"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc.options]
  BinaryName = "{lab.programs / "runc"}"
"""


def _plugins(folder: Path, number: int) -> dict[str, object]:
    addresses = {
        "type": "host-local",
        "dataDir": str(folder / "addresses"),
        "ranges": [[{"subnet": f"{PODS}.{number}.0/24"}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    return {"cniVersion": "0.4.0", "name": "lab", "plugins": [{"type": "ptp", "ipMasq": False, "ipam": addresses}]}


def _kubelet(cluster: ControlPlane, group: str) -> dict[str, object]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(cluster.keys / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": f"/{group}",
        "failCgroupV1": False,
        "failSwapOn": False,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        # Five minutes by default.
        "evictionPressureTransitionPeriod": "10s",
    }
