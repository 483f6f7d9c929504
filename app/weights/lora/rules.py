"""What peft's configuration says about single modules: which have an adapter, of which rank, and with which scale."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from app.errors import CheckpointInvalid
from app.weights.lora.name_pattern import NamePattern, Steps, UnsupportedPattern

_MAX_SHOWN = 80  # characters of a pattern or value from the adapter in a message
_MAX_ALPHA, _MAX_RANK = 1e6, 2**20
_LAYER_NUMBER = re.compile(r"\.(\d{1,9})\.")


class AdapterRules:
    """The rules of one adapter, by the names of modules in the model that was trained.

    Names are compared as peft 0.21 does (`check_target_module_exists` and `get_pattern_key`).
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        """Parse all patterns.

        Args:
            where: The file, for messages.
            values: The content of adapter_config.json.

        Raises:
            CheckpointInvalid: A value is wrong or not supported.
        """
        self._where, self._values, self._steps = where, values, Steps()
        self._alphas = self._numbers("lora_alpha", "alpha_pattern", _MAX_ALPHA)
        self._ranks = self._numbers("r", "rank_pattern", _MAX_RANK)
        targets = values.get("target_modules")
        all_linear = isinstance(targets, str) and targets.lower() == "all-linear"
        # Without a list, peft has one for each kind of model, which the matrices in the file show.
        self._targets = None if targets is None or all_linear else self._names("target_modules")
        self._excluded = self._names("exclude_modules") if values.get("exclude_modules") else lambda name: False
        self._layers = self._layer_numbers() if isinstance(targets, list) else None
        pattern = values.get("layers_pattern") or []
        lists = [pattern] if isinstance(pattern, str) else pattern
        if not isinstance(lists, list) or not all(isinstance(one, str) for one in lists):
            raise CheckpointInvalid(f"{where}: layers_pattern must be a name or a list of names.")
        self._lists = [self._pattern("layers_pattern", one) for one in lists]

    def check_adapted(self, module: str, rank: int) -> None:
        """Check that peft would give a module the adapter of the file, with this rank.

        Raises:
            CheckpointInvalid: It would not.
        """
        if not self._is_adapted(module):
            raise CheckpointInvalid(
                f"{self._where}: the file has matrices of {module[:_MAX_SHOWN]}, which target_modules, exclude_modules and"
                " layers_to_transform leave out, so that peft would ignore them."
            )
        said = self._of(self._ranks, "rank_pattern", module)
        if said is not None and said != rank:
            raise CheckpointInvalid(
                f"{self._where}: r or rank_pattern gives {module[:_MAX_SHOWN]} the rank {said:g}, and its matrices have {rank}."
            )

    def scale(self, module: str, rank: int) -> float:
        """Return alpha / rank, or with rsLoRA alpha / sqrt(rank)."""
        alpha = self._of(self._alphas, "alpha_pattern", module)
        if alpha is None:
            raise CheckpointInvalid(f"{self._where}: lora_alpha must be a number, not None.")
        return alpha / (math.sqrt(rank) if self._values.get("use_rslora") is True else rank)

    def _is_adapted(self, module: str) -> bool:
        if self._excluded(module):
            return False
        if self._targets is not None and not self._targets(module):
            return False
        return self._layers is None or self._layer_of(module) in self._layers

    def _layer_of(self, module: str) -> int | None:
        """Return the number of a module's layer: the first one, or the first that follows a name of `layers_pattern`."""
        numbers = [(module[: found.start()], int(found[1])) for found in _LAYER_NUMBER.finditer(module)]
        if not self._lists:
            return next((number for before, number in numbers if "." in before), None)
        for one in self._lists:
            for before, number in numbers:
                if self._guard("layers_pattern", one, one.matches_end, before):
                    return number
        return None

    def _layer_numbers(self) -> frozenset[int] | None:
        numbers = self._values.get("layers_to_transform")
        listed = [numbers] if isinstance(numbers, int) else numbers or []
        if not isinstance(listed, list) or not all(type(one) is int for one in listed):
            raise CheckpointInvalid(f"{self._where}: layers_to_transform must be a number or a list of numbers.")
        return frozenset(listed) or None

    def _names(self, key: str) -> Callable[[str], bool]:
        """Return what decides whether a name is in a list of names and ends of names, or matches an expression."""
        value = self._values[key]
        if isinstance(value, str):
            pattern = self._pattern(key, value)
            return lambda name: self._guard(key, pattern, pattern.matches, name)
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise CheckpointInvalid(f"{self._where}: {key} must be an expression or a list of names.")
        ends = tuple(f".{one}" for one in value)
        return lambda name: name in value or name.endswith(ends)

    def _numbers(self, key: str, patterns: str, most: float) -> list[tuple[NamePattern | None, float | None]]:
        """Return numbers by the pattern of the modules that have them; the last one, without a pattern, is for the others."""
        single = self._values.get(patterns) or {}
        if not isinstance(single, dict):
            raise CheckpointInvalid(f"{self._where}: {patterns} must map names of layers to numbers.")
        found: list[tuple[NamePattern | None, float | None]] = []
        for pattern, number in (*single.items(), (None, self._values.get(key))):
            name = key if pattern is None else f"{patterns} of {pattern[:_MAX_SHOWN]!r}"
            is_number = isinstance(number, int | float) and not isinstance(number, bool)
            if not (is_number and abs(number) <= most) and not (pattern is None and number is None):
                raise CheckpointInvalid(f"{self._where}: {name} must be a number, not {str(number)[:_MAX_SHOWN]}.")
            found.append((None if pattern is None else self._pattern(patterns, pattern), number))
        return found

    def _of(self, numbers: list[tuple[NamePattern | None, float | None]], key: str, module: str) -> float | None:
        """Return the number of the first pattern that a module's name ends with."""
        for pattern, number in numbers:
            if pattern is None or self._guard(key, pattern, pattern.matches_end, module):
                return number
        return None

    def _pattern(self, key: str, text: str) -> NamePattern:
        try:
            return NamePattern(text, self._steps)
        except UnsupportedPattern as error:
            raise self._unsupported(key, text, error) from error

    def _guard(self, key: str, pattern: NamePattern, matches: Callable[[str], bool], name: str) -> bool:
        try:
            return matches(name)
        except UnsupportedPattern as error:
            raise self._unsupported(key, pattern.text, error) from error

    def _unsupported(self, key: str, text: str, error: UnsupportedPattern) -> CheckpointInvalid:
        return CheckpointInvalid(f"{self._where}: {key} has {text[:_MAX_SHOWN]!r}, which {error}.")
