"""The families of decoders with LayerNorm, most of them older, with names of tensors of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from app.models.decoders import family_values as values
from app.models.decoders.family import DecoderFamily, layer_names
from app.models.decoders.layer_config import HeadNormConfig, NormConfig

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
_GPT2_LAYER = {"attn.c_attn": "self_attn.qkv_proj", "attn.c_proj": "self_attn.o_proj", **_GPT_NORMS, **_FC_MLP}
_NEOX_MLP = {"mlp.dense_h_to_4h": "mlp.up_proj", "mlp.dense_4h_to_h": "mlp.down_proj"}
_FALCON_LAYER = {
    "self_attention.query_key_value": "self_attn.qkv_proj",
    "self_attention.dense": "self_attn.o_proj",
    "input_layernorm": "input_layernorm",
    "post_attention_layernorm": "post_attention_layernorm",
    **_NEOX_MLP,
}
_FAIRSEQ_LAYER = {
    "self_attn.out_proj": "self_attn.o_proj",
    "self_attn_layer_norm": "input_layernorm",
    "final_layer_norm": "post_attention_layernorm",
    "fc1": "mlp.up_proj",
    "fc2": "mlp.down_proj",
}
_QKV = ("q_proj", "k_proj", "v_proj")

_GPT2 = DecoderFamily(
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
        **values.biases(True),
    },
    read=values.gpt2,
    prefixes={"transformer.": ""},
    names={**_GPT_TOP, **layer_names("h", _GPT2_LAYER)},
    computed=(".attn.bias", ".attn.masked_bias"),
    transposed=True,
)
_GPTJ = DecoderFamily(
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
)
_COHERE = DecoderFamily(
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
)
_FALCON = DecoderFamily(
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
            {**_FALCON_LAYER, "ln_attn": "input_layernorm", "ln_mlp": "post_attention_layernorm"},
        ),
    },
)
_BIOGPT = DecoderFamily(
    model_type="biogpt",
    title="BioGPT",
    tie_embeddings=True,
    activation=("hidden_act", "gelu"),
    fields={"is_gated": False, **values.biases(True)},
    read=values.biogpt,
    prefixes={"biogpt.": "model.", "output_projection.": "lm_head."},
    names={"model.layer_norm": "model.norm", **layer_names("model.layers", _FAIRSEQ_LAYER)},
)

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
            **values.biases(True),
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
    "FalconForCausalLM": _FALCON,
    "BloomForCausalLM": replace(
        _FALCON,
        model_type="bloom",
        title="BLOOM, BLOOMZ",
        aliases={"hidden_size": "n_embed", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
        activation=("activation_function", "gelu_new"),
        fields={
            "is_gated": False,
            "fused_qkv": True,
            "qkv_layout": "grouped",
            "embedding_norm": True,
            **values.biases(True),
        },
        read=values.bloom,
        names={
            "word_embeddings": "model.embed_tokens",
            "word_embeddings_layernorm": "model.embed_norm",
            "ln_f": "model.norm",
            **layer_names("h", _FALCON_LAYER),
        },
    ),
    "MptForCausalLM": DecoderFamily(
        model_type="mpt",
        title="MPT",
        aliases={"hidden_size": "d_model", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"},
        tie_embeddings=True,
        norm=_WITHOUT_BIAS,
        norm_eps="layer_norm_epsilon",
        eps=1e-5,
        activation=("activation_function", "gelu"),
        fields={"is_gated": False, "fused_qkv": True},
        read=values.mpt,
        prefixes={"transformer.": ""},
        names={
            "wte": "model.embed_tokens",
            "norm_f": "model.norm",
            **layer_names(
                "blocks",
                {
                    "attn.Wqkv": "self_attn.qkv_proj",
                    "attn.out_proj": "self_attn.o_proj",
                    "norm_1": "input_layernorm",
                    "norm_2": "post_attention_layernorm",
                    "ffn.up_proj": "mlp.up_proj",
                    "ffn.down_proj": "mlp.down_proj",
                },
            ),
        },
    ),
    "GPT2LMHeadModel": _GPT2,
    "GPTBigCodeForCausalLM": replace(
        _GPT2,
        model_type="gpt_bigcode",
        title="StarCoder 1, SantaCoder",
        activation=("activation_function", "gelu_pytorch_tanh"),
        read=values.gpt_bigcode,
        transposed=False,
    ),
    "GPTNeoForCausalLM": replace(
        _GPT2,
        model_type="gpt_neo",
        title="GPT-Neo",
        aliases={"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
        fields={"is_gated": False, "output_bias": True, "mlp_bias": True},
        read=values.gpt_neo,
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
        transposed=False,
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
    "PersimmonForCausalLM": DecoderFamily(
        model_type="persimmon",
        title="Persimmon",
        partial=0.5,
        theta=25_000.0,
        norm=_LAYER_NORM,
        norm_eps="layer_norm_eps",
        eps=1e-5,
        head_norm=HeadNormConfig("layer", has_bias=True),
        activation=("hidden_act", "relu2"),
        fields={
            "is_gated": False,
            "fused_qkv": True,
            "qkv_layout": "grouped",
            **values.biases(True),
        },
        read=values.persimmon,
        names={
            "model.final_layernorm": "model.norm",
            **layer_names(
                "model.layers",
                {
                    "self_attn.query_key_value": "self_attn.qkv_proj",
                    "self_attn.dense": "self_attn.o_proj",
                    "self_attn.q_layernorm": "self_attn.q_norm",
                    "self_attn.k_layernorm": "self_attn.k_norm",
                    **_NEOX_MLP,
                },
            ),
        },
    ),
    "GPTJForCausalLM": _GPTJ,
    "CodeGenForCausalLM": replace(
        _GPTJ,
        model_type="codegen",
        title="CodeGen 1 and 2",
        fields={**_GPTJ.fields, "fused_qkv": True, "qkv_layout": "quarters"},
        read=values.codegen,
        names={
            **{name: ours for name, ours in _GPTJ.names.items() if not name.endswith(_QKV)},
            **layer_names("h", {"attn.qkv_proj": "self_attn.qkv_proj"}),
        },
        computed=(*_GPTJ.computed, ".attn.causal_mask"),
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
            **layer_names("model.layers", _FAIRSEQ_LAYER),
        },
    ),
    "BioGptForCausalLM": _BIOGPT,
    "XGLMForCausalLM": replace(
        _BIOGPT,
        model_type="xglm",
        title="XGLM",
        aliases={
            "hidden_size": "d_model",
            "num_hidden_layers": "num_layers",
            "num_attention_heads": "attention_heads",
            "intermediate_size": "ffn_dim",
        },
        activation=("activation_function", "gelu"),
        read=values.xglm,
        prefixes={},
        computed=(".embed_positions.weights",),
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
    "CohereForCausalLM": _COHERE,
    "Cohere2ForCausalLM": replace(
        _COHERE,
        model_type="cohere2",
        title="Command R7B, Command A",
        window=4096,
        theta=10_000.0,
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
