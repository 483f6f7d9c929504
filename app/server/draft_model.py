"""The draft model of the settings: what it must be, and that its tokens are the model's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from app.errors import CheckpointInvalid, SettingsInvalid
from app.models.decoders.config import ModelConfig
from app.server.model_source import open_or_fetch_model
from app.settings import Settings
from app.weights.checkpoint import Checkpoint
from app.weights.open import OpenedModel

if TYPE_CHECKING:
    from app.text.tokenizer import Tokenizer

MAX_MISSING_TOKENS = 128  # ids that only one of the two vocabularies may have: unused ones, and some added ones


def planned_draft(settings: Settings, model: OpenedModel) -> Checkpoint | None:
    """Open the draft model of the settings, fetched before if needed; None if there is none.

    Raises `SettingsInvalid` if it cannot draft for the model, or `StartupError`.
    """
    if settings.draft_model is None:
        return None
    if model.needs().kind != "decoder":
        raise SettingsInvalid(f"draft_model: {model.name} does not generate text, so nothing can be drafted for it.")
    draft = open_or_fetch_model(settings, settings.draft_model.expanduser())
    if not isinstance(draft, Checkpoint) or not isinstance(draft.model_config, ModelConfig):
        raise SettingsInvalid(f"draft_model: {draft.name} does not generate text, and only a decoder can draft.")
    ours, size = model.needs().num_parameters, draft.needs().num_parameters
    if size > ours:
        raise SettingsInvalid(
            f"draft_model: {draft.name} has {size:,} parameters, more than {model.name} with {ours:,}: give a smaller model."
        )
    return draft


def check_vocabulary(tokenizer: Tokenizer, draft: Checkpoint, cache: Path | None = None) -> None:
    """Raise `CheckpointInvalid` with the first difference unless the draft model's tokens are the model's.

    Its tokenizer is tried first, and noted in the folder `cache` if it passes.
    """
    from app.text.tokenizer_check import try_and_load  # with numpy, which settings and plans do without

    other, missing = try_and_load(draft.location, cache), 0
    for token_id in range(max(tokenizer.vocab_size, other.vocab_size)):
        ours, its = tokenizer.token_text(token_id), other.token_text(token_id)
        if ours == its:
            continue
        missing += not ours or not its
        if (ours and its) or missing > MAX_MISSING_TOKENS:
            raise CheckpointInvalid(
                f"draft_model: {draft.name} has another vocabulary: its token {token_id} is {_shown(its)}, and the model's is "
                f"{_shown(ours)}; give a draft model of the same family."
            )


def _shown(token: str) -> str:
    return repr(token) if token else "missing"
