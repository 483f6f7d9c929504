"""Write docs/families.md from app/models/decoders: `python -m tools.families_table`; `--check` only compares it."""

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
HEAD = """# Families of decoders

This page is for people who ask whether a text model can be served. `make docs` writes it from
`app/models/decoders/families.py`. [Encoders](encoders.md) and [exported programs](programs.md) have their own pages.

Each family has the logits of transformers in FP32 on tiny checkpoints (`tests/parity/test_families_logits.py`) and is
served in every precision of the processor. Values of config.json that are not supported are refused by name. Phi-3.5-MoE
differs if its context may exceed 4,096 tokens: it always uses the long factors of its rotary embeddings.

## Memory for the context

A plan counts what a token takes in the cache of keys and values. **Multi-head latent attention** (DeepSeek-V2 and V3, GLM
4.7 Flash, MiniCPM3, Youtu) takes more than a reader may expect: the keys and values of all heads are cached, values padded
to the size of keys: 324 KiB a token of DeepSeek-V2-Lite in BF16; its short rows take 30 KiB.

**Gemma 3n** takes less: its last layers read the keys and values of an earlier layer (40 KiB a token in BF16). Each layer
also reads a row for each token from a table that stays mapped (3.75 of the 8.3 GiB of E2B). A plan counts all of it.

**A recurrent state** (Qwen 3.5, Granite 4, Nemotron-H, Falcon-H1, Mamba-2, LFM2's short convolutions and others) has one
size for any length, in FP32: 19 MiB for a sequence of Qwen3.5-0.8B, 160 KiB of LFM2-1.2B. A prefix goes on from a copy of
it, in memory or in the prompt cache: at the end of a prompt or an answer, or every 128 to 512 tokens. On a GPU
a sequence has two of them: a step reads one and writes the other.

**Gemma 4** has such a table in E2B and E4B. Its layers of full attention have larger heads than those with a window, and a
row of the cache has room for the larger of both: 512 elements of keys in E2B, of which layers with a window use 256.

## Served

A class with a slash is served with the text model of the type after it. **Pictures in chats** are read by the classes
`…ForConditionalGeneration` that are not *text only*, with the extra `transformers`, whose part is loaded for the first one
([what they may be](contract.md#2-http)). Granite vision is a LLaVA-NeXT. Where the tokens of a picture see each other
(Gemma 3, Gemma 4 31B and 26B-A4B, PaliGemma), one step computes all of it.

| `architectures` | models | `architectures` | models | `architectures` | models | `architectures` | models |
|---|---|---|---|---|---|---|---|
"""
BY_TRANSFORMERS = """
## Computed by transformers

With the extra (`pip install 'armature-serve[transformers]'`) the library of that name computes every other class of its
causal mapping and its mapping from text to text, with our scheduler, sampling and APIs; `--engine transformers` asks for
it also where a family is native. On processors its linear layers are held in BF16 by our forms, with `--precision int8`
or `int4` rounded to nearest, or by torchao (`--quantization`). Code of a checkpoint's own is never run
(`trust_remote_code` stays off). `python -m tools.transformers_classes` compares greedy text with `generate`'s, alone and
in a crowd: {causal} causal classes and {text} others pass. Qwen2-Audio, Voxtral and their like read texts alone.

A model from text to text reads a source: the prompt, or a chat's last message of the user. `source_lang` and `target_lang`
are codes of its tokenizer (`fra_Latn`, `fr_XX`, `fr`), or of a task in config.json's `task_specific_params`, whose prefix
begins the text. Defaults are those of `generate`: the likeliest text, with generation_config.json's beams, lengths and
forced tokens; `use_beam_search: false` or a temperature turns its beams off.
"""
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


def short(name: str) -> str:
    return name.removesuffix("ForCausalLM").replace("ForConditionalGeneration", " (text to text)")


def by_transformers() -> str:
    results: dict[str, str] = json.loads(RESULTS.read_text(encoding="utf-8"))
    causal, text = (
        f"{sum(is_served(results[name]) for name in names)} of {len(names)}"
        for names in (results.keys() & names_in(CAUSAL), results.keys() & names_in(SEQ_TO_SEQ))
    )
    failing: dict[str, list[str]] = {}
    for name, result in results.items():
        if not is_served(result):
            failing.setdefault(result.partition(":")[0], []).append(short(name))
    said = "Do not pass: " + "; ".join(f"{why}: {', '.join(names)}" for why, names in failing.items()) + "."
    before = BY_TRANSFORMERS.format(causal=causal, text=text).rstrip("\n")
    return f"{before}\n\n{fill(said, 120)}\n"


def main(arguments: list[str]) -> int:
    return write_or_check(arguments, TARGET, page())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
