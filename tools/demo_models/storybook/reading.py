"""Parses a story: which plot it follows word for word, and whether it keeps its hero, thing and place.

Samples of the model are judged by whether the grammar could have produced them, not by whether the training text
contains them.
"""

import re
from functools import cache

from tools.demo_models.storybook import words
from tools.demo_models.storybook.places import PLACES
from tools.demo_models.storybook.scene import MACROS
from tools.demo_models.storybook.story import PLOTS
from tools.demo_models.storybook.template import Beat, Choice, Sequence, Slot, parse

PRONOUN_SLOTS = {"he": "he|she", "him": "him|her", "his": "his|her", "himself": "himself|herself"}
NAME = "[A-Z][a-z]+"
# Anything may be a thing, since a request may name it, but "dreamed of the harbor" refers to a place.
NOUN = f"(?!(?:{'|'.join(place.noun for place in PLACES)})\\b)[a-z][a-z-]*(?: box)?"
FEMALE = ("she", "her", "herself")


def _any(options: tuple[str, ...]) -> str:
    return "|".join(sorted((re.escape(option) for option in dict.fromkeys(options)), key=len, reverse=True))


FEATURES = (*(feature for feature, _ in words.KINDS.values()), "a warm smile")
HOMES = (*(home for _, home in words.KINDS.values()), "little house")
WONDERS = (
    *(wonder for both in words.THINGS.values() for wonder in both),
    "It was very well made.",
    "There was no other like it.",
)
PATTERNS = {
    "hero": NAME,
    "friend": NAME,
    "thing": NOUN,
    "kind": NOUN,
    "fkind": NOUN,
    "look": _any(words.LOOKS),
    "trait": _any(words.TRAITS),
    "ftrait": _any(words.TRAITS),
    "feeling": _any(words.FEELINGS),
    "food": _any(words.FOODS),
    "fear": _any(words.FEARS),
    "sky": _any(words.SKIES),
    "hour": _any(words.HOURS),
    "feature": _any(FEATURES),
    "home": _any(HOMES),
    "wonder": _any(WONDERS),
    "place": _any(tuple(place.noun for place in PLACES)),
    "at": _any(tuple(place.at for place in PLACES)),
    "to": _any(tuple(place.to for place in PLACES)),
    "detail": _any(tuple(detail for place in PLACES for detail in place.details)),
    "spot": _any(tuple(spot for place in PLACES for spot in place.spots)),
    **PRONOUN_SLOTS,
    **{f"f{slot}": pattern for slot, pattern in PRONOUN_SLOTS.items()},
}
# Slots that name the same place by its noun alone.
PLACE_OF = {
    form: place.noun for place in PLACES for form in (place.noun, place.at, place.to, *place.details, *place.spots)
}


class _Writer:
    """Turns templates into a pattern where each use of a slot is a separate group, `hero_7`."""

    def __init__(self) -> None:
        self.num_groups = 0

    def slot(self, name: str) -> str:
        base = name[0].lower() + name[1:]
        if base in MACROS:
            tree = parse(MACROS[base])
            if name[0].isupper():
                assert isinstance(tree[0], str), f"{name} cannot begin with a capital"
                tree = (tree[0][0].upper() + tree[0][1:], *tree[1:])
            return self.sequence(tree)
        self.num_groups += 1
        pattern = PATTERNS[base]
        if name[0].isupper() and base not in ("hero", "friend"):
            pattern = "|".join(option[0].upper() + option[1:] for option in pattern.split("|"))
        return f"(?P<{base}_{self.num_groups}>{pattern})"

    def sequence(self, tree: Sequence) -> str:
        return "".join(self._part(part) for part in tree)

    def _part(self, part: str | Slot | Choice) -> str:
        if isinstance(part, Slot):
            return self.slot(part.name)
        if isinstance(part, Choice):
            return f"(?:{'|'.join(self.sequence(branch) for branch in part.branches)})"
        return re.sub(r"\b([Aa])(?=\\ |$)", r"\1n?", re.escape(part))

    def beat(self, beat: Beat) -> str:
        wordings = "|".join(self.sequence(parse(wording)) for wording in beat.wordings)
        return f"(?:(?:{wordings})(?: |\\n\\n|$))" + ("?" if beat.is_optional else "")


@cache
def pattern_of(plot: str) -> re.Pattern[str]:
    """Return the pattern of a plot's stories."""
    writer = _Writer()
    return re.compile("".join(writer.beat(beat) for beats in PLOTS[plot] for beat in beats))


def follows(text: str) -> str | None:
    """Return the plot that could have produced this story, or None."""
    return next((plot for plot in PLOTS if pattern_of(plot).fullmatch(text)), None)


def is_coherent(text: str) -> bool:
    """Return True if the text follows a plot and each slot has the same value wherever it is used."""
    plot = follows(text)
    if plot is None:
        return False
    match = pattern_of(plot).fullmatch(text)
    assert match, "it followed the plot a moment ago"
    said: dict[str, set[str]] = {}
    for group, value in match.groupdict().items():
        if value is not None:
            slot, meaning = _meaning(group.rpartition("_")[0], value)
            said.setdefault(slot, set()).add(meaning)
    return all(len(meanings) == 1 for meanings in said.values()) and said["hero"] != said["friend"]


def _meaning(slot: str, value: str) -> tuple[str, str]:
    """Return what a slot refers to. Pronouns refer to a gender, descriptions to a place or a creature."""
    who, base = ("friend", slot[1:]) if slot[0] == "f" and slot[1:] in PRONOUN_SLOTS else ("hero", slot)
    if base in PRONOUN_SLOTS:
        return f"gender of {who}", "female" if value.lower() in FEMALE else "male"
    if slot in ("place", "at", "to", "detail", "spot"):
        return "place", PLACE_OF.get(value, value)
    return slot, value.lower()
