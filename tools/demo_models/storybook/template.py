"""The template language of the stories: `[this|that]` is a choice, `{slot}` is a word of the scene.

Choices nest and are equally likely; an empty branch leaves words out. A line that begins with `|` is another wording
of the line above it, a line that begins with `?` is used half of the time, and a blank line ends a paragraph.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from tools.demo_models.storybook.dice import Dice

Lookup = Callable[[str], str]
TOKENS = re.compile(r"[\[\]|]|\{\w+\}|[^\[\]|{}]+")
ARTICLE = re.compile(r"\b([Aa]) (?=(?!uni|use|one|eu)[aeiou]|hour|honest)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Slot:
    """A word that the scene supplies."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Branches of which one is used."""

    branches: tuple["Sequence", ...]


Sequence = tuple[str | Slot | Choice, ...]


@cache
def parse(source: str) -> Sequence:
    """Return the tree of a template."""
    branches, rest = _branches(TOKENS.findall(source))
    assert len(branches) == 1 and not rest, f"unbalanced brackets in: {source}"
    return branches[0]


def _branches(tokens: list[str]) -> tuple[list[Sequence], list[str]]:
    branches: list[Sequence] = []
    current: list[str | Slot | Choice] = []
    while tokens:
        token, tokens = tokens[0], tokens[1:]
        if token == "]":
            break
        if token == "[":
            inner, tokens = _branches(tokens)
            current.append(Choice(tuple(inner)))
        elif token == "|":
            branches.append(tuple(current))
            current = []
        else:
            current.append(Slot(token[1:-1]) if token.startswith("{") else token)
    return [*branches, tuple(current)], tokens


def expand(tree: Sequence, dice: Dice, lookup: Lookup) -> str:
    """Return the text of a tree. The dice decide, and the scene supplies words in the order of use."""
    words: list[str] = []
    for part in tree:
        if isinstance(part, Choice):
            words.append(expand(dice.pick(part.branches), dice, lookup))
        else:
            words.append(lookup(part.name) if isinstance(part, Slot) else part)
    return "".join(words)


def tell(source: str, dice: Dice, lookup: Lookup) -> str:
    """Return one sentence or more, with `a` changed to `an` where the next word requires it."""
    return ARTICLE.sub(r"\1n ", expand(parse(source), dice, lookup))


@dataclass(frozen=True, slots=True)
class Beat:
    """One step of a plot: equally likely wordings, used always or half of the time."""

    wordings: tuple[str, ...]
    is_optional: bool


Plot = tuple[tuple[Beat, ...], ...]


def read_plot(text: str) -> Plot:
    """Return paragraphs of beats from the text of a plot file."""
    return tuple(tuple(_beats(paragraph.splitlines())) for paragraph in re.split(r"\n\s*\n", text.strip()))


def _beats(lines: list[str]) -> list[Beat]:
    beats: list[Beat] = []
    for line in lines:
        wording = line.lstrip("|? ").strip()
        if line.startswith("|"):
            beats[-1] = Beat((*beats[-1].wordings, wording), beats[-1].is_optional)
        else:
            beats.append(Beat((wording,), line.startswith("?")))
    return beats


def tell_plot(plot: Plot, dice: Dice, lookup: Lookup) -> str:
    """Return a whole story: sentences joined by spaces, paragraphs by an empty line."""
    paragraphs = []
    for beats in plot:
        told = [beat for beat in beats if not beat.is_optional or dice.chance(0.5)]
        paragraphs.append(" ".join(tell(dice.pick(beat.wordings), dice, lookup) for beat in told))
    return "\n\n".join(paragraphs)
