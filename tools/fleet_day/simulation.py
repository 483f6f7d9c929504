"""The simulation of a day: requests, pods that come, serve and go, and the autoscaler that decides how many.

It is event-driven and seeded. A fleet of more pods than `FleetPlan.most_simulated` is a sample: every simulated pod
stands for `scale` pods and every request for `scale` requests, and the autoscaler decides over the whole fleet. With a
balancer that knows every pod, pods of a large fleet are nearly independent, so a sample of some dozens has the same
waits (tests and docs/fleet.md compare).
"""

from __future__ import annotations

import heapq
import math
import random
from bisect import bisect
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count

from tools.fleet_day.autoscaler import RUNNING, SYNC_SECONDS, WAIT, WAITING, Autoscaler, ScalingRules
from tools.fleet_day.pools import Pool
from tools.fleet_day.traffic import DAY, HOUR, Arrival, Traffic
from tools.measure.simulated_server import Job, Server

BALANCERS = ("wait", "weights", "even")
SCRAPES = 4  # a gauge's mean of a minute, at PodMonitor's 15 s
_END, _READY, _NOTICE, _GONE, _RETRY = range(5)


@dataclass(frozen=True, slots=True)
class Starts:
    """Seconds of a pod's start: a machine joins, the image is pulled, the model is loaded.

    A pod that replaces another one on the same machine would need only a later start; here each pod has a new machine.
    """

    machine: float = 60.0
    image: float = 20.0
    model: float = 34.6

    @property
    def seconds(self) -> float:
        return self.machine + self.image + self.model


@dataclass(frozen=True, slots=True)
class Spot:
    """Spot machines: the share of pods above the minimum, price as a share of the list's, losses per machine and hour.

    After a notice a pod finishes what it can in `notice` seconds and gets no new requests. Without one (0) everything
    on it is lost at once. Clients send what was lost again after `retry` seconds.
    """

    share: float = 0.0
    price: float = 0.4
    losses: float = 0.05
    notice: float = 120.0
    retry: float = 1.0


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """A pool, the autoscaler's rules for it, and how many pods are ready at the beginning."""

    pool: Pool
    rules: ScalingRules
    first_pods: int


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet and its day. The first pool is the cheaper one, whose wait the others may use."""

    pools: tuple[PoolPlan, ...]
    traffic: Traffic
    balancer: str = "wait"
    starts: Starts = Starts()
    spot: Spot = Spot()
    drain_seconds: float = 540.0
    machine_goes_after: float = 60.0  # an empty machine is paid for that long
    most_simulated: int = 32
    seconds: float = DAY

    @property
    def scale(self) -> float:
        """How many pods one simulated pod stands for."""
        return max(1.0, sum(each.first_pods for each in self.pools) / self.most_simulated, self._peak_pods())

    def _peak_pods(self) -> float:
        """Return the pods that the peak needs at full load, over those that are simulated at most."""
        first, sizes = self.pools[0].pool, self.traffic
        rate = first.requests_per_second(sizes.prompts.mean, sizes.completions.mean)
        return sizes.peak_rate / rate / self.most_simulated


@dataclass(slots=True, eq=False)
class Pod:
    """A simulated pod. `is_open` while it gets requests; `scheduled` is its next event's moment."""

    pool: int
    server: Server
    launched: float
    is_spot: bool
    is_ready: bool = False
    is_open: bool = False
    scheduled: float = math.inf
    version: int = 0
    waits: deque[float] = field(default_factory=lambda: deque(maxlen=SCRAPES))
    queues: deque[float] = field(default_factory=lambda: deque(maxlen=SCRAPES))
    batches: deque[float] = field(default_factory=lambda: deque(maxlen=SCRAPES))
    gone: float | None = None


@dataclass(slots=True)
class Minute:
    """The fleet at one moment of the day. Pods are by pool, in pods of the whole fleet."""

    moment: float
    requests_per_second: float
    ready: tuple[float, ...]
    starting: tuple[float, ...]


