"""Prompts of wanted lengths, the same on every machine and different from each other from their first token on; and when to send them."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

# Common words that every tokenizer knows; prompts are dealt from their tokens.
WORDS = (
    "once upon a time there was little house by the river and in it lived an old woman with her cat every morning they went down "
    "to water look at boats one day big red boat came slowly round bend man on deck waved called out good friends have you seen my "
    "dog he is small brown likes bread said yes we saw him under bridge this very early today so all three walked back along path"
)


class Deck:
    """Deals prompts of token ids. Each is shuffled by its own seed: two prompts share no prefix unless asked to."""

    def __init__(self, token_ids: Sequence[int], seed: int = 0) -> None:
        self._token_ids = sorted(set(token_ids))
        self._random = random.Random(seed)
        if len(self._token_ids) < 2:
            raise ValueError("a deck needs at least two different tokens")

    def prompt(self, num_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        """`num_tokens` ids, the first of them `prefix`."""
        drawn = self._random.choices(self._token_ids, k=max(0, num_tokens - len(prefix)))
        return [*prefix, *drawn][:num_tokens]


class TextDeck:
    """The same as text, for servers that take no token ids: of about as many tokens as wanted, by what some words were counted as."""

    def __init__(self, tokens_per_word: float, tokens_around: float, seed: int = 0) -> None:
        """`tokens_around`: of what the server puts around a prompt, a chat template's for instance."""
        self._tokens_per_word, self._tokens_around = tokens_per_word, tokens_around
        self._random = random.Random(seed)
        self._words = WORDS.split()

    def prompt(self, num_tokens: int) -> str:
        return self.words(max(1, round((num_tokens - self._tokens_around) / self._tokens_per_word)))

    def words(self, num_words: int) -> str:
        return " ".join(self._random.choices(self._words, k=num_words))


@dataclass(frozen=True, slots=True)
class Lengths:
    """How many tokens: always `low`, or anything from `low` to `high`, each as likely."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormal:
    """How many tokens: as many below `median` as above it, a few of them far above, up to `highest`."""

    median: int
    highest: int

    def draw(self, source: random.Random) -> int:
        while True:
            drawn = round(self.median * math.exp(source.gauss(0.0, self._sigma)))
            if 1 <= drawn <= self.highest:
                return drawn

    @property
    def _sigma(self) -> float:
        """One text in a thousand would be longer than the highest; it is drawn anew."""
        return max(math.log(self.highest / self.median), 0.0) / NormalDist().inv_cdf(0.999)

    def __str__(self) -> str:
        return f"lognormal:{self.median}:{self.highest}"


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start at which somebody comes: independently of each other, `rate` a second on average."""
    source, moment = random.Random(seed), 0.0
    while True:
        moment += source.expovariate(rate)
        yield moment
