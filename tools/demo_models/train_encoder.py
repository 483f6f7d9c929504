"""Distil the demo encoder from all-MiniLM-L6-v2 and evaluate it.

`python -m tools.demo_models.train_encoder --teacher DIR --out app/demo/bert` writes everything except the README.
`--evaluate DIR` prints the figures of the README. Ctrl-C ends the training early and saves the current weights.
"""

import argparse
import math
import random
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models.encoder_files import SPECIAL, load, save, smaller_tokenizer
from tools.demo_models.encoder_net import Bert, Shape
from tools.demo_models.encoder_texts import corpus, is_held_out
from tools.demo_models.evaluate_encoder import report

STEP_TOKENS = 1536  # tokens of a training step, with padding
TEACHER_TOKENS = 4096
POOL = 2048  # texts that are sorted by length, so that the rows of a batch are similar
FREQUENT_WORDS = 5600  # tokens taken from the top of the teacher's vocabulary; the rest is what the corpus uses most
WARMUP_STEPS = 100
RATE = 2e-3
SIMILARITY_WEIGHT = 20.0  # weight of the loss on cosines within a batch, whose squared errors are much smaller
REPORT_EVERY = 200


@dataclass(frozen=True, slots=True)
class Lesson:
    """A text as the student reads it, and the row of the teacher's vector of it."""

    token_ids: list[int]
    row: int


def padded(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Return padded ids and their mask, both [rows, tokens]."""
    longest = max(len(row) for row in rows)
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([[True] * len(row) + [False] * (longest - len(row)) for row in rows])


def grouped(pool: list[Lesson], max_tokens: int) -> list[list[Lesson]]:
    """Group neighbours of a pool sorted by length, as many as fit when padded to the longest of them."""
    groups: list[list[Lesson]] = []
    for lesson in sorted(pool, key=lambda one: len(one.token_ids)):
        if groups and (len(groups[-1]) + 1) * len(lesson.token_ids) <= max_tokens:
            groups[-1].append(lesson)
        else:
            groups.append([lesson])
    return groups


@torch.inference_mode()
def vectors(net: Bert, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return unit vectors of texts in their order, [texts, hidden_size]."""
    lessons = [Lesson(encoding.ids, row) for row, encoding in enumerate(tokenizer.encode_batch_fast(texts))]
    found = torch.empty(len(texts), net.shape.hidden_size)
    started, done = time.monotonic(), 0
    for group in grouped(lessons, TEACHER_TOKENS):
        pooled = net(*padded([lesson.token_ids for lesson in group]))
        found[[lesson.row for lesson in group]] = F.normalize(pooled)
        if (done + len(group)) * 20 // len(texts) > done * 20 // len(texts):
            print(
                f"{done + len(group):,} of {len(texts):,} texts embedded, {time.monotonic() - started:.0f} s",
                flush=True,
            )
        done += len(group)
    return found


def choose_tokens(tokenizer: Tokenizer, texts: list[str], vocab_size: int) -> list[str]:
    """Return the tokens of the vocabulary.

    Special tokens, every character of English text alone and within a word, common words, and the most frequent tokens
    of these texts.
    """
    by_id = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
    known = set(by_id)
    characters = [chr(code) for code in range(33, 127) if not chr(code).isupper()]
    chosen = dict.fromkeys([*SPECIAL, *(one for c in characters for one in (c, f"##{c}") if one in known)])
    common = (token for token in by_id if token.removeprefix("##").isascii() and token.removeprefix("##").isalnum())
    chosen.update(dict.fromkeys(islice(common, FREQUENT_WORDS)))
    used = Counter(by_id[number] for encoding in tokenizer.encode_batch_fast(texts) for number in encoding.ids)
    for token, _ in used.most_common():
        if len(chosen) >= vocab_size:
            break
        if token.isascii():
            chosen[token] = None
    return list(chosen)


def main_axes(vectors: Tensor, num_axes: int) -> Tensor:
    """Return the principal directions of these vectors, [size, num_axes].

    Cosines hardly change when the others are dropped.
    """
    _, axes = torch.linalg.eigh(vectors.T @ vectors)
    return axes[:, -num_axes:]


def begin(net: Bert, tokenizer: Tokenizer, teacher: Bert, teacher_tokenizer: Tokenizer, projection: Tensor) -> None:
    """Initialize each token's embedding with the teacher's vector of that token alone.

    The mean over tokens is then already meaningful.
    """
    tokens = list(dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])))
    alone = vectors(teacher, teacher_tokenizer, [token.removeprefix("##") for token in tokens]) @ projection
    alone -= alone.mean(0)
    with torch.no_grad():
        net.embeddings.word_embeddings.weight.copy_(alone * 0.2 / alone.std())


