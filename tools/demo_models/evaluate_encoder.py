"""Agreement of the demo encoder with its teacher: rank correlation of cosines, and nearest texts."""

import random
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models.encoder_files import load
from tools.demo_models.encoder_net import Bert
from tools.demo_models.encoder_texts import corpus, is_held_out

EVERYDAY = Path(__file__).parent / "everyday.txt"
NUM_TEXTS = 1000  # held-out texts, compared pairwise


@torch.inference_mode()
def embedded(net: Bert, tokenizer: Tokenizer, texts: list[str]) -> Tensor:
    """Return unit vectors [texts, hidden_size], computed one text at a time."""
    rows = [torch.tensor([encoding.ids]) for encoding in tokenizer.encode_batch_fast(texts)]
    return F.normalize(torch.cat([net(row, torch.ones_like(row, dtype=torch.bool)) for row in rows]))


def ranks(values: Tensor) -> Tensor:
    """Return the rank of each value, [values]."""
    return values.argsort().argsort().double()


def spearman(first: Tensor, second: Tensor) -> float:
    """Return the rank correlation of two lists of numbers."""
    return float(torch.corrcoef(torch.stack((ranks(first), ranks(second))))[0, 1])


def agreement(made: Tensor, taught: Tensor) -> tuple[float, float]:
    """Return Spearman's correlation over all pairs of texts, and the nearest-text agreement.

    The agreement is the share of texts whose nearest text by `made` is among the nearest three by `taught`.
    """
    ours, theirs = made @ made.T, taught @ taught.T
    above = torch.triu_indices(len(ours), len(ours), 1)
    correlation = spearman(ours[*above], theirs[*above])
    nearest = ours.fill_diagonal_(-1).argmax(1, keepdim=True)
    found = (theirs.fill_diagonal_(-1).topk(3).indices == nearest).any(1).double().mean()
    return correlation, float(found)


def report(directory: Path, teacher_directory: Path, seed: int) -> None:
    """Print the table of the README."""
    net, tokenizer = load(directory)
    teacher, teacher_tokenizer = load(teacher_directory)
    held_out = [text for text in corpus(teacher_tokenizer, seed, 150_000) if is_held_out(text)]
    everyday = EVERYDAY.read_text(encoding="utf-8").splitlines()
    print("| texts | number | Spearman of cosines | nearest among the teacher's three |\n|---|---|---|---|")
    for name, texts in (
        ("held out", random.Random(seed).sample(held_out, NUM_TEXTS)),
        ("everyday sentences", everyday),
    ):
        correlation, found = agreement(embedded(net, tokenizer, texts), embedded(teacher, teacher_tokenizer, texts))
        print(f"| {name} | {len(texts)} | {correlation:.3f} | {found:.2f} |", flush=True)
