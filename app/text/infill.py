"""Prompts of fill-in-the-middle models: what comes before and after a gap, with the special tokens around them.

The format is prefix first: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", 2022. Qwen's
coders, StarCoder, CodeLlama, DeepSeek's coders and others differ only in the names of the tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from app.text.tokenizer import Tokenizer

# Names of the tokens before the prefix, before the suffix, and before the text that is generated.
_MARKERS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # Qwen, CodeGemma
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder, Granite
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),  # CodeLlama
    ("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),  # GLM
)
_FILE_MARKERS = ("<|file_sep|>", "<file_sep>", "<|file_separator|>")
# Tokens that end the middle, besides the checkpoint's end tokens.
_END_MARKERS = ("\u2581<EOT>", "<|fim_pad|>", "<fim_pad>", "<|repo_name|>", "<repo_name>", *_FILE_MARKERS)


@dataclass(frozen=True, slots=True)
class InfillPrompt:
    """The tokens of a prompt with a gap. `file_ids` come first: other files, as far as there is room for them."""

    prefix_ids: Sequence[int]
    suffix_ids: Sequence[int]
    file_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class InfillFormat:
    """The special tokens of a fill-in-the-middle model. `file_id`, if any, comes before another file's name."""

    prefix_id: int
    suffix_id: int
    middle_id: int
    file_id: int | None
    end_ids: tuple[int, ...]

    def file_ids(self, tokenizer: Tokenizer, name: str, text: str) -> list[int]:
        if self.file_id is None:
            return tokenizer.encode(f"\n\n--- {name} ---\n\n{text}", add_special_tokens=False)
        return [self.file_id, *tokenizer.encode(f"{name}\n{text}\n", add_special_tokens=False)]

    def prompt_ids(self, prompt: InfillPrompt, begin: Sequence[int] = ()) -> list[int]:
        """Return all tokens of a prompt; `begin` is put before the prefix."""
        return [
            *(*prompt.file_ids, *begin),
            *(self.prefix_id, *prompt.prefix_ids),
            *(self.suffix_id, *prompt.suffix_ids),
            self.middle_id,
        ]


def find_infill_format(tokenizer: Tokenizer) -> InfillFormat | None:
    """Return the format of a tokenizer; None if it has no fill-in-the-middle tokens."""
    for names in _MARKERS:
        ids = [token_id for name in names if (token_id := tokenizer.token_id(name)) is not None]
        if len(ids) == len(names):
            files = [token_id for name in _FILE_MARKERS if (token_id := tokenizer.token_id(name)) is not None]
            ends = [token_id for name in _END_MARKERS if (token_id := tokenizer.token_id(name)) is not None]
            return InfillFormat(ids[0], ids[1], ids[2], files[0] if files else None, tuple(ends))
    return None


def shorten_infill(prompt: InfillPrompt, room: int) -> InfillPrompt:
    """Return the part of a prompt that fits into `room` tokens: what is nearest to the gap.

    If it does not fit, the suffix may have a quarter of the room, or what the prefix leaves. Other files have the rest.
    """
    num_prefix, num_suffix = len(prompt.prefix_ids), len(prompt.suffix_ids)
    kept_suffix = min(num_suffix, max(room // 4, room - num_prefix))
    kept_prefix = min(num_prefix, room - kept_suffix)
    kept_files = min(len(prompt.file_ids), room - kept_suffix - kept_prefix)
    return InfillPrompt(
        prompt.prefix_ids[num_prefix - kept_prefix :],
        prompt.suffix_ids[:kept_suffix],
        prompt.file_ids[len(prompt.file_ids) - kept_files :],
    )
