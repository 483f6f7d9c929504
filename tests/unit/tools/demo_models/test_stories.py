"""The story generator: repeatable, honest about its own entropy, apart from the held-out combinations, and in good English."""

import math
import re
from collections.abc import Callable
from itertools import islice, pairwise

import pytest

from tools.demo_models.stories import (
    NUM_PRACTICE,
    held_out_stories,
    training_document,
    training_documents,
    training_stories,
)
from tools.demo_models.storybook import words
from tools.demo_models.storybook.chat import TALK, Turn, converse, practise
from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.places import PLACES
from tools.demo_models.storybook.reading import follows, is_coherent
from tools.demo_models.storybook.scene import MACROS, Scene, is_held_out_pair
from tools.demo_models.storybook.story import PLOTS, draw_from, is_held_out, may_train, tell_story, write_story
from tools.demo_models.storybook.template import Choice, Sequence, parse, read_plot, tell, tell_plot

TOLD = [tell_story(Dice(seed)) for seed in range(300)]
TEXTS = [text for text, _ in TOLD]


def documents(seed: int, number: int) -> list[list[Turn]]:
    """The first that are not all practice."""
    return [training_document(seed, index) for index in range(NUM_PRACTICE, NUM_PRACTICE + number)]


def nothing(slot: str) -> str:
    """A lookup for templates without slots."""
    raise KeyError(slot)


def test_a_seed_always_generates_the_same() -> None:
    first, again, other = (documents(seed, 30) for seed in (3, 3, 4))
    assert first == again
    assert first != other
    assert next(training_documents(3)) == training_document(3, 0) != training_document(3, 1)
    assert write_story("x", may_train) == write_story("x", may_train)


def test_plain_stories_are_those_of_the_documents() -> None:
    plain = [turns[0].text for turns in documents(0, 60) if not turns[0].role]
    assert [story.text for story in islice(training_stories(0), len(plain))] == plain


def test_entropy_of_a_template_is_what_one_computes_by_hand() -> None:
    by_text = {"a": math.log(3), "b": math.log(3), "c": math.log(6), "d": math.log(6)}
    seen = {}
    for seed in range(100):
        dice = Dice(seed)
        text = tell("[a|b|[c|d]]", dice, nothing)
        seen[text] = dice.nats
    assert seen == pytest.approx(by_text)
    # p ln 1/p over the four texts: 2/3 ln 3 + 1/3 ln 6.
    expected = 2 / 3 * math.log(3) + 1 / 3 * math.log(6)
    dice = Dice("mean")
    for _ in range(4000):
        tell("[a|b|[c|d]]", dice, nothing)
    assert dice.nats / 4000 == pytest.approx(expected, rel=0.01)


def test_entropy_of_an_optional_sentence_is_what_one_computes_by_hand() -> None:
    plot = read_plot("One.\n? Two.\n| Three.\n\nFour.")
    expected = {"One.\n\nFour.": math.log(2), "One. Two.\n\nFour.": math.log(4), "One. Three.\n\nFour.": math.log(4)}
    seen = {}
    for seed in range(60):
        dice = Dice(seed)
        text = tell_plot(plot, dice, nothing)
        seen[text] = dice.nats
    assert seen == pytest.approx(expected)


def test_what_the_split_throws_away_does_not_count() -> None:
    def three_sided(dice: Dice) -> tuple[str, Scene]:
        return dice.pick("abc"), Scene(dice)

    answers = iter([False, False, True])
    dice = Dice(0)
    draw_from(lambda scene: next(answers), dice, three_sided)
    assert dice.nats == pytest.approx(math.log(3))


def recording(allowed: Callable[[Scene], bool], accepted: list[Scene]) -> Callable[[Scene], bool]:
    """The same split, which keeps every scene that it lets through."""

    def split(scene: Scene) -> bool:
        if allowed(scene):
            accepted.append(scene)
            return True
        return False

    return split


def test_training_never_sees_a_held_out_combination() -> None:
    trained: list[Scene] = []
    kept: list[Scene] = []
    for seed in range(100):
        write_story(f"{seed}", recording(may_train, trained))
        practise(Dice(seed), recording(may_train, trained))
        converse(Dice(seed), recording(may_train, trained), goes_on=0.5)
        write_story(f"{seed}", recording(is_held_out, kept))
    heroes = {(scene("kind"), scene("thing")) for scene in kept}
    met = {pair for scene in trained for pair in scene.pairs()}
    assert len(heroes) > 50
    assert len(met) > 400
    assert all(is_held_out_pair(*pair) for pair in heroes)
    assert not heroes & met


