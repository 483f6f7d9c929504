"""Print the answers of a model in each precision, side by side: `python -m tools.measure.answers --model DIR`.

Starts a server for one precision after the other and asks it each question once, without sampling. The table is in
Markdown. Other questions can be given as arguments.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import httpx
from rich.progress import Progress

from armature_bench.engine.quality import host_precisions
from tools.measure.two_checkouts import HERE, server

QUESTIONS = (
    "What is the capital of France?",
    "Tom has 3 apples and buys 5 more. How many apples does he have now?",
    "Rewrite this sentence politely: Send me the report now.",
)


def main() -> int:
    arguments = _arguments()
    precisions = arguments.precision or host_precisions()
    answers = []
    with Progress(transient=True, disable=not sys.stderr.isatty()) as bar:
        for precision in bar.track(precisions, description="asking"):
            flags = ["--model", str(arguments.model), "--precision", precision, *arguments.serve.split()]
            with server(HERE, flags) as (url, _):
                answers.append([ask(url, question, arguments.max_tokens) for question in arguments.questions])
    print(table(arguments.questions, precisions, answers))
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", nargs="*", default=QUESTIONS, metavar="QUESTION")
    parser.add_argument("--model", type=Path, required=True, help="checkpoint directory")
    parser.add_argument("--precision", action="append", help="only this precision; may be repeated (default: all)")
    parser.add_argument("--max-tokens", type=int, default=64, help="tokens of an answer at most")
    parser.add_argument("--serve", default="", metavar="FLAGS", help="further flags of the servers, in one argument")
    return parser.parse_args()


def ask(url: str, question: str, max_tokens: int) -> str:
    body = {"messages": [{"role": "user", "content": question}], "max_tokens": max_tokens, "temperature": 0}
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=300).raise_for_status().json()
    choice = response["choices"][0]
    return str(choice["message"]["content"]) + (" …" if choice["finish_reason"] == "length" else "")


def table(questions: Sequence[str], precisions: Sequence[str], answers: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table: a row for each question, a column for each precision."""
    rows = [("", *precisions), ("---",) * (1 + len(precisions))]
    rows += zip(questions, *answers, strict=True)
    return "\n".join("| " + " | ".join(map(cell, row)) + " |" for row in rows)


def cell(text: str) -> str:
    """Return the text in one line, without characters that end a cell."""
    return "<br>".join(text.strip().replace("|", "\\|").splitlines())


if __name__ == "__main__":
    sys.exit(main())
