"""Perplexity: reads a text through a model window by window.

Returns the loss and the likeliest tokens. Nothing is scheduled.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from app.backends.base import Backend
from app.engine.batch import Span
from app.engine.kv_cache import KVCache, KVShape
from app.engine.runner import StepAttention
from app.engine.sequence import sequence_of
from app.errors import SettingsInvalid
from app.messages import Generate, SamplingParams
from app.models.config import ModelConfig
from app.models.context import StepContext
from app.text.tokenizer import Tokenizer

WINDOW = 512  # tokens that attend to each other
STEP = 128  # tokens whose logits are computed at once: with a vocabulary of 128k these are 64 MB
BREAK = "---"  # separator line between documents, which do not attend to each other

Window = list[int]


def windows_of(tokenizer: Tokenizer, text: Path, max_model_len: int, max_tokens: int | None = None) -> list[Window]:
    """Cut the text's documents into windows of token ids, each with the checkpoint's usual first token.

    Raises `SettingsInvalid` if there is nothing to read.
    """
    try:
        documents = _documents(text.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"The text {text} cannot be read: {error}") from error
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    room, left, windows = min(WINDOW, max_model_len) - len(begin), max_tokens, []
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)[:left]
        pieces = [[*begin, *ids[start : start + room]] for start in range(0, len(ids), room)]
        windows += [piece for piece in pieces if len(piece) > 1]
        left = None if left is None else left - len(ids)
        if left == 0:
            break
    if not windows:
        raise SettingsInvalid(f"The text {text} has fewer than two consecutive tokens.")
    return windows


def _documents(text: str) -> Iterator[str]:
    """Yield the parts between separator lines, without leading and trailing line breaks."""
    lines: list[str] = []
    for line in [*text.split("\n"), BREAK]:
        if line.strip() != BREAK:
            lines.append(line)
        elif document := "\n".join(lines).strip("\n"):
            yield document
            lines = []


class Reader:
    """Runs one sequence at a time through a model and returns the logits of every token."""

    def __init__(self, model: nn.Module, config: ModelConfig, kv_dtype: torch.dtype, backend: Backend) -> None:
        self._model = model
        shape = KVShape(config.num_layers, 1, min(WINDOW, config.max_model_len), config.num_kv_heads, config.head_dim)
        self._attention = StepAttention(KVCache(shape, kv_dtype), backend)

    def read(self, window: Window) -> tuple[float, Tensor]:
        """Return the loss in nats over all tokens after the first, and the likeliest token at each position."""
        nats, likeliest = 0.0, []
        for wanted, logits in self.steps(window):
            nats += float(torch.nn.functional.cross_entropy(logits, wanted, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        return nats, torch.cat(likeliest)

    def steps(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield consecutive target tokens [n] and the FP32 logits [n, vocab] that predict them."""
        for start in range(0, len(window) - 1, STEP):
            wanted = torch.tensor(window[start + 1 : start + STEP + 1])
            yield wanted, self._logits(window, start, start + len(wanted)).float()

    def _logits(self, window: Window, start: int, end: int) -> Tensor:
        request = Generate("reading", tuple(window), SamplingParams(max_tokens=1), arrived_at=0.0)
        span = Span(sequence_of(request), start, end - start, slot=0, prefix_slot=None, prefix_tokens=0, samples=True)
        attend = self._attention.begin((span,))
        tokens, positions = torch.tensor(window[start:end]), torch.arange(start, end)
        logits: Tensor = self._model(StepContext(tokens, positions, torch.arange(end - start), attend))
        return logits
