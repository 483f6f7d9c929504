"""Rules of a generation_config.json about which tokens may follow, as the library's own logits processors apply them.

Among them are forced first and last tokens, tokens and words that are never sampled, and repeated n-grams.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from app.engine.scheduler.batch import LogitRow, Sequence

# Of a request, which takes the file's values as its defaults.
_OF_REQUESTS: dict[str, Any] = {
    "repetition_penalty": None, "min_length": None, "min_new_tokens": None, "do_sample": False, "guidance_scale": None,
    "watermarking_config": None,
}  # fmt: skip


class TokenRules:
    """The rules of one model. A row's rules see the tokens of its decoder, and its source if there is an encoder."""

    def __init__(self, model: PreTrainedModel, eos_token_ids: Collection[int]) -> None:
        self._model = model
        self._config = deepcopy(model.generation_config)
        for name, value in _OF_REQUESTS.items():
            setattr(self._config, name, value)
        self._config._eos_token_tensor = torch.tensor(sorted(eos_token_ids)) if eos_token_ids else None
        self._own: dict[tuple[str, int], LogitsProcessorList] = {}
        probe = deepcopy(self._config)
        probe.max_length = 2
        self.any = bool(model.config.is_encoder_decoder) or bool(
            model._get_logits_processor(probe, 1, torch.zeros((1, 1), dtype=torch.int64))
        )

    def apply(self, logits: Tensor, rows: Items[LogitRow]) -> Tensor:
        """Return the scores [rows, vocab] of the rows' logits: of beams, log-probabilities."""
        if not self.any:
            return logits
        known, self._own = self._own, {}
        scores = logits.to(torch.float32, copy=True)
        for place, row in enumerate(rows):
            sequence = row.sequence
            key = sequence.request_id, sequence.max_length
            rules = known.get(key) or self._own.get(key) or self._rules_of(sequence)
            self._own[key] = rules
            own = scores[place : place + 1]
            if sequence.is_beam:
                own = torch.log_softmax(own, -1)
            scores[place] = rules(torch.tensor([sequence.token_ids[sequence.num_source_tokens :]]), own)[0]
        return scores

    def _rules_of(self, sequence: Sequence) -> LogitsProcessorList:
        config, start = deepcopy(self._config), sequence.num_source_tokens
        config.max_length = sequence.max_length - start
        if sequence.params.forced_bos_token_id is not None:
            config.forced_bos_token_id = sequence.params.forced_bos_token_id
        source = torch.tensor([sequence.token_ids[:start]]) if start else None
        rules: LogitsProcessorList = self._model._get_logits_processor(
            config, sequence.num_prompt_tokens - start, source
        )
        return rules