@dataclass(slots=True)
class Day:
    """What happened. Lists have one entry for each simulated request that was answered, in order of its end."""

    scale: float
    sent: int = 0
    refused: int = 0
    retried: int = 0
    lost_pods: int = 0
    arrived: list[float] = field(default_factory=list)
    first_token: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    minutes: list[Minute] = field(default_factory=list)
    pod_seconds: list[float] = field(default_factory=list)  # paid, by pool, of the whole fleet
    dollars: list[float] = field(default_factory=list)  # by pool
    busy_seconds: float = 0.0  # that the answered requests take pods with every place taken, of the whole fleet


def simulate(plan: FleetPlan, seed: int, progress: Callable[[float], None] = lambda share: None) -> Day:
    """Simulate a day. `progress` is called with the share of the day that is over."""
    return _Simulation(plan, seed, progress).run()


class _Simulation:
    def __init__(self, plan: FleetPlan, seed: int, progress: Callable[[float], None]) -> None:
        self.plan, self.progress, self.scale = plan, progress, plan.scale
        self.random = random.Random(seed)
        self.arrivals = plan.traffic.arrivals(seed, plan.seconds, 1 / self.scale)
        self.events: list[tuple[float, int, int, Pod | None, object]] = []
        self.order = count()
        self.pods: list[Pod] = []  # launched and not gone
        self.open: list[Pod] = []  # get requests
        self.scores: list[float] = []  # of open pods: lower is better
        self.shares: list[float] = []  # of open pods: cumulative probabilities
        self.place: dict[int, int] = {}  # id of an open pod -> its index
        self.autoscalers = [Autoscaler(each.rules) for each in plan.pools]
        self.wanted = [each.first_pods for each in plan.pools]
        sizes = plan.traffic
        self.prompt_mean, self.completion_mean = sizes.prompts.mean, sizes.completions.mean
        rates = [each.pool.requests_per_second(self.prompt_mean, self.completion_mean) for each in plan.pools]
        self.seconds_each = [1 / rate for rate in rates]
        self.day = Day(self.scale, pod_seconds=[0.0] * len(rates), dollars=[0.0] * len(rates))
        self.first_moments: dict[int, float] = {}
        self.last_sent = 0

    def run(self) -> Day:
        for pool, wanted in enumerate(self.wanted):
            for _ in range(self._simulated(wanted)):
                pod = self._launch(pool, 0.0, self.plan.starts.seconds)
                self._open(pod)
        arrival, tick = next(self.arrivals, None), 0.0
        number = 0
        while True:
            event = self.events[0][0] if self.events else math.inf
            moment = min(event, tick, math.inf if arrival is None else arrival[0])
            if arrival is None and tick >= self.plan.seconds and not self._unfinished():
                break
            if arrival is not None and arrival[0] <= moment:
                self._arrive(arrival, number)
                arrival, number = next(self.arrivals, None), number + 1
            elif event <= moment:
                self._happen(*heapq.heappop(self.events))
            else:
                self._tick(tick)
                tick += SYNC_SECONDS
        for pod in list(self.pods):
            self._pay(pod, self.plan.seconds)
        self.progress(1.0)
        return self.day

    # ---- requests --------------------------------------------------------------------------------------------------

    def _unfinished(self) -> int:
        return self.day.sent - self.day.refused - len(self.day.whole)

    def _arrive(self, arrival: Arrival, number: int) -> None:
        moment, prompt, completion = arrival
        self.day.sent += 1
        self.last_sent += 1
        self._send(Job(number, moment, float(completion - 1), float(prompt)), moment)

    def _send(self, job: Job, moment: float) -> None:
        if not self.open:
            self.day.refused += 1
            return
        index = self._choose()
        pod = self.open[index]
        pod.server.advance(moment)
        if not pod.server.take(job):
            self.day.refused += 1
            return
        self.scores[index] += self.seconds_each[pod.pool]
        self._schedule(pod)

    def _choose(self) -> int:
        if self.plan.balancer == "wait":
            return self.scores.index(min(self.scores))
        return bisect(self.shares, self.random.random() * self.shares[-1])

    def _schedule(self, pod: Pod) -> None:
        following = pod.server.next_end
        if following != pod.scheduled:
            pod.scheduled = following
            pod.version += 1
            if following != math.inf:
                heapq.heappush(self.events, (following, next(self.order), _END, pod, pod.version))

    def _end(self, pod: Pod, moment: float) -> None:
        pod.server.advance(moment)
        job, is_over = pod.server.end_next()
        if job.number not in self.first_moments:
            self.first_moments[job.number] = moment
        if is_over:
            day = self.day
            day.arrived.append(job.arrived)
            day.first_token.append(self.first_moments.pop(job.number) - job.arrived)
            day.whole.append(moment - job.arrived)
            rate = self.plan.pools[pod.pool].pool
            day.busy_seconds += self.scale * (job.prompt / rate.prefill_rate + job.work / rate.decode_rates[-1])
            if pod.is_open:
                self.scores[self.place[id(pod)]] -= self.seconds_each[pod.pool]
            elif not pod.server.num_here:
                self._remove(pod, moment)
        pod.scheduled = -1.0
        self._schedule(pod)

    # ---- pods ------------------------------------------------------------------------------------------------------

    def _happen(self, moment: float, _: int, kind: int, pod: Pod | None, what: object) -> None:
        if kind == _RETRY:
            assert isinstance(what, Job)
            self._send(what, moment)
            return
        assert pod is not None
        if pod.gone is not None or (kind == _END and pod.version != what):
            return
        if kind == _END:
            self._end(pod, moment)
        elif kind == _READY:
            self._open(pod)
        elif kind == _NOTICE:
            self._lose(pod, moment)
        else:
            self._remove(pod, moment)

    def _simulated(self, pods: int) -> int:
        return math.ceil(pods / self.scale - 1e-9)

    def _launch(self, pool: int, moment: float, age: float = 0.0) -> Pod:
        """Start a pod that was asked for `age` seconds ago."""
        here = sum(pod.pool == pool and pod.is_open for pod in self.pods)
        least = self._simulated(self.plan.pools[pool].rules.min_pods)
        is_spot = here >= least and self.random.random() < self.plan.spot.share
        pod = Pod(pool, self.plan.pools[pool].pool.server(), moment, is_spot)
        pod.server.now = moment
        self.pods.append(pod)
        self._later(moment + max(0.0, self.plan.starts.seconds - age), _READY, pod)
        if is_spot:
            self._later(moment + self.random.expovariate(self.plan.spot.losses / HOUR), _NOTICE, pod)
        return pod

    def _later(self, moment: float, kind: int, pod: Pod | None, what: object = None) -> None:
        heapq.heappush(self.events, (moment, next(self.order), kind, pod, what))

    def _open(self, pod: Pod) -> None:
        if not pod.is_ready:
            pod.is_ready = pod.is_open = True
            self.open.append(pod)
            self._index()

    def _close(self, pod: Pod) -> None:
        pod.is_open = False
        if pod in self.open:
            self.open.remove(pod)
            self._index()

    def _index(self) -> None:
        """Compute what the balancer knows of open pods anew, after their number changed."""
        each = self.seconds_each
        self.scores = [(pod.server.num_here + 1) * each[pod.pool] for pod in self.open]
        even = self.plan.balancer == "even"
        self.shares = list(accumulate(1.0 if even else 1 / each[pod.pool] for pod in self.open))
        self.place = {id(pod): index for index, pod in enumerate(self.open)}

    def _drain(self, pod: Pod, moment: float, seconds: float) -> None:
        """Send nothing more to a pod; it goes when it is empty, and after `seconds` in any case."""
        self._close(pod)
        if pod.server.num_here and seconds:
            self._later(moment + seconds, _GONE, pod)
        else:
            self._remove(pod, moment)

    def _lose(self, pod: Pod, moment: float) -> None:
        self.day.lost_pods += 1
        if pod.is_ready and not pod.is_open:
            return  # it is going anyway, and has little left
        self._drain(pod, moment, self.plan.spot.notice)
        self._launch(pod.pool, moment)  # its Deployment replaces it at once

    def _remove(self, pod: Pod, moment: float) -> None:
        self._close(pod)
        pod.server.advance(moment)
        for job in pod.server.remove_all():
            self.day.retried += 1
            self.first_moments.pop(job.number, None)
            self._later(moment + self.plan.spot.retry, _RETRY, None, job)
        self._pay(pod, moment + self.plan.machine_goes_after)

    def _pay(self, pod: Pod, until: float) -> None:
        plan, pod.gone = self.plan, until
        self.pods.remove(pod)
        seconds = self.scale * (min(until, plan.seconds) - pod.launched)
        price = plan.pools[pod.pool].pool.hourly_price * (plan.spot.price if pod.is_spot else 1.0)
        self.day.pod_seconds[pod.pool] += seconds
        self.day.dollars[pod.pool] += seconds / HOUR * price

    # ---- the autoscaler --------------------------------------------------------------------------------------------

    def _tick(self, moment: float) -> None:
        for pod in self.open:
            pod.waits.append(self._predicted_wait(pod, moment))
            pod.queues.append(pod.server.num_waiting)
            pod.batches.append(pod.server.num_here - pod.server.num_waiting)
        cheaper = _mean([_mean(pod.waits) for pod in self.open if pod.pool == 0])
        for pool, scaler in enumerate(self.autoscalers):
            mine = [pod for pod in self.open if pod.pool == pool]
            ready = min(self.wanted[pool], round(self.scale * len(mine)))
            sums = {name: ready * _mean([_mean(part(pod)) for pod in mine]) for name, part in _GAUGES.items()}
            outside = cheaper if scaler.rules.external is not None else None
            self.wanted[pool] = scaler.wanted(moment, self.wanted[pool], ready, sums, outside)
            self._scale_to(pool, self._simulated(self.wanted[pool]), moment)
        if moment % 60 == 0 and moment < self.plan.seconds:
            self._record(moment)

    def _predicted_wait(self, pod: Pod, moment: float) -> float:
        """Return the seconds to the first token of a request of mean size that arrives now."""
        server, pool = pod.server, self.plan.pools[pod.pool].pool
        wait = server.prompt_backlog(moment) + self.prompt_mean / pool.prefill_rate
        beyond = server.num_here + 1 - server.places
        return wait + max(0, beyond) * self.completion_mean / pool.decode_rates[-1]

    def _scale_to(self, pool: int, pods: int, moment: float) -> None:
        here = [pod for pod in self.pods if pod.pool == pool and (pod.is_open or not pod.is_ready)]
        for _ in range(pods - len(here)):
            self._launch(pool, moment)
        # As a ReplicaSet does: pods that are not ready go first, then those that have been ready for the shortest time.
        for pod in sorted(here, key=lambda pod: (pod.is_open, -pod.launched))[: max(0, len(here) - pods)]:
            self._drain(pod, moment, self.plan.drain_seconds)

    def _record(self, moment: float) -> None:
        pools = range(len(self.plan.pools))
        ready = tuple(self.scale * sum(pod.pool == pool for pod in self.open) for pool in pools)
        starting = tuple(self.scale * sum(pod.pool == pool and not pod.is_ready for pod in self.pods) for pool in pools)
        self.day.minutes.append(Minute(moment, self.scale * self.last_sent / 60, ready, starting))
        self.last_sent = 0
        self.progress(moment / self.plan.seconds)


_GAUGES: Mapping[str, Callable[[Pod], Sequence[float]]] = {
    WAITING: lambda pod: pod.queues,
    WAIT: lambda pod: pod.waits,
    RUNNING: lambda pod: pod.batches,
}


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
