"""Train the demo decoder on the seeded story corpus.

`python -m tools.demo_models.train_decoder --out app/demo/llama`.
That writes everything except the README. `--evaluate DIR` prints the figures of the README. Ctrl-C ends the training
early and saves the current weights.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models import evaluate_decoder
from tools.demo_models.decoder_files import PAD, SPECIAL, document_ids, save, train_tokenizer
from tools.demo_models.decoder_net import Llama, Shape
from tools.demo_models.stories import NUM_PRACTICE, training_documents

STEP_TOKENS = (
    2048  # tokens of a step, with padding; half of that during practice, which needs many steps rather than many tokens
)
POOL = 256  # documents that are sorted by length, so that the rows of a batch are similar
REPORT_EVERY = 100
WARMUP_STEPS = 40
MUON_RATE, ADAMW_RATE = 4e-3, 4e-3


def token_stream(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Yield documents as the server will see them: begin, then roles and texts, each closed by an end."""
    return (document_ids(tokenizer, turns) for turns in training_documents(seed))


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Tensor]:
    """Yield batches of whole documents, [rows, tokens], padded at the end. No document is read twice."""
    documents, order = token_stream(tokenizer, seed), random.Random(seed)
    for number in count():
        longest = Shape().max_positions + 1  # the last token is only a target
        pool = sorted((document[:longest] for document in islice(documents, POOL)), key=len)
        groups = grouped(pool, STEP_TOKENS if number >= NUM_PRACTICE // POOL else STEP_TOKENS // 2)
        order.shuffle(groups)
        yield from (padded(group) for group in groups)


def grouped(pool: list[list[int]], max_tokens: int) -> list[list[list[int]]]:
    """Group neighbours of a sorted pool, as many as fit when padded to the longest of them."""
    groups: list[list[list[int]]] = []
    for document in pool:
        if groups and (len(groups[-1]) + 1) * len(document) <= max_tokens:
            groups[-1].append(document)
        else:
            groups.append([document])
    return groups


def padded(rows: list[list[int]]) -> Tensor:
    """Return one padded tensor, [rows, tokens]."""
    longest = max(len(row) for row in rows)
    return torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])


def rate(step: int, num_steps: int) -> float:
    """Return the share of the peak learning rate: linear warm-up, then a cosine down to zero."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)))


def optimizers_of(net: Llama) -> list[torch.optim.Optimizer]:
    """Return Muon for the matrices of the layers, and AdamW for the embedding and the scales of the norms."""
    matrices = [parameter for parameter in net.model.layers.parameters() if parameter.dim() == 2]
    others = [net.model.embed_tokens.weight, *(one for one in net.parameters() if one.dim() == 1)]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(net: Llama, optimizers: list[torch.optim.Optimizer], batch: Tensor) -> float:
    """Update the weights once. Products are in BF16, sums in FP32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(batch[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten(), ignore_index=PAD)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(net: Llama, tokenizer: Tokenizer, seed: int, num_steps: int) -> None:
    """Run all steps, or until Ctrl-C."""
    optimizers = optimizers_of(net)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    started, recent, num_tokens = time.monotonic(), math.nan, 0
    columns = (
        TextColumn("training"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    try:
        with Progress(*columns) as progress:
            task = progress.add_task("training", total=num_steps, loss=math.nan)
            for step, batch in enumerate(islice(batches(tokenizer, seed), num_steps)):
                for group, peak in peaks:
                    group["lr"] = peak * rate(step, num_steps)
                loss = train_step(net, optimizers, batch)
                recent = loss if math.isnan(recent) else 0.98 * recent + 0.02 * loss
                num_tokens += int((batch[:, 1:] != PAD).sum())
                progress.update(task, advance=1, loss=recent)
                if step % REPORT_EVERY == REPORT_EVERY - 1:
                    seconds = time.monotonic() - started
                    progress.console.print(
                        f"step {step + 1}: loss {recent:.4f}, {num_tokens:,} tokens, {num_tokens / seconds:.0f} a second"
                    )
    except KeyboardInterrupt:
        print("stopped early; saving the current weights")


def main() -> None:
    """Train and save, or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="directory to write the checkpoint to")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="measure a checkpoint instead of training one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3500)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        evaluate_decoder.report(options.evaluate, options.seed)
    if options.out:
        make(options.out, options.seed, options.steps)


def make(out: Path, seed: int, num_steps: int) -> None:
    """Make the tokenizer, the weights and the files."""
    torch.manual_seed(seed)
    sample = islice(training_documents(seed), 20000)
    tokenizer = train_tokenizer([turn.text for turns in sample for turn in turns], Shape().vocab_size)
    assert [tokenizer.token_to_id(token) for token in SPECIAL] == list(range(PAD + 1)), "special tokens come first"
    net = Llama(Shape())
    print(f"{sum(parameter.numel() for parameter in net.parameters()):,} parameters")
    train(net, tokenizer, seed, num_steps)
    save(out, net, tokenizer)


if __name__ == "__main__":
    main()
