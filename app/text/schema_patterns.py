"""Patterns of JSON schemas without look-ahead, which no grammar follows, and patterns of all texts but some.

A pattern that begins with look-aheads means all of several patterns. `(?!…)` is rewritten if it forbids a few texts,
whole or at the beginning, or characters anywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

MAX_COMPLEMENT_CHARACTERS = 20_000
MAX_DIGITS = 64  # of a Decimal whose digits before and after the point are limited together
_LOOK = ("(?=", "(?!")
_META = frozenset(r"\^$.|?*+()[]{}")
# A Decimal of Python's pydantic: no text of signs and points alone, and then its digits.
_DECIMAL = re.compile(r"\^\(\?!\^\[-\+\.\]\*\$\)\[\+-\]\?0\*(.*)", re.DOTALL)
_DIGITS_TOGETHER = re.compile(
    r"\(\?:\\d\{0,(\d+)\}\|\(\?=\[\\d\.\]\{1,(\d+)\}0\*\$\)\\d(?:\{0,(\d+)\}|\*)\\\.\\d(?:\{0,(\d+)\}|\*)0\*\$\)"
)
_DIGITS_AFTER_POINT = re.compile(r"\\d\*\\\.\?\\d\{0,(\d+)\}0\*\$")
_ONE_CHARACTER = re.compile(r"\[\^?(?:\\.|[^\[\]\\])+\]|\\[dwsDWS.\-/$+*?|()\[\]{}^\\]|[^\\^$.|?*+()\[\]{}]")


def patterns_without_look_ahead(pattern: str) -> list[str]:
    """Return patterns that all hold exactly where this one holds; itself if it cannot be rewritten."""
    decimal = _DECIMAL.fullmatch(pattern)
    if decimal is not None:
        return [_decimal(decimal.group(1)) or pattern]
    if not pattern.startswith("^") or _has_top_alternative(pattern):
        return [pattern]
    found, rest = [], pattern[1:]
    while rest.startswith(_LOOK):
        end = _group_end(rest)
        if end is None:
            return [pattern]
        inner = rest[3:end]
        one = f"^(?:{inner})" if rest.startswith("(?=") else _without(inner)
        if one is None or any(mark in one for mark in ("(?=", "(?!", "(?<")):
            return [pattern]
        found.append(one)
        rest = rest[end + 1 :]
    return [*found, f"^{rest}"] if found else [pattern]


def _decimal(digits: str) -> str | None:
    """Return a pattern of Decimals for the part of pydantic's pattern that counts their digits."""
    if digits == r"\d*\.?\d*$":
        return r"^[+-]?(?:\d+\.?\d*|\.\d+)$"
    if (found := _DIGITS_AFTER_POINT.fullmatch(digits)) is not None:
        most = int(found.group(1))
        return rf"^[+-]?(?:\d+(?:\.\d{{0,{most}}}0*)?|\.{_some_digits(most)})$"
    found = _DIGITS_TOGETHER.fullmatch(digits)
    if found is None:
        return None
    alone, with_point = int(found.group(1)), int(found.group(2))
    before, after = (with_point - 1 if group is None else int(group) for group in found.group(3, 4))
    if max(alone, with_point, before, after) > MAX_DIGITS:
        return None
    parts = [rf"\d{{1,{alone}}}" if alone else "0"]
    for count in range(min(before, with_point - 1) + 1):
        rest = min(after, with_point - 1 - count)
        parts.append(rf"\d{{{count}}}\.\d{{0,{rest}}}0*" if count else rf"\.{_some_digits(rest)}")
    return rf"^[+-]?0*(?:{'|'.join(parts)})$"


def _some_digits(most: int) -> str:
    """Return a pattern of at least one digit, of which the zeros at the end do not count."""
    return rf"(?:\d{{1,{most}}}0*)" if most else "0+"


def _without(inner: str) -> str | None:
    """Return a pattern of the texts that `^(?!inner)` allows, or None."""
    for anywhere in (".*", ".*?"):
        one = inner.removeprefix(anywhere)
        if one != inner and _ONE_CHARACTER.fullmatch(one):
            return f"^{_other_characters(one)}*$"
    whole: list[str] = []
    begun: list[str] = []
    for alternative in _alternatives(inner):
        text = _literal(alternative.removeprefix("^").removesuffix("$"))
        if text is None:
            return None
        (whole if alternative.endswith("$") else begun).append(text)
    return all_but(whole, begun)


def _other_characters(one: str) -> str:
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:]}" if one.startswith("[") else f"[^{one}]"


def _alternatives(pattern: str) -> list[str]:
    if pattern.startswith("(") and _group_end(pattern) == len(pattern) - 1:
        return _alternatives(pattern[1:-1].removeprefix("?:"))
    parts = _top_parts(pattern)
    if len(parts) == 1 and pattern.endswith(")$") and pattern.startswith("("):
        return [f"{one}$" for one in _alternatives(pattern[:-1])]
    return parts


def _literal(pattern: str) -> str | None:
    """Return the text that a pattern without operators matches, or None."""
    text, place = "", 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 1
            character = pattern[place : place + 1]
            if not character or character.isalnum():
                return None
        elif character in _META:
            return None
        text += character
        place += 1
    return text


def _group_end(pattern: str) -> int | None:
    """Return the place of the bracket that closes a pattern's first group."""
    for place, depth, _ in _walk(pattern):
        if depth == 0:
            return place
    return None


def _top_parts(pattern: str) -> list[str]:
    bars = [place for place, depth, character in _walk(pattern) if depth == 0 and character == "|"]
    return [pattern[start + 1 : stop] for start, stop in zip([-1, *bars], [*bars, len(pattern)], strict=True)]


def _has_top_alternative(pattern: str) -> bool:
    return len(_top_parts(pattern)) > 1


def _walk(pattern: str) -> Iterable[tuple[int, int, str]]:
    """Yield the place, the depth of groups after it, and each character outside of classes and escapes."""
    depth, place = 0, 0
    while place < len(pattern):
        character = pattern[place]
        if character == "\\":
            place += 2
            continue
        if character == "[":
            place = _class_end(pattern, place)
            continue
        depth += (character == "(") - (character == ")")
        yield place, depth, character
        place += 1


def _class_end(pattern: str, start: int) -> int:
    place = start + 1
    while place < len(pattern) and pattern[place] != "]":
        place += 2 if pattern[place] == "\\" else 1
    return place + 1


def all_but(whole: Iterable[str], begun: Iterable[str] = ()) -> str | None:
    """Return a pattern of all texts but those in `whole`, and those that begin with one of `begun`.

    None if it were too long.
    """
    tree: dict[str, Any] = {}
    for texts, mark in ((whole, "whole"), (begun, "begun")):
        for text in texts:
            node = tree
            for character in text:
                node = node.setdefault(character, {})
            node[mark] = {}
    pattern = _all_but(tree)
    return f"^(?:{pattern})$" if pattern is not None and len(pattern) <= MAX_COMPLEMENT_CHARACTERS else None


def _all_but(node: dict[str, Any]) -> str | None:
    if "begun" in node:
        return None
    following = {character: child for character, child in node.items() if len(character) == 1}
    parts = [] if "whole" in node else [""]
    parts.append(f"[^{''.join(map(_escaped, following))}](?s:.)*" if following else "(?s:.)+")
    for character, child in following.items():
        rest = _all_but(child)
        if rest is not None:
            parts.append(f"{_escaped(character)}(?:{rest})")
    return "|".join(parts)


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
