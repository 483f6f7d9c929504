"""Prompts of given lengths, identical on every machine and different from the first token on; and arrival times."""

from __future__ import annotations

import math
import random
import struct
import zlib
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

# Common words that every tokenizer knows; prompts are random sequences of their tokens.
FREQUENT_WORDS = (
    "once upon a time there was little house by the river and in it lived an old woman with her cat every morning they went down "
    "to water look at boats one day big red boat came slowly round bend man on deck waved called out good friends have you seen my "
    "dog he is small brown likes bread said yes we saw him under bridge this very early today so all three walked back along path"
)


class TokenPrompts:
    """Source of random prompts of token ids.

    Each source has its own seed. Two prompts share no prefix unless one is requested.
    """

    def __init__(self, token_ids: Sequence[int], seed: int = 0) -> None:
        self._token_ids = sorted(set(token_ids))
        self._random = random.Random(seed)
        if len(self._token_ids) < 2:
            raise ValueError("a deck needs at least two different tokens")

    def prompt(self, num_tokens: int, prefix: Sequence[int] = ()) -> list[int]:
        drawn = self._random.choices(self._token_ids, k=max(0, num_tokens - len(prefix)))
        return [*prefix, *drawn][:num_tokens]


class TextPrompts:
    """Source of random text prompts for servers that do not accept token ids.

    The number of tokens is approximate; it is derived from the server's token counts of some words.
    """

    def __init__(self, tokens_per_word: float, tokens_around: float, seed: int = 0) -> None:
        """Set up the source; `tokens_around` is the number of tokens that the server adds, such as a chat template."""
        self._tokens_per_word, self._tokens_around = tokens_per_word, tokens_around
        self._random = random.Random(seed)
        self._words = FREQUENT_WORDS.split()

    def prompt(self, num_tokens: int) -> str:
        """Return a text of about `num_tokens` tokens, including the tokens that the server adds."""
        return self.words(max(1, round((num_tokens - self._tokens_around) / self._tokens_per_word)))

    def words(self, num_words: int) -> str:
        return " ".join(self._random.choices(self._words, k=num_words))


class Pictures:
    """Source of pictures of one size, as data URLs of PNG files. No two are the same."""

    def __init__(self, width: int, height: int, seed: int = 0) -> None:
        self._width, self._height, self._random = width, height, random.Random(seed)

    def __str__(self) -> str:
        return f"{self._width}x{self._height}"

    def url(self) -> str:
        """Return a picture of stripes in random colors, whose file is small."""
        filter_kind = b"\0"  # of a row: none
        rows = (filter_kind + self._random.randbytes(3) * self._width for _ in range(self._height))
        head = struct.pack(">IIBBBBB", self._width, self._height, 8, 2, 0, 0, 0)  # 8 bits, RGB
        chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(b"".join(rows))), (b"IEND", b""))
        file = b"\x89PNG\r\n\x1a\n" + b"".join(
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
            for kind, data in chunks
        )
        return "data:image/png;base64," + b64encode(file).decode()


@dataclass(frozen=True, slots=True)
class UniformLengths:
    """Uniformly distributed number of tokens from `low` to `high`, both included."""

    low: int
    high: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low}" if self.low == self.high else f"{self.low}:{self.high}"


@dataclass(frozen=True, slots=True)
class LogNormalLengths:
    """Log-normally distributed number of tokens with this median, truncated at `highest`."""

    median: int
    highest: int

    def draw(self, source: random.Random) -> int:
        while True:
            drawn = round(self.median * math.exp(source.gauss(0.0, self._sigma)))
            if 1 <= drawn <= self.highest:
                return drawn

    @property
    def _sigma(self) -> float:
        """Standard deviation of the logarithm: 0.1% of the lengths exceed `highest` and are drawn again."""
        return max(math.log(self.highest / self.median), 0.0) / NormalDist().inv_cdf(0.999)

    def __str__(self) -> str:
        return f"lognormal:{self.median}:{self.highest}"


def poisson_arrivals(rate: float, seed: int) -> Iterator[float]:
    """Yield arrival times of a Poisson process in seconds from the start; `rate` is the mean per second."""
    source, moment = random.Random(seed), 0.0
    while True:
        moment += source.expovariate(rate)
        yield moment
