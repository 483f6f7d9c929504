"""Reading texts for tasks: the tokenizer of the checkpoint, and the longest text of the model."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase
from transformers.tokenization_utils_base import VERY_LARGE_INTEGER

from app.engine.transformers.tasks import Item
from app.errors import ContextLengthExceeded

_CHARACTERS_PER_TOKEN = 64  # a text with more is refused before it is tokenized
_MAX_CHARACTERS = 2**20  # of a text that is read in windows


class TextReader:
    """The tokenizer, which cuts texts only where a request asks for it, and the model's longest text."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_model_len: int) -> None:
        self.tokenizer, self.max_model_len = tokenizer, max_model_len

    def prepare(self, text: str, field: str = "inputs", *, cuts: bool = False, windows: bool = False) -> None:
        """Set how texts are cut, and refuse one that is certainly too long."""
        self.tokenizer.model_max_length = self.max_model_len if cuts or windows else VERY_LARGE_INTEGER
        most = _MAX_CHARACTERS if cuts or windows else _CHARACTERS_PER_TOKEN * (self.max_model_len + 16)
        if len(text) > most:
            raise ContextLengthExceeded(f"{field} has {len(text)} characters, and may have at most {most}.", field)

    def check_length(self, item: Item, field: str = "inputs") -> None:
        number = item["input_ids"].shape[1]
        if number > self.max_model_len:
            raise ContextLengthExceeded(
                f"{field} has {number} tokens, but this model reads at most {self.max_model_len}.", field
            )
