"""Stories and the split: what training may hold, and the combinations that it never sees."""

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
    """Nobody in it meets a thing that is kept from them."""
    return not any(is_held_out_pair(*pair) for pair in scene.pairs())


def is_held_out(scene: Scene) -> bool:
    """Its hero meets the very thing that is kept from that hero's kind in training."""
    return is_held_out_pair(scene("kind"), scene("thing"))


def draw_from(allowed: Split, dice: Dice, tell: Callable[[Dice], tuple[Told, Scene]]) -> Told:
    """Tell until the split allows it; the dice forget the surprise of what was thrown away."""
    before = dice.nats
    while True:
        told, scene = tell(dice)
        if allowed(scene):
            return told
        dice.nats = before


@dataclass(frozen=True, slots=True)
class Story:
    """A text, and how surprising the grammar finds it: -ln p over all its choices."""

    text: str
    nats: float


def write_story(seed: str, allowed: Split) -> Story:
    """The story of this seed."""
    dice = Dice(seed)
    return Story(draw_from(allowed, dice, tell_story), dice.nats)


def tell_story(dice: Dice) -> tuple[str, Scene]:
    """Any story, and the scene that it needed."""
    plot = dice.pick(tuple(PLOTS))
    scene = Scene(dice, plot)
    return tell_plot(PLOTS[plot], dice, scene), scene
