"""GBNF, the grammars of llama.cpp, as grammars of the library.

The library reads a text in the longest tokens of a grammar, as compilers do, and llama.cpp one character at a time. In
`root ::= w "ab"` with `w ::= [a-z]+` the longest `w` leaves no "ab". So each character is a token of the grammar here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

MAX_REPETITIONS = 2000  # of one item, as in llama.cpp
_HEAD = re.compile(r"(?m)^[ \t]*+[\w-]++[ \t]*+::=")
_SPACE, _SPACE_AND_LINES = re.compile(r"(?:[ \t]++|#[^\r\n]*+)*+"), re.compile(r"(?:[ \t\r\n]++|#[^\r\n]*+)*+")
_NAME = re.compile(r"[A-Za-z0-9_-]++")
_NUMBER = re.compile(r"[0-9]{1,9}+")
_LINE_END = re.compile(r"\r\n?|\n")
_PLAIN_ESCAPES = {"t": "\t", "r": "\r", "n": "\n", "\\": "\\", '"': '"', "[": "[", "]": "]", "-": "-"}
_HEX_ESCAPES = {"x": 2, "u": 4, "U": 8}
_HEX = re.compile(r"[0-9a-fA-F]+")
_ANY = "(?s:.)"


class GbnfError(ValueError):
    """A grammar that cannot be read; the message says where."""


def is_gbnf(text: str) -> bool:
    """Return True if a grammar has a rule `name ::=`."""
    return _HEAD.search(text) is not None


def gbnf_to_lark(text: str) -> str:
    """Return a GBNF grammar in the library's Lark syntax.

    Raises `GbnfError` if it is not valid, or has something that only llama.cpp knows: tokens as `<…>`.
    """
    return _Reader(text).grammar()


@dataclass(slots=True)
class _Reader:
    text: str
    place: int = 0
    rules: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of the library's rules, by the names in GBNF
    terminals: dict[str, str] = field(default_factory=dict)  # their names, by their regular expressions
    wanted: dict[str, int] = field(default_factory=dict)  # where a rule is used

    def grammar(self) -> str:
        self._skip(_SPACE_AND_LINES)
        while self.place < len(self.text):
            self._rule()
            self._skip(_SPACE_AND_LINES)
        if "root" not in self.rules:
            raise GbnfError("No 'root' rule found")
        for name, place in self.wanted.items():
            if name not in self.rules:
                self.place = place
                raise self._error(f"Rule '{name}' not found")
        lines = ["%llguidance {}", f"start: {self.names['root']}"]
        lines += [f"{self.names[name]}: {body}" for name, body in self.rules.items()]
        lines += [f"{name}: /{expression}/" for expression, name in self.terminals.items()]
        return "\n".join(lines) + "\n"

    def _rule(self) -> None:
        name = self._take(_NAME, "the name of a rule")
        self._skip(_SPACE)
        self._demand("::=")
        self._skip(_SPACE_AND_LINES)
        self._rule_name(name)
        self.rules[name] = self._alternatives(is_nested=False)
        if self.place < len(self.text):
            self._take(_LINE_END, "the end of the line")

    def _rule_name(self, name: str) -> str:
        return self.names.setdefault(name, f"r{len(self.names)}")

    def _alternatives(self, is_nested: bool) -> str:
        found = [self._sequence(is_nested)]
        while self._next() == "|":
            self.place += 1
            self._skip(_SPACE_AND_LINES)
            found.append(self._sequence(is_nested))
        return " | ".join(found)

    def _sequence(self, is_nested: bool) -> str:
        items: list[str] = []
        space = _SPACE_AND_LINES if is_nested else _SPACE
        while True:
            character = self._next()
            if character == '"':
                items.append(self._literal())
            elif character == "[":
                items.append(self._terminal(self._class()))
            elif character == "(":
                self.place += 1
                self._skip(_SPACE_AND_LINES)
                items.append(f"({self._alternatives(is_nested=True)})")
                self._demand(")")
            elif character == ".":
                self.place += 1
                items.append(self._terminal(_ANY))
            elif character in ("*", "+", "?", "{"):
                if not items or items[-1] == '""':
                    raise self._error(f"Expected an item before {character}")
                items[-1] = self._repeated(items[-1])
            elif _NAME.match(self.text, self.place):
                self.wanted.setdefault(name := self._take(_NAME, "a name"), self.place)
                items.append(self._rule_name(name))
            elif character == "<" or self.text.startswith("!<", self.place):
                raise self._error("Expected characters or rules; tokens (<…>) are not known here")
            else:
                return " ".join(items) or '""'
            self._skip(space)

    def _repeated(self, item: str) -> str:
        sign = self._next()
        self.place += 1
        if sign != "{":
            return f"({item}){sign}"
        self._skip(_SPACE_AND_LINES)
        least = most = int(self._take(_NUMBER, "a number"))
        self._skip(_SPACE_AND_LINES)
        if self._next() == ",":
            self.place += 1
            self._skip(_SPACE_AND_LINES)
            most = -1 if self._next() == "}" else int(self._take(_NUMBER, "a number"))
            self._skip(_SPACE_AND_LINES)
        self._demand("}")
        if max(least, most) > MAX_REPETITIONS or 0 <= most < least:
            raise self._error(f"Expected numbers up to {MAX_REPETITIONS}, the lower one first")
        if most == 0:
            return '""'
        return f"({item}){{{least},{most if most > 0 else ''}}}"

    def _literal(self) -> str:
        self.place += 1
        found = []
        while self._next() != '"':
            found.append(self._terminal(_one(self._character())))
        self.place += 1
        return f"({' '.join(found)})" if len(found) > 1 else found[0] if found else '""'

    def _class(self) -> str:
        """Return a regular expression of a class such as `[^a-z]`."""
        self.place += 1
        negated = self._next() == "^"
        self.place += negated
        found = ""
        while self._next() != "]":
            low = high = self._character()
            if self._next() == "-" and not self.text.startswith("-]", self.place):
                self.place += 1
                high = self._character()
            if high < low:
                raise self._error("Expected a range whose first character is the lower one")
            found += _code(low) if high == low else f"{_code(low)}-{_code(high)}"
        if not found:
            raise self._error("Expected a character in [ ]")
        self.place += 1
        return f"[{'^' * negated}{found}]"

    def _character(self) -> str:
        character = self._next()
        if not character:
            raise self._error("Expected a character, and the grammar ends")
        self.place += 1
        if character != "\\":
            return character
        escape = self._next()
        self.place += 1
        if escape in _PLAIN_ESCAPES:
            return _PLAIN_ESCAPES[escape]
        length = _HEX_ESCAPES.get(escape, 0)
        digits = self.text[self.place : self.place + length]
        if not length or len(digits) < length or not _HEX.fullmatch(digits):
            raise self._error(f"Invalid escape sequence \\{escape}{digits}")
        self.place += length
        code = int(digits, 16)
        if code > 0x10FFFF or 0xD800 <= code < 0xE000:
            raise self._error(f"Expected a character of Unicode, not \\{escape}{digits}")
        return chr(code)

    def _terminal(self, expression: str) -> str:
        return self.terminals.setdefault(expression, f"T{len(self.terminals)}")

    def _next(self) -> str:
        return self.text[self.place : self.place + 1]

    def _skip(self, space: re.Pattern[str]) -> None:
        found = space.match(self.text, self.place)
        assert found is not None, "it matches the empty text"
        self.place = found.end()

    def _take(self, expected: re.Pattern[str], name: str) -> str:
        found = expected.match(self.text, self.place)
        if found is None:
            raise self._error(f"Expected {name}")
        self.place = found.end()
        return found.group()

    def _demand(self, mark: str) -> None:
        if not self.text.startswith(mark, self.place):
            raise self._error(f"Expected {mark}")
        self.place += len(mark)

    def _error(self, sentence: str) -> GbnfError:
        line = self.text.count("\n", 0, self.place) + 1
        return GbnfError(f"{sentence} at line {line}, before {self.text[self.place : self.place + 20]!r}")


def _one(character: str) -> str:
    return f"[{_code(character)}]"


def _code(character: str) -> str:
    return f"\\x{{{ord(character):x}}}"
