"""Train a small hybrid, to see what rounding costs a model with a recurrent state: `python -m tools.train_hybrid DIR`.

It has Qwen 3.5's layers, three of the gated delta rule for each one of attention, more value heads than key heads, and
the demo's tokenizer. The text is the docstrings of Python's library; `armature bench quality` reads another text of
Python's. Takes some minutes of one core. Needs transformers, which `make venv` installs.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

DEMO = Path(__file__).resolve().parent.parent / "app" / "demo" / "llama"
TOKENS, ROWS, RATE = 128, 8, 2e-3  # of a step
STATE = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim")


def text_ids() -> torch.Tensor:
    tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = (
        found for file in files for found in re.findall(r'"""(.*?)"""', file.read_text("utf-8", "ignore"), re.DOTALL)
    )
    return torch.tensor([token for text in texts for token in tokenizer.encode(text).ids])


def train(steps: int) -> Qwen3_5ForCausalLM:
    sizes = {"vocab_size": 2048, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    state = {f"linear_{name}": size for name, size in zip(STATE, (4, 8, 32, 32), strict=True)}
    tokens = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 5, "tie_word_embeddings": True}
    model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**sizes, **heads, **state, **tokens, max_position_embeddings=2048))
    optimizer, ids = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.01), text_ids()
    print(f"{model.num_parameters():,} weights, {len(ids):,} tokens of text", flush=True)
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = RATE * min(1, (step + 1) / 30) * max(0.05, 1 - step / steps)
        rows = torch.stack([ids[at : at + TOKENS] for at in torch.randint(len(ids) - TOKENS, (ROWS,)).tolist()])
        optimizer.zero_grad()
        loss = model(rows, labels=rows).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1} of {steps}: loss {loss.item():.3f}", flush=True)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, default=600)
    given = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)  # two threads are slower on products this small
    train(given.steps).to(torch.bfloat16).save_pretrained(given.directory)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, given.directory)
    print(given.directory)


if __name__ == "__main__":
    main()
