"""Prompts of exact lengths, the same on every machine and different from each other from their first token on."""

from __future__ import annotations

import random
from collections.abc import Sequence

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
