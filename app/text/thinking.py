"""Variables of chat templates that decide whether and how much a model thinks, under each template's own names.

Requests name them `enable_thinking` or `thinking`, `reasoning_effort` and `thinking_budget`. Trial renderings at load show
which variable a template reads: its text changes with it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Variables that switch thinking on and off, with their values for both.
_SWITCHES: tuple[tuple[str, Any, Any], ...] = (
    ("enable_thinking", True, False),
    ("thinking", True, False),
    ("reasoning", True, False),
    ("thinking_mode", "enabled", "disabled"),
    ("thinking_option", "on", "off"),
    ("thinking_budget", -1, 0),
)
_EFFORTS = ("reasoning_effort", "thinking_effort", "reasoning_strength")
# Efforts in order, with the names that templates have for none.
_LEVELS = ("none", "no_think", "minimal", "low", "medium", "high", "xhigh", "max")
_OFF = ("none", "no_think")
THINK, NO_THINK = "/think", "/no_think"

Trial = Callable[..., str | None]


@dataclass(frozen=True, slots=True)
class ThinkingVariables:
    """What a template reads about thinking.

    - `switch`: the variable that switches it, and its values for on and off.
    - `effort`, `efforts`: the variable of the effort, and the known values that the template accepts.
    - `by_word`: the template looks for `/think` and `/no_think` in the system message instead.
    """

    switch: tuple[str, Any, Any] | None = None
    effort: str = ""
    efforts: tuple[str, ...] = ()
    by_word: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the variables, and of the word, that have an effect."""
        switch = () if self.switch is None else (self.switch[0],)
        return (*switch, *((self.effort,) if self.effort else ()), *((NO_THINK,) if self.by_word else ()))

    def arguments(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return a request's variables and those of the template that mean the same. A name that is given stays."""
        found, effort, wanted = dict(given), given.get("reasoning_effort"), self.wanted(given)
        if self.switch is not None and wanted is not None and self.switch[0] not in given:
            found[self.switch[0]] = self.switch[1] if wanted else self.switch[2]
        if wanted is False and effort is None and self.switch is None:
            effort = "none"
        if isinstance(effort, str) and self.effort and (self.effort == "reasoning_effort" or self.effort not in given):
            level = self._accepted(effort)
            found.pop("reasoning_effort", None)
            if level is not None:
                found[self.effort] = level
        elif effort == "none":
            found.pop("reasoning_effort", None)
        return found

    @staticmethod
    def wanted(given: Mapping[str, Any]) -> bool | None:
        """Return whether a request wants thinking; None if it does not say."""
        for name in ("enable_thinking", "thinking"):
            if isinstance(given.get(name), bool):
                return bool(given[name])
        effort = given.get("reasoning_effort")
        return None if not isinstance(effort, str) else effort not in _OFF

    def _accepted(self, effort: str) -> str | None:
        """Return the accepted effort that is nearest, rather more than less; None for none where that is no effort."""
        if effort in _OFF:
            return next((level for level in _OFF if level in self.efforts), None)
        if effort in self.efforts or effort not in _LEVELS:
            return effort
        place = _LEVELS.index(effort)
        known = [_LEVELS.index(level) for level in self.efforts if level not in _OFF]
        nearest = min(known, key=lambda one: (abs(one - place), -one), default=None)
        return effort if nearest is None else _LEVELS[nearest]


def find_thinking(written: Trial) -> ThinkingVariables:
    """Return what a template reads. `written` returns the text of messages with variables, or None if it is refused."""
    user = [{"role": "user", "content": "trial"}]
    switch = next((each for each in _SWITCHES if _differ(written, user, each[0], each[1:])), None)
    on = {} if switch is None else {switch[0]: switch[1]}
    effort = next((name for name in _EFFORTS if _differ(written, user, name, _LEVELS, on)), "")
    texts = {level: written(user, **on, **{effort: level}) for level in _LEVELS} if effort else {}
    efforts = tuple(level for level, text in texts.items() if text is not None)
    if not _says_off(texts):
        efforts = tuple(level for level in efforts if level not in _OFF)
    return ThinkingVariables(switch, effort, efforts, switch is None and not effort and _reads_word(written))


def _differ(
    written: Trial, messages: Sequence[Any], name: str, values: Sequence[Any], fixed: Mapping[str, Any] | None = None
) -> bool:
    """Return True if the text, where it is not refused, depends on a variable."""
    texts = {text for value in values if (text := written(messages, **(fixed or {}), **{name: value})) is not None}
    return len(texts) > 1


def _says_off(texts: Mapping[str, str | None]) -> bool:
    """Return True if a template that is told `none` or `no_think` writes what it writes for no other word."""
    shapes = {level: text.replace(level, "") for level, text in texts.items() if text is not None}
    others = {shape for level, shape in shapes.items() if level not in _OFF}
    return any(shapes.get(level, next(iter(others), "")) not in others for level in _OFF)


def _reads_word(written: Trial) -> bool:
    texts = []
    for word in (THINK, NO_THINK):
        text = written([{"role": "system", "content": f"trial {word}"}, {"role": "user", "content": "trial"}])
        texts.append(None if text is None else text.replace(word, ""))
    return None not in texts and texts[0] != texts[1]
