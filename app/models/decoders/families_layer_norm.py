"""The families of decoders with LayerNorm, most of them older, with names of tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping

from app.models.decoders import family_values as values
from app.models.decoders.family import DecoderFamily, layer_names
from app.models.decoders.layer_config import NormConfig

_LAYER_NORM = NormConfig("layer", has_bias=True)
_WITHOUT_BIAS = NormConfig("layer")
_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
}
_GPT_TOP = {"wte": "model.embed_tokens", "wpe": "model.embed_positions", "ln_f": "model.norm"}
_GPT_NORMS = {"ln_1": "input_layernorm", "ln_2": "post_attention_layernorm"}
_FC_MLP = {"mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
_NEOX_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_QKV = ("q_proj", "k_proj", "v_proj")

LAYER_NORM_FAMILIES: Mapping[str, DecoderFamily] = {
    "PhiForCausalLM": DecoderFamily(
        model_type="phi",
        title="Phi-1, Phi-1.5, Phi-2",
        partial=0.5,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        activation=("hidden_act", "gelu_new"),
        fields={
            "is_gated": False,
            "placement": "parallel",
            "shares_norm": True,
            "logits_bias": True,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        },
        read=values.phi,
        names={
            "model.final_layernorm": "model.norm",
            **layer_names(
                "model.layers",
                {"self_attn.dense": "self_attn.o_proj", "mlp.fc1": "mlp.up_proj", "mlp.fc2": "mlp.down_proj"},
            ),
        },
    ),
    "FalconForCausalLM": DecoderFamily(
        model_type="falcon",
        title="Falcon (7B, 40B, 180B, Falcon 2)",
        aliases={"num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "num_kv_heads": "n_head_kv"},
        tie_embeddings=True,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        activation=("activation", "gelu"),
        fields={"is_gated": False, "fused_qkv": True},
        read=values.falcon,
        prefixes={"transformer.": ""},
        names={
            "word_embeddings": "model.embed_tokens",
            "ln_f": "model.norm",
            **layer_names(
                "h",
                {
                    "self_attention.query_key_value": "self_attn.qkv_proj",
                    "self_attention.dense": "self_attn.o_proj",
                    "input_layernorm": "input_layernorm",
                    "ln_attn": "input_layernorm",
                    "post_attention_layernorm": "post_attention_layernorm",
                    "ln_mlp": "post_attention_layernorm",
                    **_NEOX_MLP,
                },
            ),
        },
    ),
    "GPT2LMHeadModel": DecoderFamily(
        model_type="gpt2",
        title="GPT-2",
        aliases=_GPT,
        tie_embeddings=True,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        activation=("activation_function", "gelu_new"),
        fields={
            "is_gated": False,
            "fused_qkv": True,
            **dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True),
        },
        read=values.gpt2,
        prefixes={"transformer.": ""},
        names={
            **_GPT_TOP,
            **layer_names(
                "h",
                {"attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj", **_GPT_NORMS, **_FC_MLP},
            ),
        },
        computed=(".attn.bias", ".attn.masked_bias"),
        transposed=True,
    ),
    "GPTNeoForCausalLM": DecoderFamily(
        model_type="gpt_neo",
        title="GPT-Neo",
        aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        tie_embeddings=True,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        activation=("activation_function", "gelu_new"),
        fields={"is_gated": False, "output_bias": True, "mlp_bias": True},
        read=values.gpt_neo,
        prefixes={"transformer.": ""},
        names={
            **_GPT_TOP,
            **layer_names(
                "h",
                {
                    **{f"attn.attention.{name}": f"self_attn.{name}" for name in _QKV},
                    "attn.attention.out_proj": "self_attn.o_proj",
                    **_GPT_NORMS,
                    **_FC_MLP,
                },
            ),
        },
        computed=(".attn.attention.bias", ".attn.attention.masked_bias"),
    ),
    "GPTNeoXForCausalLM": DecoderFamily(
        model_type="gpt_neox",
        title="GPT-NeoX, Pythia",
        aliases={"partial_rotary_factor": "rotary_pct", "rope_theta": "rotary_emb_base"},
        partial=0.25,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        activation=("hidden_act", "gelu"),
        fields={"is_gated": False, "fused_qkv": True, "qkv_layout": "grouped", "mlp_bias": True},
        read=values.gpt_neox,
        prefixes={"gpt_neox.": "", "embed_out.": "lm_head."},
        names={
            "embed_in": "model.embed_tokens",
            "final_layer_norm": "model.norm",
            **layer_names(
                "layers",
                {
                    "attention.query_key_value": "self_attn.qkv_proj",
                    "attention.dense": "self_attn.o_proj",
                    "input_layernorm": "input_layernorm",
                    "post_attention_layernorm": "post_attention_layernorm",
                    **_NEOX_MLP,
                },
            ),
        },
        computed=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    ),
    "GPTJForCausalLM": DecoderFamily(
        model_type="gptj",
        title="GPT-J",
        aliases=_GPT,
        interleaved=True,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        attention_biases="none",
        activation=("activation_function", "gelu_new"),
        fields={
            "is_gated": False,
            "mlp_bias": True,
            "logits_bias": True,
            "placement": "parallel",
            "shares_norm": True,
        },
        read=values.gptj,
        prefixes={"transformer.": ""},
        names={
            **_GPT_TOP,
            **layer_names(
                "h",
                {
                    **{f"attn.{name}": f"self_attn.{name}" for name in _QKV},
                    "attn.out_proj": "self_attn.o_proj",
                    "mlp.fc_in": "mlp.up_proj",
                    "mlp.fc_out": "mlp.down_proj",
                    **_GPT_NORMS,
                },
            ),
        },
        computed=(".attn.bias", ".attn.masked_bias"),
    ),
    "OPTForCausalLM": DecoderFamily(
        model_type="opt",
        title="OPT (without 350M)",
        aliases={"intermediate_size": "ffn_dim"},
        tie_embeddings=True,
        activation=("activation_function", "relu"),
        fields={"is_gated": False},
        read=values.opt,
        prefixes={"model.decoder.": "model.", "decoder.": "model."},
        names={
            "model.final_layer_norm": "model.norm",
            **layer_names(
                "model.layers",
                {
                    "self_attn.out_proj": "self_attn.o_proj",
                    "self_attn_layer_norm": "input_layernorm",
                    "final_layer_norm": "post_attention_layernorm",
                    "fc1": "mlp.up_proj",
                    "fc2": "mlp.down_proj",
                },
            ),
        },
    ),
    "StableLmForCausalLM": DecoderFamily(
        model_type="stablelm",
        title="StableLM 2 and 3 (without 12B)",
        partial=0.25,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        read=values.stablelm,
    ),
    "Starcoder2ForCausalLM": DecoderFamily(
        model_type="starcoder2",
        title="StarCoder 2",
        tie_embeddings=True,
        norm=_LAYER_NORM,
        norm_eps="norm_epsilon",
        eps=1e-5,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        fields={"is_gated": False},
        slides=lambda config, layer: True,
        read=values.starcoder2,
        names=layer_names("model.layers", _FC_MLP),
    ),
    "CohereForCausalLM": DecoderFamily(
        model_type="cohere",
        title="Command R",
        tie_embeddings=True,
        theta=500_000.0,
        interleaved=True,
        norm=_WITHOUT_BIAS,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        fields={"placement": "parallel", "shares_norm": True},
        read=values.cohere,
    ),
    "Cohere2ForCausalLM": DecoderFamily(
        model_type="cohere2",
        title="Command R7B, Command A",
        window=4096,
        tie_embeddings=True,
        interleaved=True,
        norm=_WITHOUT_BIAS,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        fields={"placement": "parallel", "shares_norm": True},
        slides=lambda config, layer: (layer + 1) % config.integer("sliding_window_pattern", 4) != 0,
        read=values.cohere2,
    ),
    "NemotronForCausalLM": DecoderFamily(
        model_type="nemotron",
        title="Nemotron 3 and 4, Minitron",
        partial=0.5,
        norm=NormConfig("layer", offset=1.0, has_bias=True),
        norm_eps="norm_eps",
        eps=1e-5,
        has_mlp_bias=True,
        activation=("hidden_act", "relu2"),
        fields={"is_gated": False},
    ),
    "Jais2ForCausalLM": DecoderFamily(
        model_type="jais2",
        title="Jais 2",
        norm=_LAYER_NORM,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        activation=("hidden_act", "relu2"),
        fields={"is_gated": False},
        read=values.jais2,
    ),
}
