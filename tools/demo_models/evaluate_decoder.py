"""The figures in the decoder's README: its perplexity next to the grammar's entropy, and along the context."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_models.decoder_files import BEGIN, END, PAD, Checkpoint, document_ids, load
from tools.demo_models.sample_decoder import print_quality, print_samples
from tools.demo_models.stories import held_out_stories, training_stories
from tools.demo_models.storybook.chat import converse
from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.story import Story, may_train

NUM_STORIES = 300
NUM_WINDOWS = 12
ROWS = 16


@dataclass(frozen=True, slots=True)
class Score:
    """Negative log-likelihood in nats of the model and of the grammar, summed over the same stories."""

    model_nats: float
    grammar_nats: float
    num_tokens: int

    def line(self, name: str) -> str:
        """Return the figures as text."""
        model, grammar = self.model_nats / self.num_tokens, self.grammar_nats / self.num_tokens
        return (
            f"{name}: {self.num_tokens:,} tokens, perplexity {math.exp(model):.3f} ({model:.4f} nats a token); "
            f"the grammar's own {math.exp(grammar):.3f} ({grammar:.4f} nats a token)"
        )


def report(directory: Path, seed: int) -> None:
    """Print all figures."""
    checkpoint = load(directory)
    held_out = held_out_stories(seed, NUM_STORIES)
    seen = list(islice(training_stories(seed), NUM_STORIES))
    fresh = list(islice(training_stories(seed + 1), NUM_STORIES))
    print(score(checkpoint, held_out).line("held-out combinations"))
    print(score(checkpoint, fresh).line("new stories of trained combinations"))
    print(score(checkpoint, seen).line("stories that it was trained on"), flush=True)
    print_positions(checkpoint, seed + 1)
    print_quality(checkpoint, seed)
    print_samples(checkpoint, seed)


@torch.inference_mode()
def score(checkpoint: Checkpoint, stories: list[Story]) -> Score:
    """Score each story alone. The begin token is given; the end token must be predicted."""
    total, num_tokens = 0.0, 0
    for start in range(0, len(stories), ROWS):
        rows = [_ids(checkpoint, story.text) for story in stories[start : start + ROWS]]
        total += token_losses(checkpoint, rows).sum().item()
        num_tokens += sum(len(row) - 1 for row in rows)
    return Score(total, sum(story.nats for story in stories), num_tokens)


def token_losses(checkpoint: Checkpoint, rows: list[list[int]]) -> Tensor:
    """Return the negative log-likelihood of each token except the first, [rows, tokens - 1]; 0 for padding."""
    longest = max(len(row) for row in rows)
    batch = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    logits = checkpoint.net(batch[:, :-1])
    return F.cross_entropy(logits.transpose(1, 2), batch[:, 1:], ignore_index=PAD, reduction="none")


@torch.inference_mode()
def print_positions(checkpoint: Checkpoint, seed: int) -> None:
    """Print the perplexity along conversations that fill the whole context."""
    length = checkpoint.net.shape.max_positions
    rows = [row[: length + 1] for row in islice(_long_conversations(checkpoint, seed), NUM_WINDOWS)]
    losses = torch.cat([token_losses(checkpoint, [row]) for row in rows])
    for start in range(0, length, length // 4):
        part = losses[:, start : start + length // 4]
        print(f"positions {start} to {start + part.shape[1]}: perplexity {part.mean().exp():.3f}", flush=True)


def _long_conversations(checkpoint: Checkpoint, seed: int) -> Iterator[list[int]]:
    """Yield new conversations that are long enough."""
    for number in count():
        turns = converse(Dice(f"{seed}/long/{number}"), may_train, goes_on=0.97)
        ids = document_ids(checkpoint.tokenizer, turns)
        if len(ids) > checkpoint.net.shape.max_positions:
            yield ids


def _ids(checkpoint: Checkpoint, text: str) -> list[int]:
    return [BEGIN, *checkpoint.tokenizer.encode(text, add_special_tokens=False).ids, END]
