"""Reads a text through a model window by window: the loss and the likeliest tokens. Nothing is scheduled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn

from app.backends.base import HostBackend
from app.engine.decoder.cpu_runner import StepAttention
from app.engine.decoder.kv_cache import KvCache, KvShape
from app.engine.scheduler.batch import ScheduledSpan, make_sequence
from app.errors import SettingsInvalid
from app.messages import Generate, SamplingParams
from app.models.decoders.config import ModelConfig
from app.text.tokenizer import Tokenizer
from armature_kernels.attention.context import StepContext

WINDOW_TOKENS = 512  # tokens that attend to each other
LOGITS_TOKENS = 128  # tokens whose logits are computed at once: with a vocabulary of 128k these are 64 MB
DEFAULT_TEXT_CHARACTERS = 60_000  # about 15,000 tokens
DOCUMENT_SEPARATOR = "---"  # separator line between documents, which do not attend to each other

Window = list[int]


def default_text() -> str:
    """Return the text on which quality is measured by default: the language reference that Python installs."""
    from pydoc_data import topics

    return "\n".join(topics.topics[name] for name in sorted(topics.topics))[:DEFAULT_TEXT_CHARACTERS]


def read_text(file: Path) -> str:
    """Return the content of a text file. Raises `SettingsInvalid` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsInvalid(f"The text {file} cannot be read: {error}") from error


def read_windows(
    tokenizer: Tokenizer,
    text: Path | None,
    max_model_len: int,
    max_tokens: int | None = None,
    window_tokens: int | None = None,
) -> list[Window]:
    """Cut the text's documents into windows of token ids, each with the checkpoint's usual first token.

    `text` None: `default_text`. `window_tokens` None: `WINDOW_TOKENS`. Raises `SettingsInvalid` if there is nothing to
    read.
    """
    documents = _documents(default_text() if text is None else read_text(text))
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    chunk_tokens, left, windows = min(window_tokens or WINDOW_TOKENS, max_model_len) - len(begin), max_tokens, []
    for document in documents:
        ids = tokenizer.encode(document, add_special_tokens=False)[:left]
        chunks = [[*begin, *ids[start : start + chunk_tokens]] for start in range(0, len(ids), chunk_tokens)]
        windows += [chunk for chunk in chunks if len(chunk) > 1]
        left = None if left is None else left - len(ids)
        if left == 0:
            break
    if not windows:
        raise SettingsInvalid(f"The text {text} has fewer than two consecutive tokens.")
    return windows


def _documents(text: str) -> Iterator[str]:
    """Yield the parts between separator lines, without leading and trailing line breaks."""
    lines: list[str] = []
    for line in [*text.split("\n"), DOCUMENT_SEPARATOR]:
        if line.strip() != DOCUMENT_SEPARATOR:
            lines.append(line)
        elif document := "\n".join(lines).strip("\n"):
            yield document
            lines = []


def window_span(window: Window, start: int, end: int, samples: bool) -> ScheduledSpan:
    """Return the step that reads tokens [start, end) of a window in the only slot of a KV cache.

    `samples`: logits are computed.
    """
    request = Generate("reading", tuple(window), SamplingParams(max_tokens=1), arrived_at=0.0)
    return ScheduledSpan(
        make_sequence(request), start, end - start, slot=0, prefix_slot=None, prefix_tokens=0, samples=samples
    )


def window_logits(model: nn.Module, attention: StepAttention, window: Window, start: int, end: int) -> Tensor:
    """Return the logits [end - start, vocab] of a window's tokens; the tokens before `start` were computed before."""
    attend = attention.begin((window_span(window, start, end, samples=True),))
    tokens, positions = torch.tensor(window[start:end]), torch.arange(start, end)
    logits: Tensor = model(StepContext(tokens, positions, torch.arange(end - start), attend))
    return logits


class WindowScorer:
    """Runs one sequence at a time through a model and returns the logits of every token."""

    def __init__(self, model: nn.Module, config: ModelConfig, kv_dtype: torch.dtype, backend: HostBackend) -> None:
        self._model = model
        shape = KvShape(
            config.cache_layers, 1, min(WINDOW_TOKENS, config.max_model_len), config.cache_heads, config.head_dim
        )
        self._attention = StepAttention(KvCache(shape, kv_dtype), backend)

    def score(self, window: Window) -> tuple[float, Tensor]:
        """Return the loss in nats over all tokens after the first, and the likeliest token at each position."""
        nats, likeliest = 0.0, []
        for targets, logits in self.targets_and_logits(window):
            nats += float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
            likeliest.append(logits.argmax(-1))
        return nats, torch.cat(likeliest)

    def targets_and_logits(self, window: Window) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield consecutive target tokens [n] and the FP32 logits [n, vocab] that predict them."""
        for start in range(0, len(window) - 1, LOGITS_TOKENS):
            targets = torch.tensor(window[start + 1 : start + LOGITS_TOKENS + 1])
            yield targets, self._logits(window, start, start + len(targets)).float()

    def _logits(self, window: Window, start: int, end: int) -> Tensor:
        return window_logits(self._model, self._attention, window, start, end)
