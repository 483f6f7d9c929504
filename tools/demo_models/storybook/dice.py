"""A random source that adds up the surprise of every choice, so that the probability of a text is known."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Dice:
    """A seeded source of choices. `nats` is the sum of -ln p over all choices so far."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, options: Sequence[Option]) -> Option:
        """Return one of the options, all equally likely."""
        self.nats += math.log(len(options))
        return options[int(self._random.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        happens = self._random.random() < probability
        self.nats -= math.log(probability if happens else 1.0 - probability)
        return happens
