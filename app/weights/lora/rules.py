"""What peft's configuration says about single modules: which have an adapter, of which rank, and with which scale.

Regular expressions come with an untrusted adapter, and Python's `re` can take exponential time for one, so
`NamePattern` matches them by sets of states. RE2 has no look-ahead, with which LLaMA-Factory writes its patterns
(`^(?!.*visual).*proj`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid

_PLAIN = re.compile(r"[\w.^-]*")  # without repetitions and alternatives, `re` takes linear time
_MAX_DEPTH, _MAX_CHARACTERS = 32, 4096
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda one: one.isalnum() or one == "_",
    "s": str.isspace,
}
_MAX_SHOWN = 80  # characters of a pattern or value from the adapter in a message
_MAX_ALPHA, _MAX_RANK = 1e6, 2**20
_LAYER_NUMBER = re.compile(r"\.(\d{1,9})\.")


class UnsupportedPattern(Exception):
    """A pattern is no regular expression, has unsupported syntax, or takes too many steps; the text says which."""


@dataclass(slots=True)
class Steps:
    """How many steps all patterns of one adapter may still take."""

    left: int = 2_000_000

    def take(self) -> None:
        """Count one step. Raises `UnsupportedPattern` if there were too many."""
        self.left -= 1
        if self.left < 0:
            raise UnsupportedPattern("takes too many steps")


class NamePattern:
    def __init__(self, pattern: str, steps: Steps) -> None:
        """Parse the pattern. Raises `UnsupportedPattern`."""
        self.text, self._steps = pattern, steps
        self._plain = re.compile(pattern) if _PLAIN.fullmatch(pattern) else None
        self._node = _Parser(pattern).parse() if self._plain is None else None

    def matches(self, name: str) -> bool:
        if self._node is None:
            return self._plain is not None and self._plain.fullmatch(name) is not None
        return len(name) in _Matching(name, self._steps).ends(self._node, 0)

    def matches_end(self, name: str) -> bool:
        """Return True if the whole name matches, or what follows one of its dots, as in peft's `rank_pattern`."""
        starts = [0, *(place + 1 for place, one in enumerate(name) if one == ".")]
        if self._node is None:
            return self._plain is not None and any(self._plain.fullmatch(name, start) for start in starts)
        matching = _Matching(name, self._steps)
        return any(len(name) in matching.ends(self._node, start) for start in starts)


@dataclass(frozen=True, eq=False, slots=True)
class _Node:
    """A part of a pattern: the ends that it can have from a position.

    One of: a character that `accepts`, a place where `holds`, `sequence`, `choice`, or `repeated` from `low` to `high`
    times (None: without end). `ahead`: only whether `repeated` matches or not.
    """

    accepts: Callable[[str], bool] | None = None
    holds: Callable[[str, int], bool] | None = None
    sequence: tuple[_Node, ...] | None = None
    choice: tuple[_Node, ...] = ()
    repeated: _Node | None = None
    low: int = 0
    high: int | None = None
    ahead: bool | None = None


class _Matching:
    """The ends of every part of a pattern from every position of one name, each computed once."""

    def __init__(self, name: str, steps: Steps) -> None:
        self._name, self._steps = name, steps
        self._found: dict[tuple[_Node, int], frozenset[int]] = {}

    def ends(self, node: _Node, at: int) -> frozenset[int]:
        known = self._found.get((node, at))
        if known is None:
            self._steps.take()
            known = self._found[node, at] = frozenset(self._compute(node, at))
        return known

    def _compute(self, node: _Node, at: int) -> set[int]:
        name = self._name
        if node.accepts is not None:
            return {at + 1} if at < len(name) and node.accepts(name[at]) else set()
        if node.holds is not None:
            return {at} if node.holds(name, at) else set()
        if node.sequence is not None:
            places = {at}
            for part in node.sequence:
                places = self._from_all(part, places)
            return places
        if node.repeated is None:
            return set().union(*(self.ends(part, at) for part in node.choice))
        if node.ahead is not None:
            return {at} if bool(self.ends(node.repeated, at)) is node.ahead else set()
        return self._repeat(node, node.repeated, at)

    def _repeat(self, node: _Node, part: _Node, at: int) -> set[int]:
        found: set[int] = set()
        places, count = {at}, 0
        while places:
            if count >= node.low:
                places = places - found
                found |= places
            if count == node.high:
                break
            self._steps.take()
            places, count = self._from_all(part, places), count + 1
        return found

    def _from_all(self, part: _Node, places: set[int]) -> set[int]:
        return set().union(*(self.ends(part, place) for place in places))


