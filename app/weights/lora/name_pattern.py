"""Regular expressions over the names of a model's modules, as peft's configuration has them.

They come with an untrusted adapter, and Python's `re` can take exponential time for one. Here a name is matched by sets of
positions, in a bounded number of steps. RE2 (google-re2) is bounded too, but has no look-ahead, with which LLaMA-Factory
writes its patterns (`^(?!.*visual).*proj`). The syntax is that of `re` without groups that are referred to, look-behind and
flags: whether a name matches does not depend on the order in which `re` tries alternatives.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_PLAIN = re.compile(r"[\w.^-]*")  # without repetitions and alternatives, `re` takes linear time
_MAX_DEPTH, _MAX_CHARACTERS = 32, 4096
_CLASSES: dict[str, Callable[[str], bool]] = {
    "d": str.isdecimal,
    "w": lambda one: one.isalnum() or one == "_",
    "s": str.isspace,
}


class UnsupportedPattern(Exception):
    """A pattern is no regular expression, has unsupported syntax, or takes too many steps; the text says which."""


@dataclass(slots=True)
class Steps:
    """How many steps all patterns of one adapter may still take."""

    left: int = 2_000_000

    def take(self) -> None:
        """Count one step.

        Raises:
            UnsupportedPattern: There were too many.
        """
        self.left -= 1
        if self.left < 0:
            raise UnsupportedPattern("takes too many steps")


class NamePattern:
    """A pattern that names are compared with."""

    def __init__(self, pattern: str, steps: Steps) -> None:
        """Parse the pattern.

        Raises:
            UnsupportedPattern: It is not supported.
        """
        self.text, self._steps = pattern, steps
        self._plain = re.compile(pattern) if _PLAIN.fullmatch(pattern) else None
        self._node = _Parser(pattern).parse() if self._plain is None else None

    def matches(self, name: str) -> bool:
        """Return True if the whole name matches."""
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

    One of: a character that `accepts`, a place where `holds`, `sequence`, `choice`, or `repeated` from `low` to `high` times
    (None: without end). `ahead` True or False: only whether `repeated` matches or not.
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
    """Return what an escaped character stands for."""
    if one.lower() in _CLASSES:
        known = _CLASSES[one.lower()]
        return known if one.islower() else lambda other: not known(other)
    if one.isalnum():
        raise UnsupportedPattern(f"has \\{one}, which is not supported")
    return lambda other: other == one


def _is_border(name: str, at: int) -> bool:
    """Return True where a word begins or ends."""
    is_word = _CLASSES["w"]
    return (at > 0 and is_word(name[at - 1])) is not (at < len(name) and is_word(name[at]))
