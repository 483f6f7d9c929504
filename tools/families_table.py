"""Write the tables of docs/families.md and what is below them, from app/models/decoders: `python -m tools.families_table`.

`--check` only compares them.
"""

from __future__ import annotations

import json
import sys
from itertools import zip_longest
from pathlib import Path
from textwrap import fill

from app.models.decoders.families import DECODER_FAMILIES, UNSUPPORTED
from app.models.transformers_config import CAUSAL, SEQ_TO_SEQ
from tools.generated_page import write_or_check
from tools.transformers_classes import RESULTS, is_served, names_in

TARGET = Path(__file__).resolve().parent.parent / "docs" / "families.md"
HEAD = "| `architectures` | models " * 4 + "|\n" + "|---|---" * 4 + "|\n"
REFUSED = """
## Not native

What these classes need no native engine has; a name stands for all classes that begin with it.

| what the model needs | architectures |
|---|---|
"""


def page() -> str:
    cells = [f"| `{name}` | {family.title} " for name, family in DECODER_FAMILIES.items()]
    lines = zip_longest(*(cells[place::4] for place in range(4)), fillvalue="| | ")
    served = ("".join(line) + "|\n" for line in lines)
    refused = (f"| {need} | {', '.join(prefixes)} |\n" for need, prefixes in UNSUPPORTED.items())
    return HEAD + "".join(served) + by_transformers() + REFUSED + "".join(refused)


def by_transformers() -> str:
    results: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8"))
    causal, text = (
        f"{sum(is_served(results[name]) for name in names)} of {len(names)}"
        for names in (results.keys() & names_in(CAUSAL), results.keys() & names_in(SEQ_TO_SEQ))
    )
    failing: dict[str, list[str]] = {}
    for name, result in results.items():
        if not is_served(result):
            short = name.removesuffix("ForCausalLM").replace("ForConditionalGeneration", " (text to text)")
            failing.setdefault(result.partition(":")[0], []).append(short)
    said = "; ".join(f"{why}: {', '.join(names)}" for why, names in failing.items())
    return "\n" + fill(f"{causal} causal classes and {text} others pass. Do not pass: {said}.", 120) + "\n"


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, TARGET, page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
