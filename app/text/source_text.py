"""The source text of a model with an encoder and a decoder: its task's prefix and its languages.

Terms are those of transformers: `source_lang` and `target_lang` are codes of the tokenizer (`eng_Latn`, `en_XX`, `en`), or
of a task in config.json's `task_specific_params` (`translation_en_to_de`), whose `prefix` begins the text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from app.errors import UnsupportedParameter
from app.messages import MAX_BEAMS
from app.text.tokenizer import Tokenizer

_LANGUAGE_TOKEN = re.compile(r"__([a-z]{2,3})__|([a-z]{2,3}_[A-Z][A-Za-z]{1,3})")  # M2M100's; mBART's and NLLB's
_TASK = re.compile(r"translation_(\w+)_to_(\w+)")
_MAX_NAMED = 8  # languages in a refusal


@dataclass(frozen=True)
class SourceText:
    """How source texts of one model are written. Sources and completions have limits of their own, in tokens."""

    tokenizer: Tokenizer
    max_source_len: int
    max_target_len: int
    tasks: Mapping[str, Mapping[str, Any]]

    @cached_property
    def _languages(self) -> Mapping[str, int]:
        """The tokens of languages by their codes."""
        found: dict[str, int] = {}
        for token_id, text in self.tokenizer.added_tokens.items():
            match = _LANGUAGE_TOKEN.fullmatch(text)
            if match is not None:
                found[match[1] or match[2]] = token_id
        return found

    def prefix(self, task: str | None, source_lang: str | None, target_lang: str | None) -> str:
        """Return what begins a text: the task's prefix, or the token that names the target language."""
        if source_lang and target_lang:
            task = f"translation_{source_lang}_to_{target_lang}"
        marker = f">>{target_lang}<<"
        if target_lang and task not in self.tasks and self.tokenizer.token_id(marker) is not None:
            return f"{marker} "
        return str(self.tasks.get(task or "", {}).get("prefix") or "")

    def with_language(self, ids: Sequence[int], source_lang: str | None) -> Sequence[int]:
        """Return the ids with the source language's token in place of the tokenizer's own."""
        token_id = None if source_lang is None else self._languages.get(source_lang)
        if token_id is None:
            return ids
        known = set(self._languages.values())
        return [token_id if one in known else one for one in ids]

    def forced_bos_token_id(self, target_lang: str | None) -> int | None:
        return None if target_lang is None else self._languages.get(target_lang)

    def check_languages(self, source_lang: str | None, target_lang: str | None) -> None:
        """Raise `UnsupportedParameter` for a language that neither the tokenizer nor a task has."""
        if source_lang and target_lang and f"translation_{source_lang}_to_{target_lang}" in self.tasks:
            return
        for field, code in (("target_lang", target_lang), ("source_lang", source_lang)):
            is_marked = field == "target_lang" and self.tokenizer.token_id(f">>{code}<<") is not None
            if code is not None and code not in self._languages and not is_marked:
                known = sorted(self._languages) or [name for name in self.tasks if _TASK.fullmatch(name)]
                more = ", …" if len(known) > _MAX_NAMED else ""
                listed = f"it has {', '.join(known[:_MAX_NAMED])}{more}" if known else "it has none to choose"
                raise UnsupportedParameter(
                    f"{field} {code[:40]!r} is no language of this model: {listed}.", field=field
                )


def generation_defaults(config: Mapping[str, Any], source: SourceText, max_beams: int) -> dict[str, Any]:
    """Return a generation_config.json's defaults of requests, besides its sampling parameters.

    As in `generate`, the likeliest text is the default, unless the file asks for sampling; `max_length` and `min_length`
    count the token that starts the decoder.
    """
    found: dict[str, Any] = {} if config.get("do_sample") is True else {"temperature": 0.0}
    longest = source.max_target_len - 1
    found["max_tokens"] = min(longest, _number(config, "max_new_tokens") or _number(config, "max_length", 513) - 1)
    least = _number(config, "min_new_tokens") or _number(config, "min_length") - 1
    if least > 0:
        found["min_tokens"] = min(least, found["max_tokens"])
    beams = min(_number(config, "num_beams", 1), MAX_BEAMS, max_beams)
    if beams > 1:
        found["beam_width"] = beams
        if isinstance(config.get("length_penalty"), int | float):
            found["length_penalty"] = float(config["length_penalty"])
        if config.get("early_stopping") in (True, "never"):
            found["early_stopping"] = config["early_stopping"]
    return found


def _number(config: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = config.get(name)
    return value if isinstance(value, int) and value > 0 else default
