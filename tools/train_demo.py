"""Trains the demo checkpoint from the seeded story corpus, and measures what came out.

`python tools/train_demo.py --out app/demo/llama` makes everything but the README; `--evaluate DIR` prints the figures that
stand in it. Ctrl-C ends the training early and saves what there is.
"""

import argparse
import math
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import evaluate_demo
import torch
import torch.nn.functional as F
from llama_files import BEGIN, END, PAD, ROLES, SPECIAL, save, train_tokenizer
from llama_net import Llama, Shape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from stories import training_documents
from tokenizers import Tokenizer
from torch import Tensor

STEP_TOKENS = 2048
SHORT, LONG = 512, 2048  # tokens of a window; every eighth step reads long ones, so that no position stays unknown
LONG_EVERY = 8
REPORT_EVERY = 100
WARMUP_STEPS = 40
MUON_RATE, ADAMW_RATE = 4e-3, 4e-3


def token_stream(tokenizer: Tokenizer, seed: int) -> Iterator[list[int]]:
    """Documents as the serving side will see them: begin, then roles and texts, each closed by an end."""
    for turns in training_documents(seed):
        ids = [BEGIN]
        for turn in turns:
            ids += [ROLES[turn.role]] if turn.role else []
            ids += [*tokenizer.encode(turn.text, add_special_tokens=False).ids, END]
        yield ids


def batches(tokenizer: Tokenizer, seed: int) -> Iterator[Tensor]:
    """Windows of packed documents, [rows, tokens + 1]; nothing is ever read twice."""
    documents = token_stream(tokenizer, seed)
    pool: list[int] = []
    step = 0
    while True:
        length = LONG if step % LONG_EVERY == LONG_EVERY - 1 else SHORT
        rows = STEP_TOKENS // length
        while len(pool) < rows * (length + 1):
            pool += next(documents)
        taken, pool = pool[: rows * (length + 1)], pool[rows * (length + 1) :]
        yield torch.tensor(taken).view(rows, length + 1)
        step += 1


def rate(step: int, num_steps: int) -> float:
    """The share of the peak rate: linear warm-up, then a cosine down to nothing."""
    if step < WARMUP_STEPS:
        return (step + 1) / WARMUP_STEPS
    return 0.5 * (1 + math.cos(math.pi * (step - WARMUP_STEPS) / max(1, num_steps - WARMUP_STEPS)))


def optimizers_of(net: Llama) -> list[torch.optim.Optimizer]:
    """Muon turns the matrices of the layers, AdamW the embedding and the scales of the norms."""
    matrices = [parameter for parameter in net.model.layers.parameters() if parameter.dim() == 2]
    others = [net.model.embed_tokens.weight, *(one for one in net.parameters() if one.dim() == 1)]
    return [
        torch.optim.Muon(matrices, lr=MUON_RATE, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=ADAMW_RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train_step(net: Llama, optimizers: list[torch.optim.Optimizer], batch: Tensor) -> float:
    """One update; products in BF16, everything that sums in FP32."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = net(batch[:, :-1])
    loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def train(net: Llama, tokenizer: Tokenizer, seed: int, num_steps: int) -> None:
    """All steps, or as many as the person at the keyboard lets pass."""
    optimizers = optimizers_of(net)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    started, recent = time.monotonic(), math.nan
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
                progress.update(task, advance=1, loss=recent)
                if step % REPORT_EVERY == REPORT_EVERY - 1:
                    seconds = time.monotonic() - started
                    progress.console.print(
                        f"step {step + 1}: loss {recent:.4f}, {(step + 1) * STEP_TOKENS / seconds:.0f} tokens/s"
                    )
    except KeyboardInterrupt:
        print("stopped early; saving what there is")


def main() -> None:
    """Train and save, or evaluate."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="directory to write the checkpoint to")
    parser.add_argument("--evaluate", type=Path, metavar="DIR", help="measure a checkpoint instead of making one")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=2400)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.evaluate:
        evaluate_demo.report(options.evaluate, options.seed)
    if options.out:
        make(options.out, options.seed, options.steps)


def make(out: Path, seed: int, num_steps: int) -> None:
    """The whole road: tokenizer, weights, files."""
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
