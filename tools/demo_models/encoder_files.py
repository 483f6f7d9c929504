"""The files of encoders: reads a teacher from a sentence-transformers directory and writes the demo encoder as one."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from tools.demo_models.encoder_net import Bert, Shape

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
MODULES = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")


def load(directory: Path) -> tuple[Bert, Tokenizer]:
    """Read a BERT in FP32, and its tokenizer without padding, truncating at the number of positions."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    shape = Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        max_positions=config["max_position_embeddings"],
        num_types=config["type_vocab_size"],
        eps=config["layer_norm_eps"],
    )
    net = Bert(shape)
    weights = {name: value.float() for name, value in load_file(directory / "model.safetensors").items()}
    net.load_state_dict({name: weights[name] for name in net.state_dict()})
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(min(256, shape.max_positions))
    return net.eval(), tokenizer


def smaller_tokenizer(tokenizer: Tokenizer, tokens: list[str], max_tokens: int) -> Tokenizer:
    """Return a tokenizer with the same WordPiece rules and only these tokens, in this order."""
    content = json.loads(tokenizer.to_str())
    ids = {token: number for number, token in enumerate(tokens)}
    content["model"]["vocab"] = ids
    content["added_tokens"] = [one | {"id": ids[one["content"]]} for one in content["added_tokens"]]
    for special in content["post_processor"]["special_tokens"].values():
        special["ids"] = [ids[special["id"]]]
    content["padding"], content["truncation"] = None, None
    smaller = Tokenizer.from_str(json.dumps(content))
    smaller.enable_truncation(max_tokens)
    return smaller


def save(directory: Path, net: Bert, tokenizer: Tokenizer) -> None:
    """Write everything except the README."""
    directory.mkdir(parents=True, exist_ok=True)
    weights = {name: value.detach().to(torch.float16).contiguous() for name, value in net.named_parameters()}
    # A server may have the old file mapped, so the new file replaces it instead of overwriting it.
    fresh = directory / "model.safetensors.new"
    save_file(weights, fresh, metadata={"format": "pt"})
    fresh.chmod(0o644)
    fresh.replace(directory / "model.safetensors")
    tokenizer.no_truncation()
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    _write(directory / "config.json", _config(net.shape))
    _write(directory / "tokenizer_config.json", _tokenizer_config(net.shape))
    _write(directory / "modules.json", _modules())
    _write(directory / "sentence_bert_config.json", {"max_seq_length": net.shape.max_positions, "do_lower_case": False})
    _write(directory / "1_Pooling" / "config.json", _pooling(net.shape))
    _write(directory / "config_sentence_transformers.json", _similarity())


def _config(shape: Shape) -> dict[str, object]:
    return {
        "architectures": ["BertModel"],
        "model_type": "bert",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "max_position_embeddings": shape.max_positions,
        "type_vocab_size": shape.num_types,
        "hidden_act": "gelu",
        "layer_norm_eps": shape.eps,
        "position_embedding_type": "absolute",
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "pad_token_id": 0,
        "torch_dtype": "float16",
    }


def _tokenizer_config(shape: Shape) -> dict[str, object]:
    names = {f"{token[1:-1].lower()}_token": token for token in SPECIAL}
    return {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": shape.max_positions, **names}


def _modules() -> list[dict[str, object]]:
    return [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{name}"}
        for number, (path, name) in enumerate(MODULES)
    ]


def _pooling(shape: Shape) -> dict[str, object]:
    modes = {"cls_token": False, "mean_tokens": True, "max_tokens": False, "mean_sqrt_len_tokens": False}
    return {"word_embedding_dimension": shape.hidden_size} | {
        f"pooling_mode_{mode}": used for mode, used in modes.items()
    }


def _similarity() -> dict[str, object]:
    return {"prompts": {}, "default_prompt_name": None, "similarity_fn_name": "cosine"}


def _write(path: Path, content: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
