"""The cast and props of one story.

They are drawn when a template first needs them, so that unused ones do not count as choices.
"""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

from tools.demo_models.storybook import words
from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.places import PLACES, Place
from tools.demo_models.storybook.template import expand, parse

HELD_OUT_ONE_IN = 16
# Plots that need weather, or a path that leads there.
UNDER_THE_SKY = ("lonely", "storm", "travel")
OUTDOORS = tuple(place for place in PLACES if place.is_outdoors)
PRONOUNS = {"girl": ("she", "her", "her", "herself"), "boy": ("he", "him", "his", "himself")}


def read_macros(text: str) -> dict[str, str]:
    """Return named parts of templates, from lines of `name: text`."""
    return dict(line.split(": ", 1) for line in text.splitlines() if line.strip())


MACROS = read_macros((Path(__file__).parent / "macros.txt").read_text(encoding="utf-8"))


def is_held_out_pair(kind: str, thing: str) -> bool:
    """Return True if this kind of creature never occurs with this thing in the training text."""
    return zlib.crc32(f"{kind}/{thing}".encode()) % HELD_OUT_ONE_IN == 0


class Scene:
    """Looks up slots: first what is already drawn, then the rules below, then the shared macros."""

    def __init__(self, dice: Dice, plot: str = "", rare_share: float = 0.12) -> None:
        self.dice = dice
        self.plot = plot
        self.rare_share = rare_share
        self.drawn: dict[str, str] = {}
        self._deployment: Place | None = None
        self._rules: dict[str, Callable[[], str]] = {
            "thing": lambda: self._common_or_rare(tuple(words.THINGS), words.RARE_THINGS),
            "look": lambda: dice.pick(words.LOOKS),
            "trait": lambda: dice.pick(words.TRAITS),
            "ftrait": lambda: self._other("trait", words.TRAITS),
            "feeling": lambda: dice.pick(words.FEELINGS),
            "food": lambda: dice.pick(words.FOODS),
            "sky": lambda: dice.pick(words.SKIES),
            "hour": lambda: dice.pick(words.HOURS),
            "fear": lambda: dice.pick(words.FEARS),
            "deed": lambda: expand(parse(words.DEEDS[plot]), dice, self),
            "place": lambda: self.place.noun,
            "at": lambda: self.place.at,
            "to": lambda: self.place.to,
        }

    @property
    def place(self) -> Place:
        if self._deployment is None:
            self._deployment = self.dice.pick(OUTDOORS if self.plot in UNDER_THE_SKY else PLACES)
        return self._deployment

    def __call__(self, slot: str) -> str:
        """Return the text of a slot. `{He}` is `{he}` with a capital letter."""
        if slot[0].isupper():
            text = self(slot[0].lower() + slot[1:])
            return text[0].upper() + text[1:]
        if slot in ("detail", "spot", "wonder"):
            return self._remembered(slot, lambda: self.dice.pick(self._fitting(slot)))
        if slot in self._rules:
            return self._remembered(slot, self._rules[slot])
        if slot in MACROS:
            return expand(parse(MACROS[slot]), self.dice, self)
        return self._person_slot(slot)

    def _remembered(self, slot: str, draw: Callable[[], str]) -> str:
        if slot not in self.drawn:
            self.drawn[slot] = draw()
        return self.drawn[slot]

    def _fitting(self, slot: str) -> Sequence[str]:
        """Return the options for this place or thing."""
        if slot == "wonder":
            return words.THINGS.get(self("thing"), ("It was very well made.", "There was no other like it."))
        return self.place.details if slot == "detail" else self.place.spots

    def _common_or_rare(self, common: Sequence[str], rare: Sequence[str]) -> str:
        return self.dice.pick(rare if self.dice.chance(self.rare_share) else common)

    def _other(self, slot: str, options: Sequence[str]) -> str:
        """Return an option that differs from the hero's."""
        return self.dice.pick([option for option in options if option != self.drawn.get(slot)])

    def _person_slot(self, slot: str) -> str:
        """Return a slot of the hero (`he`, `kind`, `hero`) or of the friend (`fhe`, `fkind`, `friend`)."""
        if slot in ("hero", "friend"):
            return self._remembered(slot, lambda: self._name("f" if slot == "friend" else ""))
        who, what = ("f", slot[1:]) if slot.startswith("f") and slot != "feature" else ("", slot)
        if what in ("he", "him", "his", "himself"):
            return PRONOUNS[self._gender(who)][("he", "him", "his", "himself").index(what)]
        if what == "kind":
            return self._remembered(slot, lambda: self._kind(who))
        common = words.KINDS.get(self(who + "kind"), ("a warm smile", "little house"))
        return {"feature": common[0], "home": common[1]}[what]

    def _kind(self, who: str) -> str:
        """Return a child or a creature. Hero and friend are of different kinds."""
        other = self.drawn.get("kind" if who else "fkind", "")
        if self.dice.chance(0.25):
            if other in PRONOUNS and who + "gender" not in self.drawn:
                self.drawn[who + "gender"] = "boy" if other == "girl" else "girl"
            return self._gender(who)
        common = tuple(kind for kind in words.KINDS if kind != other)
        return self._common_or_rare(common, tuple(kind for kind in words.RARE_KINDS if kind != other))

    def _gender(self, who: str) -> str:
        return self._remembered(who + "gender", lambda: self.dice.pick(("girl", "boy")))

    def _name(self, who: str) -> str:
        """Return a common name, or sometimes an invented one."""
        taken = set(self.drawn.values())
        names = words.GIRLS if self._gender(who) == "girl" else words.BOYS
        if self.dice.chance(self.rare_share):
            return self.dice.pick(words.FIRST_SYLLABLES) + self.dice.pick(words.LAST_SYLLABLES)
        return self.dice.pick([name for name in names if name not in taken])

    def pairs(self) -> list[tuple[str, str]]:
        """Return every creature of this scene with its thing. The split is made on these pairs."""
        kinds = [self.drawn[slot] for slot in ("kind", "fkind") if slot in self.drawn]
        return [(kind, self.drawn["thing"]) for kind in kinds if "thing" in self.drawn]
