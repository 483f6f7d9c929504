"""Kubernetes' HorizontalPodAutoscaler, version autoscaling/v2, as our manifests configure it.

The arithmetic is that of its replica calculator for metrics of pods: a tolerance of a tenth, pods that are still
starting count as idle when more are needed and not at all when fewer are, the metric that needs most pods decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

K8S = Path(__file__).resolve().parents[2] / "k8s"
COMPONENT = K8S / "components" / "autoscaling" / "hpa" / "horizontalpodautoscaler.yaml"
MIXED = K8S / "overlays" / "mixed"
SYNC_SECONDS = 15.0  # --horizontal-pod-autoscaler-sync-period of the controller manager
TOLERANCE = 0.1  # --horizontal-pod-autoscaler-tolerance
RUNNING = "armature_requests_running"
WAITING, WAIT = "armature_requests_waiting", "armature_predicted_wait_seconds"


@dataclass(frozen=True, slots=True)
class Policy:
    """A limit of change: at most `value` pods, or percent of the pods, within `period_seconds`."""

    percent: bool
    value: float
    period_seconds: float


@dataclass(frozen=True, slots=True)
class ScalingRules:
    """What a HorizontalPodAutoscaler says. `targets` are values of pods' metrics by name; `external` one of its own."""

    min_pods: int
    max_pods: int
    targets: Mapping[str, float]
    external: float | None  # the cheaper pool's wait
    up: tuple[Policy, ...]
    down: tuple[Policy, ...]
    up_window: float
    down_window: float


def read_rules(file: Path = COMPONENT, patch: Path | None = None) -> ScalingRules:
    """Read a manifest, with the fields of a patch in place of its own."""
    spec: dict[str, Any] = yaml.safe_load(file.read_text())["spec"]
    if patch is not None:
        spec |= yaml.safe_load(patch.read_text())["spec"]
    pods = [metric["pods"] for metric in spec["metrics"] if metric["type"] == "Pods"]
    others = [metric["external"] for metric in spec["metrics"] if metric["type"] == "External"]
    up, down = spec["behavior"]["scaleUp"], spec["behavior"]["scaleDown"]
    return ScalingRules(
        spec["minReplicas"],
        spec["maxReplicas"],
        {each["metric"]["name"]: float(each["target"]["averageValue"]) for each in pods},
        float(others[0]["target"]["value"]) if others else None,
        _policies(up),
        _policies(down),
        up["stabilizationWindowSeconds"],
        down["stabilizationWindowSeconds"],
    )


def _policies(direction: Mapping[str, Any]) -> tuple[Policy, ...]:
    return tuple(
        Policy(each["type"] == "Percent", each["value"], each["periodSeconds"]) for each in direction["policies"]
    )


@dataclass(slots=True)
class Autoscaler:
    """The state of one autoscaler: its recommendations and the changes it made, as (moment, pods)."""

    rules: ScalingRules
    recommended: deque[tuple[float, int]] = field(default_factory=deque)
    changes: deque[tuple[float, int]] = field(default_factory=deque)

    def wanted(self, moment: float, current: int, ready: int, sums: Mapping[str, float], outside: float | None) -> int:
        """Return how many pods there should be.

        Args:
            moment: Seconds since midnight.
            current: Pods that were asked for at the last time.
            ready: Pods whose metrics are known.
            sums: Metrics, summed over ready pods.
            outside: The cheaper pool's wait in seconds, if these rules use it.
        """
        found = [
            _pods_needed(current, ready, sums[name] / (target * ready)) for name, target in self.rules.targets.items()
        ] if ready else [current]  # fmt: skip
        if self.rules.external is not None and outside is not None and ready:
            ratio = outside / self.rules.external
            found.append(current if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready))
        bounded = min(max(*found, self.rules.min_pods), self.rules.max_pods)
        allowed = self._limited(moment, current, self._stabilized(moment, current, bounded))
        if allowed != current:
            self.changes.append((moment, allowed - current))
        return allowed

    def _stabilized(self, moment: float, current: int, pods: int) -> int:
        """Return the highest recommendation of the window before fewer pods, and the lowest before more."""
        self.recommended.append((moment, pods))
        while self.recommended[0][0] < moment - max(self.rules.down_window, self.rules.up_window):
            self.recommended.popleft()
        lowest = min(each for at, each in self.recommended if at >= moment - self.rules.up_window)
        highest = max(each for at, each in self.recommended if at >= moment - self.rules.down_window)
        return lowest if lowest > current else min(current, highest)

    def _limited(self, moment: float, current: int, pods: int) -> int:
        """Apply the policies; the one that allows the greatest change counts."""
        if pods > current:
            return min(pods, max(self._most(moment, current, policy) for policy in self.rules.up))
        return max(pods, min(self._least(moment, current, policy) for policy in self.rules.down))

    def _most(self, moment: float, current: int, policy: Policy) -> int:
        before = self._before(moment, current, policy.period_seconds)
        return math.ceil(before * (1 + policy.value / 100)) if policy.percent else int(before + policy.value)

    def _least(self, moment: float, current: int, policy: Policy) -> int:
        before = self._before(moment, current, policy.period_seconds)
        return math.floor(before * (1 - policy.value / 100)) if policy.percent else int(before - policy.value)

    def _before(self, moment: float, current: int, seconds: float) -> int:
        """Return how many pods there were `seconds` ago."""
        longest = max(policy.period_seconds for policy in (*self.rules.up, *self.rules.down))
        while self.changes and self.changes[0][0] <= moment - longest:
            self.changes.popleft()
        return current - sum(by for at, by in self.changes if at > moment - seconds)


def _pods_needed(current: int, ready: int, ratio: float) -> int:
    """Return the pods for a metric whose mean over ready pods is `ratio` times its target."""
    starting = max(0, current - ready)
    if ratio <= 1 or not starting:
        return current if abs(ratio - 1) <= TOLERANCE else math.ceil(ratio * ready)
    diluted = ratio * ready / (ready + starting)  # pods that start count as idle
    if diluted < 1 or abs(diluted - 1) <= TOLERANCE:
        return current
    return max(current, math.ceil(diluted * (ready + starting)))
