"""A simulated server: a batch of requests, a queue, and prompts that are computed before the batch goes on.

`simulated_balancing` puts two of them behind a load balancer, and `tools.fleet_day` as many as a fleet has. All of it
is deterministic.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Job(NamedTuple):
    """A request. The units of `work` and `prompt` are the server's: seconds of a server of speed 1, or tokens."""

    number: int
    arrived: float
    work: float
    prompt: float = 0.0


@dataclass(slots=True)
class Server:
    """A batch of up to `places` requests that progress at the same rate, with a queue of up to `queue` requests.

    `cost` is what each further request adds to a step, relative to the first. 1 is plain processor sharing, and at 0
    batching is free. `rates`, if given, takes the place of both: the work per second of all requests together, for 1,
    2, ... `places` requests. Prompts are computed in order of arrival at `prompt_rate`, and the batch waits meanwhile,
    as it does for the tokens of a prompt in a step.
    """

    speed: float = 1.0
    cost: float = 1.0
    places: int = 64
    queue: int = 256
    rates: Sequence[float] = ()
    prompt_rate: float = math.inf
    now: float = 0.0
    progress: float = 0.0  # work done for a request that has been in the batch from the start
    running: list[tuple[float, int, Job]] = field(
        default_factory=list
    )  # heap, ordered by the progress at which each is done
    prompts: deque[Job] = field(default_factory=deque)  # have a place; the first one is being computed
    prompt_ends: float = math.inf  # moment at which the first prompt is computed
    waiting: deque[Job] = field(default_factory=deque)
    queued_prompts: float = 0.0  # work of all prompts that are not being computed yet

    @property
    def num_here(self) -> int:
        return len(self.running) + len(self.prompts) + len(self.waiting)

    @property
    def num_waiting(self) -> int:
        """Requests of which nothing has been computed."""
        return len(self.waiting) + max(0, len(self.prompts) - 1)

    def pace(self, members: int) -> float:
        """Return the work per second for each of `members` requests."""
        if self.rates:
            return self.rates[members - 1] / members
        return self.speed / (1 + self.cost * (members - 1))

    @property
    def capacity(self) -> float:
        """Work per second with every place taken."""
        return self.places * self.pace(self.places)

    @property
    def next_end(self) -> float:
        """The moment at which the next prompt or request ends."""
        if self.prompts:
            return self.prompt_ends
        if not self.running:
            return math.inf
        return self.now + (self.running[0][0] - self.progress) / self.pace(len(self.running))

    def prompt_backlog(self, moment: float) -> float:
        """Return the seconds from `moment` until all present prompts would be computed, if all had a place."""
        first = self.prompt_ends - moment if self.prompts else 0.0
        return first + self.queued_prompts / self.prompt_rate

    def advance(self, moment: float) -> None:
        """Advance to a moment before which nothing ends."""
        if self.running and not self.prompts:
            self.progress += (moment - self.now) * self.pace(len(self.running))
        self.now = moment

    def take(self, job: Job) -> bool:
        """Accept a request. Returns False if every place and the whole queue are taken."""
        if self.num_here >= self.places + self.queue:
            return False
        self.waiting.append(job)
        self.queued_prompts += job.prompt
        self._seat()
        return True

    def end_next(self) -> tuple[Job, bool]:
        """End what ends now. Returns its request, and whether it ended: False if only its prompt was computed."""
        if not self.prompts:
            job = heapq.heappop(self.running)[2]
            self._seat()
            return job, True
        job = self.prompts.popleft()
        if self.prompts:
            self._begin_prompt()
        if job.work > 0:
            heapq.heappush(self.running, (self.progress + job.work, job.number, job))
        else:
            self._seat()
        return job, job.work <= 0

    def remove_all(self) -> list[Job]:
        """Remove and return the requests that are here, in order of arrival at the server."""
        found = [job for _, _, job in self.running] + list(self.prompts) + list(self.waiting)
        self.running.clear()
        self.prompts.clear()
        self.waiting.clear()
        self.queued_prompts = 0.0
        return sorted(found)

    def _seat(self) -> None:
        while self.waiting and len(self.running) + len(self.prompts) < self.places:
            job = self.waiting.popleft()
            if not job.prompt:
                heapq.heappush(self.running, (self.progress + job.work, job.number, job))
                continue
            self.prompts.append(job)
            if len(self.prompts) == 1:
                self._begin_prompt()

    def _begin_prompt(self) -> None:
        first = self.prompts[0].prompt
        self.queued_prompts -= first
        self.prompt_ends = self.now + first / self.prompt_rate
