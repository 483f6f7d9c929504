"""The seeded generator of the demo's corpus: `python tools/stories.py --count 3` prints what it tells.

The corpus is endless: document number i of a seed is always the same, whatever else is drawn.
"""

import argparse
from collections.abc import Iterator
from itertools import count

from storybook.chat import Turn, converse
from storybook.dice import Dice
from storybook.story import Story, is_held_out, may_train, write_story

PLAIN_SHARE = 0.4  # of the documents; the others are conversations
LONG_SHARE = 0.06  # of the documents: conversations that fill the whole context


def training_documents(seed: int) -> Iterator[list[Turn]]:
    """Plain stories (one turn without a role) and conversations, none with a held-out combination."""
    return (training_document(f"{seed}/train/{number}") for number in count())


def training_document(seed: str) -> list[Turn]:
    """One document of the corpus."""
    dice = Dice(f"{seed}/form")
    if _is_plain(dice):
        return [Turn("", write_story(seed, may_train).text)]
    goes_on = 0.92 if dice.chance(LONG_SHARE / (1 - PLAIN_SHARE)) else 0.3
    return converse(Dice(seed), may_train, goes_on)


def _is_plain(dice: Dice) -> bool:
    return dice.chance(PLAIN_SHARE)


def training_stories(seed: int) -> Iterator[Story]:
    """The plain stories among the training documents, in their order."""
    for number in count():
        if _is_plain(Dice(f"{seed}/train/{number}/form")):
            yield write_story(f"{seed}/train/{number}", may_train)


def held_out_stories(seed: int, number: int) -> list[Story]:
    """Plain stories whose hero and thing training never brings together."""
    return [write_story(f"{seed}/held-out/{index}", is_held_out) for index in range(number)]


def main() -> None:
    """Print a few training documents, or held-out stories with their surprise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--held-out", action="store_true")
    options = parser.parse_args()
    if options.held_out:
        for story in held_out_stories(options.seed, options.count):
            print(f"{story.text}\n({story.nats:.1f} nats)\n")
        return
    for _, turns in zip(range(options.count), training_documents(options.seed), strict=False):
        print("\n".join(f"[{turn.role or 'story'}] {turn.text}" for turn in turns), end="\n\n")


if __name__ == "__main__":
    main()
