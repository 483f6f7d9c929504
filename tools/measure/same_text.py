"""Compare greedy text of engines, prompt by prompt: `python -m tools.measure.same_text --side ours=PYTHON:FILE --side ...`.

The first side's model is a directory or a GGUF file with a tokenizer, which encodes the prompts for all sides, after
its chat template if it has one. Every side continues the same token ids without sampling, one prompt at a time. The
table has, for each prompt and each further side, the number of first tokens that equal the first side's.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.progress import Progress

from app.text.chat import open_chat_template
from app.text.tokenizer import Tokenizer
from tools.peers.sides import Side, SideSpec
from tools.peers.turns import AHEAD_TOKENS, Rows, Turn

PROMPTS = (
    "What is the capital of France?",
    "Write a short story about a lighthouse keeper and a storm.",
    "Explain in three sentences how a bicycle stays upright.",
    "List five things to take on a walk in the mountains.",
    "Tom has 3 apples and buys 5 more. How many apples does he have now?",
    "Rewrite this sentence politely: Send me the report now.",
    "Why is the sky blue?",
    "Write a function in Python that returns the largest of three numbers.",
    "Describe the taste of fresh bread to someone who has never eaten it.",
    "What should a good letter of application contain?",
)


def main() -> int:
    """Run every side once. Progress goes to stderr; stdout has a Markdown table."""
    arguments = _arguments()
    prompts = encode(arguments.side[0].model, arguments.prompts)
    results = []
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        for spec in arguments.side:
            side = Side(spec, arguments.threads)
            try:
                side.wait_until_ready()
                turns = [Turn(1, len(ids), arguments.tokens - AHEAD_TOKENS, 0, [ids]) for ids in prompts]
                results.append([side.take(turn).ids[0] for turn in bar.track(turns, description=spec.name)])
            finally:
                side.end()
    print(table(arguments.prompts, [spec.name for spec in arguments.side], results, arguments.same))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, metavar="PROMPT")
    parser.add_argument("--side", type=SideSpec.parse, action="append", required=True, metavar="KIND=PYTHON:MODEL")
    parser.add_argument("--threads", type=int, default=2, help="compute threads of each side (default 2)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of each answer (default 200)")
    parser.add_argument("--same", type=int, default=20, help="first tokens that count as the same text (default 20)")
    arguments = parser.parse_args()
    if arguments.tokens <= 2 * AHEAD_TOKENS:
        parser.error(f"--tokens must be more than {2 * AHEAD_TOKENS}")
    return arguments


def encode(model: Path, prompts: Sequence[str]) -> Rows:
    """Return the token ids of each prompt, as the message of a user if the model has a chat template."""
    tokenizer = Tokenizer(model)
    template = open_chat_template(model, tokenizer.config, tokenizer.named_tokens)
    if template is None:
        return [tokenizer.encode(prompt) for prompt in prompts]
    texts = [template.render([{"role": "user", "content": prompt}]) for prompt in prompts]
    template.close()
    return [tokenizer.encode(text, add_special_tokens=False) for text in texts]


def num_equal(first: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of first ids that are equal."""
    pairs = zip(first, other, strict=True)
    return next((place for place, (mine, theirs) in enumerate(pairs) if mine != theirs), len(first))


def table(prompts: Sequence[str], names: Sequence[str], results: Sequence[Rows], same: int) -> str:
    """Return a Markdown table of the equal first tokens of each prompt, and of how many texts begin the same."""
    counts = [[num_equal(mine, theirs) for mine, theirs in zip(results[0], rows, strict=True)] for rows in results[1:]]
    rows = [[f"equal first tokens of {names[0]} and", *names[1:]], ["---"] * len(names)]
    rows += [[prompt, *map(str, own)] for prompt, own in zip(prompts, zip(*counts, strict=True), strict=True)]
    rows.append([f"texts with {same} or more", *(f"{sum(n >= same for n in own)} of {len(own)}" for own in counts)])
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


if __name__ == "__main__":
    sys.exit(main())
