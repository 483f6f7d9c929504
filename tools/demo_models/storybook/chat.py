"""Conversations: a person asks for a story or something else, and the storyteller answers."""

from dataclasses import dataclass
from pathlib import Path

from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.scene import Scene
from tools.demo_models.storybook.story import PLOTS, Split, draw_from
from tools.demo_models.storybook.template import tell, tell_plot

HERE = Path(__file__).parent
SYSTEM = (
    "You are a storyteller.",
    "You tell short stories for children.",
    "You are a helpful assistant.",
    "You are a kind storyteller who writes simple English.",
    "Answer every request with a story.",
    "You are a friendly assistant that writes short stories.",
    "Be kind and keep your answers simple.",
    "You are a helpful and harmless assistant. Answer as well as you can.",
)
TALK = tuple(
    (line.split(" => ")[0], line.split(" => ")[1])
    for line in (HERE / "talk.txt").read_text(encoding="utf-8").splitlines()
)
FACTS = tuple((HERE / "facts.txt").read_text(encoding="utf-8").splitlines())
STRANGE = tuple((HERE / "strange.txt").read_text(encoding="utf-8").splitlines())
PREFACE = (
    "[Of course!|Gladly!|Here is a story about SUBJECT.|Here is a little story for you.|This is the story of SUBJECT.]"
)
EXCUSE = (
    "[I only know little stories, but here is one.|I am only a storyteller. Let me tell you a story instead."
    "|I do not know, but I can tell you a story.|That is too hard for a small storyteller. Here is a story.]"
)
QUESTIONS = (
    (
        "[What was the {kind} called|What was the name of the {kind}|Who was the {kind}]?",
        "The {kind} was called {hero}.",
    ),
    ("[Where did it happen|Where were they|Where was {hero}]?", "[It happened|That was] {at}."),
    ("[Who was the friend of {hero}|Who helped {hero}|Who was with {hero}]?", "It was {friend} the {fkind}."),
    ("[What thing was it|What was it all about|Which thing was in the story]?", "It was a {look} {thing}."),
)


PRACTICE = (
    "[Practice with|Say something about|Write some sentences about] "
    "[{hero}|{hero} the {kind}|{hero} and {friend}|a {kind} and a {thing}|a {look} {thing} and {hero}|{friend} and a {thing}]"
)
PRACTICE_SENTENCES = 12


@dataclass(frozen=True, slots=True)
class Turn:
    """One side's text."""

    role: str
    text: str


def converse(dice: Dice, allowed: Split, goes_on: float) -> list[Turn]:
    """Return a whole conversation. After each exchange it continues with probability `goes_on`."""
    turns = [Turn("system", dice.pick(SYSTEM))] if dice.chance(0.25) else []
    while True:
        if dice.chance(0.2):
            asked, answer = dice.pick(TALK)
            scene = Scene(dice)
            turns += [_ask(asked, dice, scene), Turn("assistant", tell(answer, dice, scene))]
        else:
            turns += draw_from(allowed, dice, _story_exchange)
        if not dice.chance(goes_on):
            return turns


def practise(dice: Dice, allowed: Split) -> list[Turn]:
    """Return sentences that repeat the same few names and things.

    A small network learns late from stories that a name must be copied, since few of their tokens are names. Here
    nearly every sentence requires it, and half of the words are rare.
    """
    return draw_from(allowed, dice, _practice)


def _practice(dice: Dice) -> tuple[list[Turn], Scene]:
    scene = Scene(dice, rare_share=0.5)
    asked = _ask(PRACTICE, dice, scene)
    left, told = list(FACTS), []
    for _ in range(PRACTICE_SENTENCES):
        left.remove(fact := dice.pick(left))
        told.append(tell(fact, dice, scene))
    return [asked, Turn("assistant", " ".join(told))], scene


def _story_exchange(dice: Dice) -> tuple[list[Turn], Scene]:
    """Return a request, the story, and sometimes a question about it."""
    plot = dice.pick(tuple(PLOTS))
    scene = Scene(dice, plot)
    asked, preface = _strange_request(dice, scene) if dice.chance(0.15) else _request(dice, scene)
    text = tell_plot(PLOTS[plot], dice, scene)
    turns = [asked, Turn("assistant", f"{preface}\n\n{text}" if preface else text)]
    if dice.chance(0.3):
        question, answer = dice.pick(QUESTIONS)
        turns += [_ask(question, dice, scene), Turn("assistant", tell(answer, dice, scene))]
    return turns, scene


def _request(dice: Dice, scene: Scene) -> tuple[Turn, str]:
    """Return a request for a story; the storyteller may add a sentence before it begins."""
    subject = tell("{subject}", dice, scene)
    asked = _ask(f"[{{ask}} a {{length}}story about|A {{length}}story about|Story:] {subject}", dice, scene)
    return asked, tell(PREFACE, dice, scene).replace("SUBJECT", subject) if dice.chance(0.3) else ""


def _strange_request(dice: Dice, scene: Scene) -> tuple[Turn, str]:
    """Return a request that a storyteller cannot fulfil, with an excuse and a story."""
    return _ask(dice.pick(STRANGE), dice, scene), tell(EXCUSE, dice, scene)


def _ask(source: str, dice: Dice, scene: Scene) -> Turn:
    """Return a person's text, sometimes without capitals or a full stop."""
    text = tell(source, dice, scene)
    text = text + "." if text[-1].isalnum() and dice.chance(0.6) else text
    return Turn("user", text.lower() if dice.chance(0.15) else text)