def rate(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)))


def batches(lessons: list[Lesson], seed: int) -> Iterator[list[Lesson]]:
    """Yield all lessons again and again, each time in another order, with texts of similar length in a batch."""
    dice = random.Random(seed)
    while True:
        dice.shuffle(lessons)
        for start in range(0, len(lessons), POOL):
            groups = grouped(lessons[start : start + POOL], STEP_TOKENS)
            dice.shuffle(groups)
            yield from groups


def loss_of(made: Tensor, taught: Tensor, projection: Tensor) -> Tensor:
    """Return the loss: distance from the teacher's projected vectors, plus the weighted error of the cosines."""
    made = F.normalize(made)
    apart = 1 - (made * F.normalize(taught @ projection)).sum(1).mean()
    return apart + SIMILARITY_WEIGHT * F.mse_loss(made @ made.T, taught @ taught.T)


def train(net: Bert, lessons: list[Lesson], taught: Tensor, projection: Tensor, options: argparse.Namespace) -> None:
    """Run all steps, or until Ctrl-C."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    started, recent, num_tokens = time.monotonic(), math.nan, 0
    try:
        for step, batch in enumerate(islice(batches(lessons, options.seed), options.steps)):
            for group in optimizer.param_groups:
                group["lr"] = RATE * rate(step, options.steps)
            made = net(*padded([lesson.token_ids for lesson in batch]))
            loss = loss_of(made, taught[[lesson.row for lesson in batch]], projection)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = loss.item() if math.isnan(recent) else 0.98 * recent + 0.02 * loss.item()
            num_tokens += sum(len(lesson.token_ids) for lesson in batch)
            if step % REPORT_EVERY == REPORT_EVERY - 1:
                per_second = num_tokens / (time.monotonic() - started)
                print(
                    f"step {step + 1}: loss {recent:.4f}, {num_tokens:,} tokens, {per_second:.0f} a second", flush=True
                )
    except KeyboardInterrupt:
        print("stopped early; saving the current weights")


def make(options: argparse.Namespace) -> None:
    """Make the texts, the teacher's vectors, the tokenizer, the weights and the files."""
    torch.manual_seed(options.seed)
    teacher, teacher_tokenizer = load(options.teacher)
    texts = [text for text in corpus(teacher_tokenizer, options.seed, options.texts) if not is_held_out(text)]
    taught = vectors(teacher, teacher_tokenizer, texts)
    axes = main_axes(taught, Shape().hidden_size)
    print(
        f"the {axes.shape[1]} axes of {axes.shape[0]} that are kept hold {(taught @ axes).square().sum() / len(taught):.4f} of the squares"
    )
    tokenizer = smaller_tokenizer(
        teacher_tokenizer, choose_tokens(teacher_tokenizer, texts, Shape().vocab_size), Shape().max_positions
    )
    net = Bert(Shape(vocab_size=tokenizer.get_vocab_size()))
    print(f"{sum(parameter.numel() for parameter in net.parameters()):,} parameters")
    begin(net, tokenizer, teacher, teacher_tokenizer, axes)
    lessons = [Lesson(encoding.ids, row) for row, encoding in enumerate(tokenizer.encode_batch_fast(texts))]
    train(net, lessons, taught, axes, options)
    save(options.out, net, tokenizer)


def main() -> None:
    """Train and save, or evaluate, or both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--teacher", type=Path, required=True, metavar="DIR", help="all-MiniLM-L6-v2, a sentence-transformers directory"
    )
    parser.add_argument("--out", type=Path, help="directory to write the checkpoint to")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="measure a checkpoint against the teacher")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--texts", type=int, default=60_000)
    parser.add_argument("--steps", type=int, default=3200)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.out:
        make(options)
    if options.evaluate:
        report(options.evaluate, options.teacher, options.seed)


if __name__ == "__main__":
    main()
