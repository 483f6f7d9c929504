"""Write docs/families.md from app/models/decoders: `python -m tools.families_table`; `--check` only compares it."""

from __future__ import annotations

import sys
from itertools import zip_longest
from pathlib import Path

from app.models.decoders.families import DECODER_FAMILIES, UNSUPPORTED
from tools.generated_page import write_or_check

TARGET = Path(__file__).resolve().parent.parent / "docs" / "families.md"
HEAD = """# Families of decoders

This page is for people who ask whether a text model can be served. `make docs` writes it from
`app/models/decoders/families.py`. [Encoders](encoders.md) and [exported programs](programs.md) have their own pages.

Each family has the logits of transformers in FP32 on tiny random checkpoints
(`tests/parity/test_families_logits.py`) and is served in every precision of the processor. A value of config.json that
is not supported is refused by its name.

## Memory for the context

A plan counts what a token takes in the cache of keys and values. Two kinds of layers take more than a reader may
expect:

- **Multi-head latent attention** (DeepSeek-V2 and V3, GLM 4.7 Flash, MiniCPM3, Youtu): the keys and values of all heads
  are cached, values padded to the size of keys, not the short row from which they come. In BF16 a token of
  DeepSeek-V2-Lite takes 324 KiB (27 layers, 16 heads of 192), and its short rows would take 30 KiB.
- **Short convolutions** (LFM2, also with experts): the inputs of the convolutions are cached like keys and values, a
  row for each token. So shared prefixes, the prompt cache, preemption and speculation are exact. In BF16 a token of
  LFM2-1.2B takes 64 KiB (16 layers of 2,048 elements).

**Gemma 3n** takes less: its last layers read the keys and values of an earlier layer (40 KiB a token in BF16). Every
layer also reads a row of its own for each token, from one table that stays mapped as the file has it: 3.75 GiB of the
8.3 of E2B, of which a step reads 15 KiB a token. A plan counts the whole table.

**A recurrent state** (Qwen3-Next, Qwen 3.5, Granite 4, Nemotron-H, Bamba, Mamba-2) has one size for any length: 19 MiB for each sequence of
Qwen3.5-0.8B, in FP32. It cannot go back, so with such a model no prefix is reused, not even for further choices, and
there is no speculation and no prompt cache. They are computed on processors only.

**Gemma 4** has such a table in E2B and E4B. Its layers of full attention have larger heads than those with a window, and a
row of the cache has room for the larger of both: 512 elements of keys in E2B, of which layers with a window use 256.

## Where transformers differs

**Phi-3.5-MoE** whose context may exceed 4,096 tokens always uses the long factors of its rotary embeddings and their
scale, as other models with longrope do here. The transformers with which the tests compare uses the short factors at
any length.

## Served

A class with a slash is served as the text half of a model whose text model has the type after it.

| `architectures` | models | `architectures` | models |
|---|---|---|---|
"""
REFUSED = """
## Refused

An architecture in this table is refused with its reason, any other one with a list of those that are served. A name
stands for all classes that begin with it.

| what the model needs | architectures |
|---|---|
"""


def page() -> str:
    cells = [f"| `{name}` | {family.title} " for name, family in DECODER_FAMILIES.items()]
    pairs = zip_longest(cells[::2], cells[1::2], fillvalue="| | ")
    served = (f"{first}{second}|\n" for first, second in pairs)
    refused = (f"| {need} | {', '.join(prefixes)} |\n" for need, prefixes in UNSUPPORTED.items())
    return HEAD + "".join(served) + REFUSED + "".join(refused)


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, TARGET, page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
