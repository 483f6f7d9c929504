"""A checkpoint that calls a tool of the request, and ends after the tool's result: a test of agents needs no real model.

Every weight is 0 or 1: the next token depends on the last one alone. The chat template ends with a token that begins a
text: a call of the first tool that it knows, the sentence after a result, or without tools an edited file.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from app.models.decoders.config import ModelConfig
from app.models.decoders.shapes import tensors_of
from tiny_checkpoints import config_values

FILE, CONTENT = "made.txt", "fox"
COMMAND = f"echo {CONTENT} > {FILE}"
DONE = "The tool has run, so nothing is left to do."
EDIT = f"I write the file.\n\n{FILE}\n```\n{CONTENT}\n```\n"  # as aider asks for whole files
SHELL = {"command": COMMAND, "description": "Write a file"}
# A tool's name and the arguments with which it writes the file; agents name the tool that runs commands differently.
CALLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},  # Codex
    "Bash": SHELL,  # Claude Code, Continue
    "bash": SHELL,  # opencode, pi
    "run_shell_command": {**SHELL, "is_background": False},  # qwen-code
    "run_commands": {"commands": [COMMAND]},  # Cline
    "write_note": {"text": CONTENT},  # the tests' own tool, for SDKs
}
END, START = "<|im_end|>", "<|im_start|>"
PIECE = 7  # characters of a token, so that a text comes in several events
CONTEXT = 2**19  # an agent's system prompt and tools have up to 150,000 bytes, and each byte is a token
TEMPLATE = """
{%- if tools %}<|im_start|>system
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{{ call.function | tojson }}
</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{%- set known = tools | default([], true) | map(attribute='function.name') | select('in', NAMES) | list %}
{%- if messages | selectattr('role', 'equalto', 'tool') | list %}<|after a result|>
{%- elif known %}{{ '<|call of ' ~ known[0] ~ '|>' }}
{%- else %}<|without tools|>
{%- endif %}
{%- endif %}"""


def write_scripted_checkpoint(directory: Path) -> Path:
    """Write the checkpoint into the directory and return it."""
    directory.mkdir(parents=True, exist_ok=True)
    scripts = {f"<|call of {name}|>": _call(name, arguments) for name, arguments in CALLS.items()}
    scripts |= {"<|after a result|>": DONE, "<|without tools|>": EDIT}
    vocabulary = [END, START, *scripts, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    following: dict[int, int] = {}
    for marker, text in scripts.items():
        last = vocabulary.index(marker)
        for piece in _pieces(_as_symbols(text), vocabulary):
            following[last] = len(vocabulary)
            last = len(vocabulary)
            vocabulary.append(piece)
        following[last] = vocabulary.index(END)
    assert len(set(vocabulary)) == len(vocabulary)
    size = len(vocabulary) + -len(vocabulary) % 64
    values = config_values(
        "MistralForCausalLM",  # with its window, attention to a long prompt takes little time
        vocab_size=size, hidden_size=size, num_hidden_layers=1, max_position_embeddings=CONTEXT, sliding_window=32,
        num_attention_heads=1, num_key_value_heads=1, bos_token_id=None, eos_token_id=0,
    )  # fmt: skip
    tensors = {
        name: torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        for name, shape in tensors_of(ModelConfig.from_hf(values)).items()
    }
    tensors["model.embed_tokens.weight"] = torch.eye(size)
    for token, then in following.items():
        tensors["lm_head.weight"][then, token] = 4.0  # far above the other logits at any usual temperature
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", values)
    _write_json(directory / "generation_config.json", {"eos_token_id": 0})
    _write_tokenizer(directory, vocabulary, [END, START, *scripts])
    return directory


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _as_symbols(text: str) -> str:
    """Return a text as byte-level tokenizers hold it, with a symbol for each byte."""
    return "".join(part for part, _ in pre_tokenizers.ByteLevel(False, use_regex=False).pre_tokenize_str(text))


def _pieces(text: str, taken: Collection[str]) -> list[str]:
    """Divide a text into pieces that are not taken yet: a token stands for one place of one text."""
    pieces: list[str] = []
    start = 0
    while start < len(text):
        end = start + PIECE
        while text[start:end] in taken and end < len(text):
            end += 1
        pieces.append(text[start:end])
        start = end
    while pieces[-1] in taken:
        pieces[-2:] = [pieces[-2] + pieces[-1]]
    return pieces


def _write_tokenizer(directory: Path, vocabulary: list[str], special: list[str]) -> None:
    """Write a byte-level tokenizer. It has no merges, so that the texts' pieces are written and never read."""
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(vocabulary)}, merges=[]))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    names = json.dumps(list(CALLS)).replace('"', "'")
    words = {"eos_token": END, "chat_template": TEMPLATE.strip().replace("NAMES", names)}
    _write_json(directory / "tokenizer_config.json", words)


def _write_json(path: Path, values: Any) -> None:
    path.write_text(json.dumps(values, indent=1), encoding="utf-8")
