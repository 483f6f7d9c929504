"""The control plane of the cluster: certificates, etcd, API server, controllers and scheduler, in one namespace.

They are not pods. Nothing listens outside the namespace, and nothing within it reaches out.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from tools.proofs.cluster.namespaces import Lab, Place

API = "10.111.0.1"  # of the bridge: the API server, etcd, Prometheus, and the clients that load the service
NODES, PODS, SERVICES = "10.111.0", "10.112", "10.96.0.0/16"  # node N has NODES.(10+N) and pods in PODS.N.0/24
ETCD = "http://127.0.0.1:2379"
READY_SECONDS = 180.0
NAMES = ("kubernetes", "kubernetes.default", "kubernetes.default.svc", "kubernetes.default.svc.cluster.local")


class ControlPlane:
    """A running control plane. `kubectl` speaks to it as its administrator."""

    def __init__(self, lab: Lab) -> None:
        self.lab, self.keys = lab, lab.folder / "keys"
        self.keys.mkdir(parents=True)
        self._authority()
        self.place = lab.place("cluster")
        self._network()
        self._start()

    # ---- kubectl --------------------------------------------------------------------------------------------------

    def kubectl(self, *words: str, text: str | None = None, check: bool = True, seconds: float = 300.0) -> str:
        return self.place.run(*self._kubectl(*words), text=text, check=check, seconds=seconds)

    def command(self, *words: str) -> list[str]:
        """Return the command that runs kubectl in the cluster's namespace, for a process that goes on."""
        return self.place.command(*self._kubectl(*words))

    def _kubectl(self, *words: str) -> tuple[str, ...]:
        return (str(self.lab.programs / "kubectl"), "--kubeconfig", str(self.keys / "admin.kubeconfig"), *words)

    def get(self, *words: str) -> Any:
        """Return an object, or the items of a list, as kubectl gets it."""
        found = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found.get("items", found)

    def apply(self, *manifests: dict[str, Any]) -> None:
        self.kubectl("apply", "-f", "-", text="\n---\n".join(json.dumps(each) for each in manifests))

    # ---- certificates ---------------------------------------------------------------------------------------------

    def _authority(self) -> None:
        _openssl(
            "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=authority",
            "-keyout", str(self.keys / "ca.key"), "-out", str(self.keys / "ca.crt"),
        )  # fmt: skip
        _openssl("genrsa", "-out", str(self.keys / "accounts.key"), "2048")
        addresses = [f"IP:{each}" for each in (API, "10.96.0.1", "127.0.0.1")]
        self._certify("server", "/CN=kube-apiserver", ",".join((*addresses, *(f"DNS:{each}" for each in NAMES))))
        self._certify("proxy", "/CN=front-proxy")
        self._certify("to-kubelet", "/O=system:masters/CN=kube-apiserver")
        self.configure("admin", "/O=system:masters/CN=admin")
        for each in ("kube-controller-manager", "kube-scheduler", "kube-proxy"):
            self.configure(each, f"/CN=system:{each}")

    def _certify(self, name: str, subject: str, others: str = "") -> None:
        key, request, extensions = (self.keys / f"{name}.{end}" for end in ("key", "csr", "ext"))
        extensions.write_text("extendedKeyUsage=serverAuth,clientAuth\n" + f"subjectAltName={others}\n" * bool(others))
        _openssl(
            "req", "-new", "-newkey", "rsa:2048", "-nodes", "-keyout", str(key), "-subj", subject, "-out", str(request)
        )
        _openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.keys / "ca.crt"), "-CAkey", str(self.keys / "ca.key"),
            "-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(self.keys / f"{name}.crt"),
        )  # fmt: skip

    def configure(self, name: str, subject: str) -> Path:
        """Write a kubeconfig with a certificate for this subject, and return its path."""
        self._certify(name, subject)
        keys = self.keys
        file = keys / f"{name}.kubeconfig"
        cluster = {"server": f"https://{API}:6443", "certificate-authority": str(keys / "ca.crt")}
        user = {"client-certificate": str(keys / f"{name}.crt"), "client-key": str(keys / f"{name}.key")}
        text = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "lab",
            "contexts": [{"name": "lab", "context": {"cluster": "lab", "user": name}}],
            "clusters": [{"name": "lab", "cluster": cluster}],
            "users": [{"name": name, "user": user}],
        }
        file.write_text(json.dumps(text))
        return file

    # ---- programs -------------------------------------------------------------------------------------------------

    def _network(self) -> None:
        for words in (
            "ip link set lo up",
            "ip link add lab type bridge",
            f"ip addr add {API}/24 dev lab",
            "ip link set lab up",
            f"ip route add {SERVICES} via {NODES}.11",  # node 1's kube-proxy answers for Services
            "sysctl -qw net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.default.rp_filter=0",
        ):
            self.place.run(*words.split())

    def _start(self) -> None:
        lab, keys = self.lab, self.keys
        lab.start("etcd", self.place, "etcd", f"--data-dir={lab.folder / 'etcd'}", f"--listen-client-urls={ETCD}",
                  f"--advertise-client-urls={ETCD}", "--unsafe-no-fsync")  # fmt: skip
        flags = {
            "etcd-servers": ETCD,
            "bind-address": API,
            "advertise-address": API,
            "tls-cert-file": keys / "server.crt",
            "tls-private-key-file": keys / "server.key",
            "client-ca-file": keys / "ca.crt",
            "authorization-mode": "Node,RBAC",
            "allow-privileged": "true",  # so that it is the namespace's pod security that refuses such a pod
            "enable-admission-plugins": "NodeRestriction",
            "service-cluster-ip-range": SERVICES,
            "service-account-issuer": "https://kubernetes.default.svc",
            "service-account-key-file": keys / "accounts.key",
            "service-account-signing-key-file": keys / "accounts.key",
            "enable-aggregator-routing": "true",
            "kubelet-client-certificate": keys / "to-kubelet.crt",
            "kubelet-client-key": keys / "to-kubelet.key",
            "kubelet-preferred-address-types": "InternalIP",
            "requestheader-client-ca-file": keys / "ca.crt",
            "requestheader-allowed-names": "front-proxy",
            "requestheader-username-headers": "X-Remote-User",
            "requestheader-group-headers": "X-Remote-Group",
            "requestheader-extra-headers-prefix": "X-Remote-Extra-",
            "proxy-client-cert-file": keys / "proxy.crt",
            "proxy-client-key-file": keys / "proxy.key",
        }
        lab.start("kube-apiserver", self.place, "kube-apiserver", *_flags(flags))
        lab.until(lambda: "ok" in self.kubectl("get", "--raw", "/readyz", check=False), READY_SECONDS, "kube-apiserver")
        manager = {
            "kubeconfig": keys / "kube-controller-manager.kubeconfig",
            "leader-elect": "false",
            "use-service-account-credentials": "true",
            "service-account-private-key-file": keys / "accounts.key",
            "root-ca-file": keys / "ca.crt",
            "horizontal-pod-autoscaler-sync-period": "5s",
        }
        lab.start("kube-controller-manager", self.place, "kube-controller-manager", *_flags(manager))
        scheduler = {"kubeconfig": keys / "kube-scheduler.kubeconfig", "leader-elect": "false"}
        lab.start("kube-scheduler", self.place, "kube-scheduler", *_flags(scheduler))


def route(place: Place, number: int) -> None:
    place.run("ip", "route", "add", f"{PODS}.{number}.0/24", "via", f"{NODES}.{10 + number}")


def _flags(flags: dict[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in flags.items()]


def _openssl(*words: str) -> None:
    subprocess.run(["openssl", *words], check=True, capture_output=True)
