"""Samples of the demo decoder: whether they follow the grammar, answer the request, or repeat training text."""

from collections import defaultdict
from itertools import islice

import torch
import torch.nn.functional as F

from tools.demo_models.decoder_files import BEGIN, END, PAD, ROLES, Checkpoint
from tools.demo_models.stories import training_documents
from tools.demo_models.storybook import words
from tools.demo_models.storybook.reading import follows, is_coherent
from tools.demo_models.storybook.scene import is_held_out_pair

NUM_STORIES = 64
MAX_TOKENS = 400
NEVER_TOLD = [BEGIN, PAD, *ROLES.values()]
# More than the training reads, so that every copy is found.
NUM_DOCUMENTS = 15_000
PROMPTS = ("Tell me a story about a fox and a lantern.", "Write a short story about Mia in the forest.", "Hello!")


@torch.inference_mode()
def generate(checkpoint: Checkpoint, rows: list[list[int]], temperature: float, chance: torch.Generator) -> list[str]:
    """Continue prompts of one length without a cache: slow, short, and independent of the server's code."""
    batch = torch.tensor(rows)
    start, has_ended = batch.shape[1], torch.zeros(len(rows), dtype=torch.bool)
    while batch.shape[1] < start + MAX_TOKENS and not bool(has_ended.all()):
        logits = checkpoint.net(batch[~has_ended])[:, -1]
        logits[:, NEVER_TOLD] = -torch.inf
        chosen = torch.full((len(rows),), END)
        if temperature == 0:
            chosen[~has_ended] = logits.argmax(-1)
        else:
            chosen[~has_ended] = torch.multinomial(F.softmax(logits / temperature, -1), 1, generator=chance)[:, 0]
        batch = torch.cat((batch, chosen[:, None]), 1)
        has_ended |= chosen == END
    return [_until_end(checkpoint, row[start:]) for row in batch.tolist()]


def print_samples(checkpoint: Checkpoint, seed: int) -> None:
    """Print a few answers, greedy and at temperature 0.8."""
    chance = torch.Generator().manual_seed(seed)
    for name, temperature in (("greedy", 0.0), ("temperature 0.8", 0.8)):
        for prompt in PROMPTS:
            print(
                f"\n[{name}] {prompt}\n{generate(checkpoint, [chat_ids(checkpoint, prompt)], temperature, chance)[0]}"
            )
        ids = [BEGIN, *checkpoint.tokenizer.encode("Once upon a time", add_special_tokens=False).ids]
        print(f"\n[{name}, completion] Once upon a time\n...{generate(checkpoint, [ids], temperature, chance)[0]}")


def print_quality(checkpoint: Checkpoint, seed: int) -> None:
    """Print the shares in the README."""
    chance = torch.Generator().manual_seed(seed)
    told = generate(checkpoint, [[BEGIN]] * NUM_STORIES, 0.8, chance)
    known = {
        part
        for turns in islice(training_documents(seed), NUM_DOCUMENTS)
        for turn in turns
        for part in _stories_in(turn.text)
    }
    print(f"\n{len(told)} stories without a prompt at temperature 0.8:")
    print(f"  follow a plot of the grammar word for word: {sum(follows(text) is not None for text in told)}")
    print(f"  and keep to hero, friend, thing and place: {sum(is_coherent(text) for text in told)}")
    print(f"  are in the training text word for word: {sum(text in known for text in told)}")
    print_obedience(checkpoint, chance)


def print_obedience(checkpoint: Checkpoint, chance: torch.Generator) -> None:
    """Print how many requests for a held-out creature and thing are answered with both."""
    pairs = [(kind, thing) for kind in words.KINDS for thing in words.THINGS if is_held_out_pair(kind, thing)][
        :NUM_STORIES
    ]
    by_length: dict[int, list[tuple[tuple[str, str], list[int]]]] = defaultdict(list)
    for pair in pairs:
        ids = chat_ids(
            checkpoint,
            f"Tell me a story about a {pair[0]} and a {pair[1]}.".replace(" a e", " an e").replace(" a u", " an u"),
        )
        by_length[len(ids)].append((pair, ids))
    names_both = 0
    for group in by_length.values():
        answers = generate(checkpoint, [ids for _, ids in group], 0.8, chance)
        names_both += sum(
            all(word in answer for word in pair) for (pair, _), answer in zip(group, answers, strict=True)
        )
    print(f"{len(pairs)} requests for a held-out creature and thing: {names_both} answers name both")


def chat_ids(checkpoint: Checkpoint, prompt: str) -> list[int]:
    """Return the chat template's token ids for one question."""
    ids = checkpoint.tokenizer.encode(prompt, add_special_tokens=False).ids
    return [BEGIN, ROLES["user"], *ids, END, ROLES["assistant"]]


def _until_end(checkpoint: Checkpoint, ids: list[int]) -> str:
    return str(checkpoint.tokenizer.decode(ids[: ids.index(END)] if END in ids else ids))


def _stories_in(text: str) -> list[str]:
    """Return the text itself, and the part after the storyteller's preface."""
    return [text, text.partition("\n\n")[2]]