def test_held_out_words_are_all_known_from_training() -> None:
    common = [(kind, thing) for kind in words.KINDS for thing in words.THINGS]
    kept = [pair for pair in common if is_held_out_pair(*pair)]
    assert 0.04 < len(kept) / len(common) < 0.09
    # Each creature and each thing has company enough in training.
    for index, options in enumerate((words.KINDS, words.THINGS)):
        for option in options:
            assert sum(pair[index] == option for pair in kept) < 15


@pytest.mark.parametrize("plot", sorted(PLOTS))
def test_every_plot_needs_its_hero_friend_thing_and_place(plot: str) -> None:
    for seed in range(60):
        scene = Scene(Dice(seed), plot)
        text = tell_plot(PLOTS[plot], scene.dice, scene)
        slots = set(scene.drawn)
        assert {"hero", "kind", "friend", "fkind", "thing", "look"} <= slots
        assert all(scene(slot) in text for slot in ("hero", "friend", "thing"))
        assert scene("hero") != scene("friend")
        before = scene.dice.nats
        assert scene("place")
        assert scene.dice.nats == before, "the place was drawn only now"


def test_spelling_and_punctuation() -> None:
    for text in TEXTS:
        assert not re.search(r"  | [,.!?]|[{}\[\]|]|\n ", text), text
        assert not re.search(r"\ba [aeiou]|\ban [^aeiouh]", text, re.IGNORECASE), text
        assert text.count('"') % 2 == 0
        assert text[-1] in '.!?"'
        for sentence in re.split(r'(?<=[.!?])["]?(?:\s+)(?=")|(?<=[.!?])\s+(?!")|\n\n', text):
            assert re.match(r'["A-Z]', sentence.strip()), sentence


def test_no_sentence_is_written_twice_in_a_row() -> None:
    for text in TEXTS:
        sentences = re.split(r"(?<=[.!?]) ", text.replace("\n\n", " "))
        assert all(one != two for one, two in pairwise(sentences)), text


def test_every_story_reads_back_as_the_grammar_generated_it() -> None:
    assert all(is_coherent(text) for text in TEXTS)
    assert {follows(text) for text in TEXTS} == set(PLOTS)


def test_reading_back_notices_a_wrong_word_and_a_wrong_name() -> None:
    text, scene = TOLD[0]
    assert follows(text.replace(" the ", " teh ", 1)) is None
    strange = f"Zz{scene('friend')[::-1].lower()}"
    assert not is_coherent(strange.join(text.rsplit(scene("hero"), 1)))


def test_conversations_alternate_and_answer_what_was_asked() -> None:
    asked = 0
    for turns in documents(1, 400):
        if not turns[0].role:
            assert len(turns) == 1
            continue
        talk = turns[1:] if turns[0].role == "system" else turns
        assert [turn.role for turn in talk] == ["user", "assistant"] * (len(talk) // 2)
        for user, assistant in zip(talk[::2], talk[1::2], strict=True):
            wanted = re.fullmatch(r".* story about an? ([a-z]+) and an? ([a-z ]+)\.?", user.text)
            if wanted:
                asked += 1
                assert all(word in assistant.text for word in wanted.groups())
    assert asked > 5


def test_branches_and_words_differ() -> None:
    sources = [*MACROS.values(), *(source for pair in TALK for source in pair)]
    sources += [wording for plot in PLOTS.values() for beats in plot for beat in beats for wording in beat.wordings]
    for source in sources:
        assert_branches_differ(parse(source))
    for plot in PLOTS.values():
        assert all(len(set(beat.wordings)) == len(beat.wordings) for beats in plot for beat in beats)
    for listed in (words.GIRLS + words.BOYS, (*words.KINDS, *words.RARE_KINDS), (*words.THINGS, *words.RARE_THINGS)):
        assert len(set(listed)) == len(listed)
    assert len({place.noun for place in PLACES}) == len(PLACES)


def assert_branches_differ(tree: Sequence) -> None:
    """Two equal branches would make one text by two ways, and the entropy would be too high."""
    for part in tree:
        if isinstance(part, Choice):
            assert len(set(part.branches)) == len(part.branches), part
            for branch in part.branches:
                assert_branches_differ(branch)


def test_held_out_stories_know_their_surprise() -> None:
    stories = held_out_stories(0, 40)
    assert stories == held_out_stories(0, 40)
    assert all(40 < story.nats < 140 for story in stories)
