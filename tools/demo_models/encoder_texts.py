"""The training texts of the demo encoder: `python -m tools.demo_models.encoder_texts --count 20` prints some.

They are sentences of the docstrings of installed packages, sentences of the demo's stories, and phrases of the
teacher's words. The texts of a seed depend only on the versions of the installed packages.
"""

import argparse
import random
import re
import sysconfig
import zlib
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path

from tokenizers import Tokenizer

from tools.demo_models.storybook.dice import Dice
from tools.demo_models.storybook.story import may_train, write_story

DOCUMENTED = (
    "torch",
    "sympy",
    "transformers",
    "networkx",
    "numpy",
    "huggingface_hub",
    "openai",
    "pip",
    "pydantic",
    "setuptools",
    "jinja2",
)
QUOTED = re.compile(r'^\s*[rR]?"""(.+?)"""', re.DOTALL | re.MULTILINE)
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
HELD_OUT_SHARE = 50  # one text of this number is held out
FRAMES = (
    "{} {}",
    "{} {} {}",
    "the {} of the {}",
    "a {} {} in the {}",
    "{} and {}",
    "how to {} a {}",
    "what is a {} {}?",
    "the {} {} was {} by the {}.",
    "I {} my {} every {}.",
    "{}, {}, {} and {}",
    "why does the {} {} {}?",
    "The {} said that {} {} is {}.",
    "{}",
    "{} {} {} {} {} {}",
    "best {} for {} in {}",
    "There is no {} {} without {}.",
)


def is_held_out(text: str) -> bool:
    """Return True if a text is held out. The result is the same for the same text."""
    return zlib.crc32(text.encode()) % HELD_OUT_SHARE == 0


def documentation_sentences() -> list[str]:
    """Return every prose sentence in the docstrings of the standard library and a few packages, in a fixed order."""
    library, packages = Path(sysconfig.get_path("stdlib")), Path(sysconfig.get_path("purelib"))
    files = [path for path in library.rglob("*.py") if not {"site-packages", "test"} & set(path.parts)]
    files += [path for name in DOCUMENTED for path in (packages / name).rglob("*.py")]
    found: dict[str, None] = {}
    for path in sorted(files):
        for quoted in QUOTED.findall(path.read_text(encoding="utf-8", errors="ignore")):
            found.update(dict.fromkeys(_sentences(quoted)))
    return sorted(found)


def _sentences(quoted: str) -> Iterator[str]:
    for paragraph in re.split(r"\n\s*\n", quoted):
        for sentence in SENTENCE_END.split(" ".join(paragraph.split())):
            prose = sum(character.isalpha() or character == " " for character in sentence)
            if 3 <= len(sentence.split()) <= 36 and prose > 0.88 * len(sentence):
                yield sentence


def story_sentences(seed: int) -> Iterator[str]:
    """Yield sentences of the demo's stories without end, sometimes two or three together."""
    for number in count():
        name = f"{seed}/encoder/{number}"
        dice, sentences = Dice(f"{name}/cut"), SENTENCE_END.split(write_story(name, may_train).text)
        while sentences:
            taken = 1 + dice.chance(0.3) + dice.chance(0.2)
            yield " ".join(sentences[:taken])
            sentences = sentences[taken:]


def phrases(words: list[str], seed: int) -> Iterator[str]:
    """Yield filled templates without end. Words early in the list are more frequent."""
    dice = random.Random(seed)
    while True:
        frame = dice.choice(FRAMES)
        yield frame.format(*(words[int(len(words) * dice.random() ** 2)] for _ in range(frame.count("{}"))))


def whole_words(tokenizer: Tokenizer) -> list[str]:
    """Return the whole words of a WordPiece vocabulary in its order, which is by frequency for BERT."""
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    return [token for token, _ in by_id if len(token) > 2 and token.isascii() and token.isalpha()]


def corpus(tokenizer: Tokenizer, seed: int, num_texts: int) -> list[str]:
    """Return `num_texts` different texts in shuffled order.

    A third are docstring sentences if there are enough, a ninth are from stories, and the rest are phrases.
    """
    dice = random.Random(seed)
    documented = documentation_sentences()
    dice.shuffle(documented)
    texts = dict.fromkeys(documented[: num_texts // 3])
    texts.update(dict.fromkeys(islice(story_sentences(seed), num_texts // 9)))
    for phrase in phrases(whole_words(tokenizer), seed):
        if len(texts) >= num_texts:
            break
        texts[phrase] = None
    shuffled = list(texts)
    dice.shuffle(shuffled)
    return shuffled


def main() -> None:
    """Print a few texts of each kind."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=10)
    options = parser.parse_args()
    documented = documentation_sentences()
    print(f"{len(documented):,} sentences of documentation")
    print("\n".join(random.Random(options.seed).sample(documented, options.count)))
    print("\n".join(islice(story_sentences(options.seed), options.count)))


if __name__ == "__main__":
    main()
