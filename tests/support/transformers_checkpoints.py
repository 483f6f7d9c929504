"""Tiny random checkpoints of transformers' classes that generate text, with a byte-level tokenizer."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch

from app.messages import Generate, RequestFailed, SamplingParams, SequenceFinished, TokensReady
from served_families import SERVED
from tiny_checkpoints import write_tokenizer

# Values by the names that configurations use; only those that a class has are given to it.
TINY: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "decoder_vocab_size", "vocab_size_per_layer_input", "unpadded_vocab_size"), 320),
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "emb_dim", "embedding_dim", "attention_hidden_size"), 32),
    **dict.fromkeys(("embedding_size", "input_embedding_size", "output_embedding_size", "word_embed_proj_dim"), 32),
    **dict.fromkeys(("lru_width", "backbone_hidden_size", "mamba_d_ssm", "cross_attention_hidden_size"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 4),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"), 4),
    **dict.fromkeys(("decoder_attention_heads", "encoder_attention_heads", "num_decoder_attention_heads"), 4),
    **dict.fromkeys(("num_encoder_attention_heads", "swa_num_attention_heads", "mamba_n_heads", "mamba_num_heads"), 4),
    **dict.fromkeys(("linear_num_key_heads", "linear_num_value_heads", "linear_num_heads", "n_mamba_heads"), 2),
    **dict.fromkeys(("num_key_value_heads", "swa_num_key_value_heads", "num_kv_heads", "indexer_kv_heads"), 2),
    **dict.fromkeys(("head_dim", "dim_head", "d_head", "swa_head_dim", "kv_channels", "attention_head_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim", "linear_head_dim", "index_head_dim"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "indexer_head_dim", "global_head_dim"), 8),
    **dict.fromkeys(("attention_head_dim", "d_rel", "dim_model_base"), 8),
    **dict.fromkeys(
        ("kv_lora_rank", "q_lora_rank", "o_lora_rank", "laurel_rank", "gated_norm_rank", "adapter_rank"), 8
    ),
    **dict.fromkeys(("index_n_heads", "indexer_n_heads", "mamba_n_groups", "mamba_ngroups", "n_groups"), 2),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "dff", "dim_ff"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "shared_intermediate_size"), 24),
    **dict.fromkeys(("expert_ffn_hidden_size", "ffn_hidden_size", "moe_shared_expert_intermediate_size"), 48),
    **dict.fromkeys(("intermediate_size_mlp", "dense_intermediate_size", "prefix_dense_intermediate_size"), 48),
    **dict.fromkeys(("shared_experts_intermediate_size", "feed_forward_size", "d_inner", "n_inner"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts"), 1),
    **dict.fromkeys(("first_k_dense_replace", "num_dense_layers"), 1),
    **dict.fromkeys(("state_size", "ssm_state_size", "mamba_d_state", "hidden_size_per_layer_input"), 8),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 16),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_target_positions"), 256),
    **dict.fromkeys(("max_source_positions", "seq_length", "context_length"), 256),
    **dict.fromkeys(("sliding_window", "window_size", "attention_window_size", "local_attention"), 6),
    "mamba_expand": 2,
    "rotary_dim": 4,
    "index_topk": 64,
    "bos_token_id": 0,
    "decoder_start_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
# What the table above does not make small, or not valid, by class.
_LAYERS = ["linear_attention", "full_attention"] * 2
_LAYERS_OF_ZAMBA = ["linear_attention", "hybrid"]
SPECIAL: dict[str, dict[str, Any]] = {
    "BambaForCausalLM": {"attn_layer_indices": [1, 3]},
    "BailingHybridForCausalLM": {"layer_group_size": 2},
    "DbrxForCausalLM": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "KimiLinearForCausalLM": {"layer_types": _LAYERS},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 2},
    "Mamba2ForCausalLM": {"num_heads": 4, "head_dim": 16},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 2]]},
    "Gemma3nForCausalLM": SERVED["Gemma3nForCausalLM"],
    "GraniteMoeHybridForCausalLM": {"layer_types": _LAYERS},
    "ReformerModelWithLMHead": {
        "is_decoder": True,
        "axial_pos_shape": [16, 16],
        "axial_pos_embds_dim": [16, 16],
        "attn_layers": ["local"] * 4,
    },
    "ProphetNetForCausalLM": {"pad_token_id": 0},
    "ProphetNetForConditionalGeneration": {"pad_token_id": 0},
    "ZambaForCausalLM": {
        "num_hidden_layers": 6,
        "layers_block_type": [*_LAYERS_OF_ZAMBA, "linear_attention"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
    },
    "Zamba2ForCausalLM": {"num_hidden_layers": 6, "layers_block_type": [*_LAYERS_OF_ZAMBA, "linear_attention"] * 2},
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
    "XLMWithLMHeadModel": {"causal": True},
    "XmodForCausalLM": {"languages": ["en_XX"], "default_language": "en_XX"},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16},
}


def tiny_values(config_class: Any, architecture: str) -> dict[str, Any]:
    """The values of a tiny configuration, with its sections."""
    names = set(inspect.signature(config_class.__init__).parameters)
    values = {name: value for name, value in TINY.items() if name in names}
    if "kv_lora_rank" in names and "num_key_value_heads" in names:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if getattr(config_class, "sub_configs", {}):
        default = config_class()
        for name in config_class.sub_configs:
            section = getattr(default, name, None)
            if hasattr(section, "model_type"):
                own = tiny_values(type(section), f"{architecture}.{name}")
                values[name] = own | ({"model_type": section.model_type} if section.model_type else {})
    return values | SPECIAL.get(architecture, {})


def make_model(architecture: str, seed: int = 0) -> Any:
    """A tiny model whose weights all matter: norms and biases are random too, unless that is not finite."""
    import transformers

    kind = getattr(transformers, architecture)
    config_class = config_of(architecture)
    config = config_class(**tiny_values(config_class, architecture))
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 0  # as in published checkpoints
    model = kind(config).eval()
    fresh = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2 and parameter.shape[0] >= 256:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
            elif parameter.dim() == 2 and not name.endswith("A_log"):
                parameter.copy_(torch.randn_like(parameter) / min(parameter.shape) ** 0.5)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.1)
        ids = torch.tensor([[5, 6, 7, 8]])
        logits = model(input_ids=ids, **({"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})).logits
    if not bool(logits.isfinite().all()):
        model.load_state_dict(fresh)
    return model


def config_of(architecture: str) -> Any:
    import transformers
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    )

    tables = (MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    types = [kind for table in tables for kind, name in table.items() if name == architecture]
    return getattr(transformers, architecture).config_class or transformers.CONFIG_MAPPING[types[0]]


def write_transformers_checkpoint(directory: Path, architecture: str, seed: int = 0) -> Any:
    """Write a tiny checkpoint with a tokenizer, and return its model."""
    import transformers

    model = make_model(architecture, seed)
    model.save_pretrained(directory)
    write_tokenizer(directory)
    if model.config.is_encoder_decoder:
        model = type(model).from_pretrained(directory).eval()  # its sinusoids are made anew, not saved
    else:
        # The configuration's own values are those of a request here, apart from forced tokens.
        last = model.generation_config.forced_eos_token_id
        model.generation_config = transformers.GenerationConfig(forced_eos_token_id=last)
    return model


PROMPTS = ((5, 6, 7, 8, 9, 10, 11), (100, 200, 300), tuple(range(20, 51)))
NUM_TOKENS = 10


def build_engine(directory: Path, **settings: Any) -> Any:
    """The engine that the server would build for the checkpoint, computed by transformers."""
    from app.engine.build import BuildRequest, build
    from app.server.prepare import prepare
    from app.settings import Settings

    usual = {"engine": "transformers", "precision": "fp32", "threads": 1, "cache_dir": directory / "cache"}
    prepared = prepare(Settings(model=directory, **{**usual, **settings}))
    return build(BuildRequest(prepared.checkpoint, prepared.plan))


def greedy_ids(engine: Any, prompts: Any, max_tokens: int = NUM_TOKENS) -> list[list[int]]:
    """The completions of prompts that run together."""
    return completions(engine, prompts, SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True))


def completions(engine: Any, prompts: Any, params: SamplingParams) -> list[list[int]]:
    """The completions of prompts that run together, without the tokens that end them."""
    found: dict[str, list[int]] = {str(place): [] for place in range(len(prompts))}
    for place, prompt in enumerate(prompts):
        assert engine.add(Generate(str(place), tuple(prompt), params, arrived_at=0.0)) == []
    while engine.has_work:
        for event in engine.step():
            assert not isinstance(event, RequestFailed), event.error
            if isinstance(event, TokensReady | SequenceFinished):
                found[event.request_id] += event.token_ids
    return list(found.values())


def generated_ids(model: Any, prompt: Any, max_tokens: int = NUM_TOKENS) -> list[int]:
    """The completion by the library's own `generate`."""
    ids = torch.tensor([prompt])
    options = {
        "max_new_tokens": max_tokens,
        "do_sample": False,
        "num_beams": 1,
        "eos_token_id": None,
        "pad_token_id": 1,
    }
    start = 1 if model.config.is_encoder_decoder else len(prompt)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, start:].tolist()


def beam_ids(model: Any, prompt: Any, width: int = 3, **options: Any) -> list[int]:
    """The best of `generate`'s beams, without the token that ends it."""
    ids = torch.tensor([prompt])
    options = {"num_beams": width, "do_sample": False, "pad_token_id": 1, **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()[1:]
    return found[:-1] if found[-1] in options["eos_token_id"] else found


def differing_prompts(engine: Any, model: Any) -> list[str]:
    """Where the engine's greedy completions differ from `generate`'s: alone, and with the others."""
    wanted = [generated_ids(model, prompt) for prompt in PROMPTS]
    alone = [greedy_ids(engine, [prompt])[0] for prompt in PROMPTS]
    crowd = greedy_ids(engine, PROMPTS)
    places = range(len(PROMPTS))
    return [f"{place} alone" for place in places if alone[place] != wanted[place]] + [
        f"{place} in a crowd" for place in places if crowd[place] != wanted[place]
    ]
