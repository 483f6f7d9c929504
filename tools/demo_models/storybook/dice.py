"""Chance that keeps its own books: every pick adds its surprise, so a text knows how probable the grammar made it."""

import math
import random
from collections.abc import Sequence
from typing import TypeVar

Option = TypeVar("Option")


class Dice:
    """A seeded source of choices; `nats` is the sum of -ln p over all the picks so far."""

    def __init__(self, seed: int | str) -> None:
        self._random = random.Random(seed)
        self.nats = 0.0

    def pick(self, options: Sequence[Option]) -> Option:
        """One of the options, all equally likely."""
        self.nats += math.log(len(options))
        return options[int(self._random.random() * len(options))]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        happens = self._random.random() < probability
        self.nats -= math.log(probability if happens else 1.0 - probability)
        return happens
