"""The seeded generator of the decoder's corpus: `python -m tools.demo_models.stories --count 3` prints documents.

`--held-out --documents --count 300` prints the text for `armature bench quality --text`. The corpus is endless.
Document number i of a seed is always the same, whatever else is drawn.
"""

import argparse
from collections.abc import Iterator
from itertools import count, islice

from tools.demo_models.storybook.chat import Turn, converse, practise
from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.story import Story, is_held_out, may_train, write_story

NUM_PRACTICE = 2560  # practice documents at the beginning, until the network can copy a name
PRACTICE_SHARE, PLAIN_SHARE = 0.25, 0.3  # shares of the documents after these; the others are conversations
END = "<|end|>"  # the tokenizer's end token
LONG_SHARE = 0.06  # share of the conversations that fill the whole context


def training_documents(seed: int) -> Iterator[list[Turn]]:
    """Yield practice, plain stories (one turn without a role) and conversations, none with a held-out combination."""
    return (training_document(seed, number) for number in count())


def training_document(seed: int, number: int) -> list[Turn]:
    """Return one document of the corpus."""
    name, form = _name_and_form(seed, number)
    if form == "plain":
        return [Turn("", write_story(name, may_train).text)]
    if form == "practice":
        return practise(Dice(name), may_train)
    return converse(Dice(name), may_train, goes_on=0.93 if form == "long" else 0.3)


def training_stories(seed: int) -> Iterator[Story]:
    """Yield the plain stories among the training documents, in their order."""
    for number in count():
        name, form = _name_and_form(seed, number)
        if form == "plain":
            yield write_story(name, may_train)


def _name_and_form(seed: int, number: int) -> tuple[str, str]:
    """Return the seed of a document, and its form."""
    name = f"{seed}/train/{number}"
    dice = Dice(f"{name}/form")
    if number < NUM_PRACTICE or dice.chance(PRACTICE_SHARE):
        return name, "practice"
    if dice.chance(PLAIN_SHARE / (1 - PRACTICE_SHARE)):
        return name, "plain"
    return name, "long" if dice.chance(LONG_SHARE) else "conversation"


def held_out_stories(seed: int, number: int) -> list[Story]:
    """Return plain stories whose hero and thing never occur together in training."""
    return [write_story(f"{seed}/held-out/{index}", is_held_out) for index in range(number)]


def main() -> None:
    """Print training documents, or held-out stories with their negative log-likelihood."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=3)
    parser.add_argument("--skip", type=int, default=NUM_PRACTICE, help="documents to skip at the beginning")
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument(
        "--documents",
        action="store_true",
        help="print only plain stories, each with its end, separated by lines of ---",
    )
    options = parser.parse_args()
    if options.documents:
        training = islice(training_stories(options.seed), options.count)
        stories = held_out_stories(options.seed, options.count) if options.held_out else training
        print("\n---\n".join(f"{story.text}{END}" for story in stories))
        return
    if options.held_out:
        for story in held_out_stories(options.seed, options.count):
            print(f"{story.text}\n({story.nats:.1f} nats)\n")
        return
    for turns in islice(training_documents(options.seed), options.skip, options.skip + options.count):
        print("\n".join(f"[{turn.role or 'story'}] {turn.text}" for turn in turns), end="\n\n")


if __name__ == "__main__":
    main()
