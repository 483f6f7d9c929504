"""A day of requests: the rate by the time of day, bursts, and the sizes of prompts and completions."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy
from numpy.typing import NDArray

HOUR, DAY = 3600.0, 86_400.0
SLICE_SECONDS = 60.0  # within a slice the rate is constant

Arrival = tuple[float, int, int]  # seconds since midnight, prompt tokens, completion tokens


@dataclass(frozen=True, slots=True)
class Lengths:
    """Log-normal numbers of tokens, cut at both ends."""

    median: float
    sigma: float
    most: int

    def draw(self, random: numpy.random.Generator, count: int) -> NDArray[Any]:
        drawn = self.median * numpy.exp(self.sigma * random.standard_normal(count))
        return numpy.clip(numpy.rint(drawn), 1, self.most).astype(numpy.int64)

    @property
    def mean(self) -> float:
        """The mean of what `draw` returns, from a sample of its own."""
        return float(self.draw(numpy.random.default_rng(0), 200_000).mean())


@dataclass(frozen=True, slots=True)
class Traffic:
    """Requests of a day. Their rate is `peak_rate` times `shape`, which has its peak at `peak_hour`.

    From trough to peak the rate follows a cosine. A burst multiplies it by `burst_factor` for `burst_seconds`; bursts
    begin at random moments, `bursts` in a day on average, with a known seed.
    """

    peak_rate: float
    prompts: Lengths = Lengths(256, 0.6, 1024)
    completions: Lengths = Lengths(96, 0.8, 512)
    trough: float = 0.25  # of the peak
    peak_hour: float = 15.0
    bursts: float = 4.0
    burst_factor: float = 1.5
    burst_seconds: float = 300.0

    def shape(self, moment: float) -> float:
        """Return the rate without bursts as a share of the peak."""
        turn = math.cos(2 * math.pi * (moment - self.peak_hour * HOUR) / DAY)
        return self.trough + (1 - self.trough) * (1 + turn) / 2

    def slice_rates(self, seed: int, seconds: float) -> NDArray[Any]:
        """Return the requests per second of each slice of the first `seconds` of the day."""
        starts = numpy.arange(0.0, seconds, SLICE_SECONDS)
        rates = numpy.array([self.peak_rate * self.shape(start + SLICE_SECONDS / 2) for start in starts])
        random = numpy.random.default_rng([seed, 1])
        for begin in random.uniform(0.0, DAY, random.poisson(self.bursts)):
            rates[(starts >= begin) & (starts < begin + self.burst_seconds)] *= self.burst_factor
        return rates

    def arrivals(self, seed: int, seconds: float = DAY, share: float = 1.0) -> Iterator[Arrival]:
        """Yield requests in order of time: a Poisson process. With `share`, each is kept with that probability."""
        random = numpy.random.default_rng([seed, 2])
        for index, rate in enumerate(self.slice_rates(seed, seconds)):
            count = int(random.poisson(rate * share * SLICE_SECONDS))
            begin = index * SLICE_SECONDS
            moments = numpy.sort(random.uniform(begin, begin + SLICE_SECONDS, count))
            prompts, completions = self.prompts.draw(random, count), self.completions.draw(random, count)
            yield from zip(moments.tolist(), prompts.tolist(), completions.tolist(), strict=True)