class _Parser:
    """Reads a pattern from left to right."""

    def __init__(self, pattern: str) -> None:
        if len(pattern) > _MAX_CHARACTERS:
            raise UnsupportedPattern(f"has more than {_MAX_CHARACTERS} characters")
        self._text, self._at, self._depth = pattern, 0, 0

    def parse(self) -> _Node:
        node = self._choice()
        if self._at < len(self._text):
            raise UnsupportedPattern("has an unbalanced parenthesis")
        return node

    def _choice(self) -> _Node:
        self._depth += 1
        if self._depth > _MAX_DEPTH:
            raise UnsupportedPattern(f"has parentheses more than {_MAX_DEPTH} deep")
        parts = [self._sequence()]
        while self._take("|"):
            parts.append(self._sequence())
        self._depth -= 1
        return parts[0] if len(parts) == 1 else _Node(choice=tuple(parts))

    def _sequence(self) -> _Node:
        parts: list[_Node] = []
        while self._at < len(self._text) and self._text[self._at] not in "|)":
            parts.append(self._repetition(self._atom()))
        return _Node(sequence=tuple(parts))

    def _repetition(self, node: _Node) -> _Node:
        found = re.compile(r"[*+?]|\{(\d{1,3})?(,(\d{1,3})?)?\}").match(self._text, self._at)
        if found is None or found.group() in ("{}", "{,}"):
            return node
        self._at = found.end()
        low, high = {"*": (0, None), "+": (1, None), "?": (0, 1)}.get(found.group(), (int(found[1] or 0), None))
        if found.group()[0] == "{":
            high = low if found[2] is None else None if found[3] is None else int(found[3])
        self._take("?")  # lazy repetitions match the same names
        if self._at < len(self._text) and self._text[self._at] in "*+?":
            raise UnsupportedPattern("has a possessive or repeated repetition")
        if high is not None and high < low:
            raise UnsupportedPattern("repeats a part fewer times at most than at least")
        return _Node(repeated=node, low=low, high=high)

    def _atom(self) -> _Node:
        one = self._next()
        if one == "(":
            return self._group()
        if one == "[":
            return _Node(accepts=self._set())
        if one == "\\":
            return self._escaped()
        if one == ".":
            return _Node(accepts=lambda other: other != "\n")
        if one == "^":
            return _Node(holds=lambda name, at: at == 0)
        if one == "$":
            return _Node(holds=lambda name, at: at == len(name))
        if one in "*+?":
            raise UnsupportedPattern("repeats nothing")
        return _Node(accepts=lambda other: other == one)

    def _group(self) -> _Node:
        ahead = None
        if self._take("?"):
            kind = self._next()
            if kind in "=!":
                ahead = kind == "="
            elif kind != ":":
                raise UnsupportedPattern(f"has (?{kind}, which is not supported")
        node = self._choice()
        if not self._take(")"):
            raise UnsupportedPattern("has an unbalanced parenthesis")
        return node if ahead is None else _Node(repeated=node, ahead=ahead)

    def _escaped(self) -> _Node:
        one = self._next()
        if one == "b":
            return _Node(holds=_is_border)
        if one in "AZ":
            return _Node(holds=lambda name, at: at == (0 if one == "A" else len(name)))
        return _Node(accepts=_class_of(one))

    def _set(self) -> Callable[[str], bool]:
        negated, parts, first = self._take("^"), list[Callable[[str], bool]](), True
        while first or not self._take("]"):
            first = False
            start = self._next()
            if start == "\\":
                start = self._next()
                if start.isalnum():
                    parts.append(_class_of(start))
                    continue
            if self._text[self._at : self._at + 1] == "-" and self._text[self._at + 1 : self._at + 2] not in ("]", ""):
                self._at += 1
                stop = self._next()
                stop = self._next() if stop == "\\" else stop
                parts.append(lambda one, start=start, stop=stop: start <= one <= stop)  # type: ignore[misc]
            else:
                parts.append(lambda one, start=start: one == start)  # type: ignore[misc]
        return lambda one: any(part(one) for part in parts) is not negated

    def _next(self) -> str:
        if self._at >= len(self._text):
            raise UnsupportedPattern("ends too early")
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, one: str) -> bool:
        found = self._text.startswith(one, self._at)
        self._at += found
        return found


def _class_of(one: str) -> Callable[[str], bool]:
    if one.lower() in _CLASSES:
        known = _CLASSES[one.lower()]
        return known if one.islower() else lambda other: not known(other)
    if one.isalnum():
        raise UnsupportedPattern(f"has \\{one}, which is not supported")
    return lambda other: other == one


def _is_border(name: str, at: int) -> bool:
    is_word = _CLASSES["w"]
    return (at > 0 and is_word(name[at - 1])) is not (at < len(name) and is_word(name[at]))


class AdapterRules:
    """The rules of one adapter, by the names of modules in the model that was trained.

    Names are compared as peft 0.21 does (`check_target_module_exists` and `get_pattern_key`).
    """

    def __init__(self, where: str, values: Mapping[str, Any]) -> None:
        """Parse all patterns of adapter_config.json. Raises `CheckpointInvalid`; `where` is for messages."""
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
        """Raise `CheckpointInvalid` unless peft would give a module the file's adapter, with this rank."""
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
