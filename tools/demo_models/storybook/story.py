"""Stories and the split into training text and held-out combinations."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.scene import Scene, is_held_out_pair
from tools.demo_models.storybook.template import read_plot, tell_plot

PLOTS = {
    path.stem: read_plot(path.read_text(encoding="utf-8"))
    for path in sorted((Path(__file__).parent / "plots").glob("*.txt"))
}
Told = TypeVar("Told")
Split = Callable[[Scene], bool]


def may_train(scene: Scene) -> bool:
    """Return True if no character has a thing that is held out for its kind."""
    return not any(is_held_out_pair(*pair) for pair in scene.pairs())


def is_held_out(scene: Scene) -> bool:
    """Return True if the hero has the thing that is held out for its kind."""
    return is_held_out_pair(scene("kind"), scene("thing"))


def draw_from(allowed: Split, dice: Dice, tell: Callable[[Dice], tuple[Told, Scene]]) -> Told:
    """Draw until the split allows the result. The surprise of rejected drafts does not count."""
    before = dice.nats
    while True:
        told, scene = tell(dice)
        if allowed(scene):
            return told
        dice.nats = before


@dataclass(frozen=True, slots=True)
class Story:
    """A text and its surprise by the grammar: -ln p over all its choices."""

    text: str
    nats: float


def write_story(seed: str, allowed: Split) -> Story:
    """Return the story of this seed."""
    dice = Dice(seed)
    return Story(draw_from(allowed, dice, tell_story), dice.nats)


def tell_story(dice: Dice) -> tuple[str, Scene]:
    """Return any story, and the scene that it used."""
    plot = dice.pick(tuple(PLOTS))
    scene = Scene(dice, plot)
    return tell_plot(PLOTS[plot], dice, scene), scene
