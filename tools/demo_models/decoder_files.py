"""The files of the demo decoder: an ordinary Hugging Face directory, written and read back."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from tools.demo_models.decoder_net import Llama, Shape
from tools.demo_models.storybook.chat import Turn

SPECIAL = ("<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|pad|>")
BEGIN, END, PAD = 0, 1, 5
ROLES = {"system": 2, "user": 3, "assistant": 4}
CHAT_TEMPLATE = """{{- bos_token }}
{%- for message in messages %}
    {%- if message['role'] not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('Unknown role ' ~ message['role'] ~ ': use system, user or assistant.') }}
    {%- endif %}
    {{- '<|' ~ message['role'] ~ '|>' ~ (message['content'] | trim) ~ eos_token }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The network and the tokenizer of a directory."""

    net: Llama
    tokenizer: Tokenizer


def train_tokenizer(texts: list[str], vocab_size: int) -> Tokenizer:
    """Train a byte-level BPE. Every byte has a token, so any text survives the round trip."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[BEGIN]} $A",
        pair=f"{SPECIAL[BEGIN]} $A {SPECIAL[BEGIN]} $B",
        special_tokens=[(SPECIAL[BEGIN], BEGIN)],
    )
    return tokenizer


def document_ids(tokenizer: Tokenizer, turns: list[Turn]) -> list[int]:
    """Return the token ids of a document as the chat template and the tokenizer produce them, including its end."""
    ids = [BEGIN]
    for turn in turns:
        ids += [ROLES[turn.role]] if turn.role else []
        ids += [*tokenizer.encode(turn.text, add_special_tokens=False).ids, END]
    return ids


def save(directory: Path, net: Llama, tokenizer: Tokenizer) -> None:
    """Write everything except the README."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.bfloat16).contiguous() for name, value in net.named_parameters()}
    # A server may have the old file mapped, so the new file replaces it instead of overwriting it.
    fresh = directory / "model.safetensors.new"
    save_file(weights, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)
    fresh.replace(directory / "model.safetensors")
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write(directory / "config.json", _config(net.shape))
    _write(directory / "generation_config.json", _generation_config())
    _write(directory / "tokenizer_config.json", _tokenizer_config(net.shape))


def load(directory: Path) -> Checkpoint:
    """Read a directory in FP32."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        max_positions=config["max_position_embeddings"],
        rope_theta=config["rope_theta"],
        rms_norm_eps=config["rms_norm_eps"],
    )
    net = Llama(shape)
    net.load_state_dict({name: value.float() for name, value in load_file(directory / "model.safetensors").items()})
    return Checkpoint(net.eval(), Tokenizer.from_file(str(directory / "tokenizer.json")))


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.max_positions,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "torch_dtype": "bfloat16",
    }


def _generation_config() -> dict[str, object]:
    return {
        "bos_token_id": BEGIN,
        "eos_token_id": END,
        "pad_token_id": PAD,
        "do_sample": True,
        "temperature": 0.8,
        "top_p": 0.95,
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": shape.max_positions,
        "bos_token": SPECIAL[BEGIN],
        "eos_token": SPECIAL[END],
        "pad_token": SPECIAL[PAD],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def _write(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
