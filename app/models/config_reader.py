"""Reads single values of a config.json and describes errors in them, for decoders and encoders.

Of the values that no reader asks for, some have no effect and some are refused (`unknown_keys`).
`tests/unit/models/test_config_keys.py` walks transformers' configuration classes of every family, and fails for a value
that is neither asked for nor listed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import CheckpointInvalid, NotNative

_REQUIRED = object()
# Models compute in FP32, whose smallest number with all digits is 1.2e-38. No real config comes near either.
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-37, 1e37
MAX_INTEGER = 2**40  # larger than any count in a real config
MAX_LAYERS = (
    # each layer is an object with a dozen tensors, so a damaged number could fill the memory before they are looked
    # up
    4096
)
_SECTIONS = ("text_config", "attn_config")  # sections of which each value is looked at
# Read only where another value asks for them: windows of a model whose windows are switched off, groups of experts, ...
FOLLOWED_WHERE_NEEDED = frozenset(
    "sliding_window max_window_layers sliding_window_pattern _sliding_window_pattern use_sliding_window no_rope_layers"
    " no_rope_layer_interval n_group topk_group num_kv_heads multi_query first_k_dense_replace full_attn_idxs"
    " original_max_position_embeddings intermediate_size hidden_act rope_scaling rope_parameters rope_theta num_labels"
    " problem_type id2label partial_rotary_factor qk_rope_head_dim max_sequence_length global_attn_every_n_layers"
    " local_attention attention_types num_key_value_heads head_dim num_experts parallel_attn"
    " moe_intermediate_size top_k_experts".split()
)
# They describe the file, its origin, or what it was for.
_ABOUT = (
    "architectures model_type transformers_version _name_or_path auto_map tokenizer_class task_specific_params torch_dtype dtype"
    " finetuning_task label2id quantization quantization_config sentence_transformers"
    " sbert_ce_default_activation_function vision_config audio_config use_return_dict return_dict torchscript unsloth_fixed"
    " unsloth_version model_name"
)
# Training, and the start of it.
_TRAINING = (
    "initializer_range initializer_factor init_std init_device embedding_initializer_range rescale_prenorm_residual"
    " initializer_cutoff_factor attention_dropout attention_probs_dropout_prob hidden_dropout hidden_dropout_prob dropout"
    " resid_pdrop embd_pdrop attn_pdrop emb_pdrop resid_dropout embed_dropout residual_dropout embedding_dropout ffn_dropout"
    " attn_dropout layerdrop mlp_dropout classifier_dropout classifier_dropout_prob summary_first_dropout qa_dropout seq_classif_dropout"
    " output_router_logits router_aux_loss_coef router_z_loss_coef aux_loss_alpha seq_aux input_jitter_noise"
    " router_jitter_noise use_auxfree sparse_prediction sparse_pred_ignore_index repad_logits_with_grad altup_coef_clip"
    " mtp_loss_scaling_factor activation_dropout gradient_checkpointing z_loss_coefficient time_step_rank time_step_min"
    " time_step_max time_step_floor linear_a_log_min linear_a_log_max linear_dt_min linear_dt_max linear_dt_init_floor"
)
# What other implementations compute with, and what they return. `pretraining_tp` splits sums, `slow_but_exact` and
# `reorder_and_upcast_attn` order them otherwise; `qk_head_dim` is a sum of two others.
_IMPLEMENTATION = (
    "use_cache output_attentions output_hidden_states chunk_size_feed_forward pretraining_tp ep_size attn_implementation"
    " _attn_implementation _attn_implementation_autoset attn_impl slow_but_exact reorder_and_upcast_attn qk_head_dim"
    " deterministic_flash_attn reference_compile use_flash_attn fused_bias_fc fused_dropout_add_ln use_xentropy"
    " pad_vocab_size_multiple unpad_inputs use_memory_efficient_attention pack_qkv norm_type embedding_fraction"
    " learned_pos_emb use_flash_rotary tie_encoder_decoder pruned_heads is_decoder"
    " max_cache_len cache_implementation enable_moe_fp32_combine attention_softmax_in_fp32"
    " scale_attention_softmax_in_fp32 n_ctx projector_hidden_act vision_feature_layer multimodal_projector_bias"
    " spatial_merge_size num_logits_to_keep mamba_chunk_size chunk_size mamba_ssm_dtype mamba_ssm_cache_dtype"
    " use_mamba_kernels residual_in_fp32"
)
# Beside the section of the text model: what the library reads pictures with, and copies of the text model's values.
_PICTURES = (
    "downsample_ratio image_grid_pinpoints image_seq_length scale_factor vision_aspect_ratio visual_indicator_token_ids"
    " vision_feature_select_strategy vocab_size projection_dim num_image_tokens downsample_factor projector_bias"
    " projector_hidden_size projector_use_layernorm"
)
# Tokens, which the tokenizer's files and generation_config.json decide; eos_token_id is read with these.
_TOKENS = (
    "bos_token_id eos_token_id pad_token_id eod_token_id sep_token_id cls_token_id mask_token_id unk_token_id"
    " decoder_start_token_id image_token_index image_token_id boi_token_index eoi_token_index boi_token_id"
    " eoi_token_id audio_token_id boa_token_id eoa_token_id eoa_token_index mm_tokens_per_image"
    " vision_soft_tokens_per_image audio_soft_tokens_per_image suppress_tokens begin_suppress_tokens"
    " forced_bos_token_id forced_eos_token_id bad_words_ids max_length min_length video_token_id"
    " video_token_index _pad_token_id image_start_token_id image_end_token_id video_start_token_id video_end_token_id"
    " vision_start_token_id vision_end_token_id do_sample temperature top_k top_p typical_p repetition_penalty"
    " length_penalty no_repeat_ngram_size num_beams num_beam_groups diversity_penalty num_return_sequences"
    " early_stopping encoder_no_repeat_ngram_size prefix remove_invalid_values exponential_decay_length_penalty"
    " return_dict_in_generate output_scores"
)
# The tensors show them: one that is not expected, or that is missing, is refused.
_TENSORS = "tie_word_embeddings attention_bias mlp_bias use_bias"
# Heads and layers that are not served: those that predict further tokens, answers or sums of a text.
_HEADS = (
    "num_nextn_predict_layers num_mtp_layers mtp_layer_types mtp_mlp_layer_types mtp_num_hidden_layers"
    " mtp_use_dedicated_embeddings summary_type summary_use_proj"
    " summary_activation summary_proj_to_labels summary_last_dropout decoder_bias classifier_bias classifier_pooling"
    " classifier_activation sinusoidal_pos_embds matryoshka_dimensions lora_adaptations lora_rank lora_dropout_p"
    " lora_alpha lora_main_params_trainable load_trained_adapters emb_pooler truncate_dim task_instructions"
)
WITHOUT_EFFECT = frozenset(" ".join((_ABOUT, _TRAINING, _IMPLEMENTATION, _PICTURES, _TOKENS, _TENSORS, _HEADS)).split())
# Names whose values change what is computed, with the values that do not. Any other value is refused in a family whose
# reader does not ask for the name.
REFUSED: Mapping[str, tuple[Any, ...]] = {
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "cross_attention_hidden_size": (),
    "use_bidirectional_attention": (False,),
    "attn_logit_softcapping": (),
    "final_logit_softcapping": (),
    "logit_softcapping": (),
    "clip_qkv": (),
    "use_qk_norm": (False,),
    "qk_layernorm": (False,),
    "embedding_multiplier": (1,),
    "residual_multiplier": (1,),
    "attention_multiplier": (),
    "logits_scaling": (1,),
    "logit_scale": (1,),
    "scale_emb": (1,),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "alibi": (False,),
    "use_alibi": (False,),
    "causal": (False,),
    "layer_norm_type": ("layer_norm",),
    "swiglu_limit": (),
    "swiglu_alpha": (),
    "attention_chunk_size": (),
    "use_sinks": (False,),
    "add_swa_attention_sink_bias": (False,),
    "logn_attention_scale": (False,),
    "logn_attention_clip1": (False,),
    "use_logn_attn": (False,),
    "use_dynamic_ntk": (False,),
    "attention_value_scale": (1,),
}


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """A JSON object with a name for messages; a null counts as absent, as in transformers.

    Every reader raises `CheckpointInvalid` if the value is missing without a default, or has the wrong type.
    """

    values: Mapping[str, Any]
    where: str = "config.json"

    def has(self, name: str) -> bool:
        return self.values.get(name) is not None

    def integer(
        self, name: str, default: int | object = _REQUIRED, at_least: int = 1, at_most: int = MAX_INTEGER
    ) -> int:
        """Return an integer in [at_least, at_most]; a float such as 2.0 is accepted."""
        value = self._get(name, default)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not at_least <= value <= at_most:
            raise self._wrong(name, f"an integer of {at_least} to {at_most:,}", value)
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, "a list of integers", value)
        return tuple(ConfigReader({name: item}, self.where).integer(name) for item in value)

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        return self.integer(name) if self.has(name) else default

    def number(self, name: str, default: float | object = _REQUIRED) -> float:
        """Return a number greater than 0 that FP32 holds with all its digits."""
        value = self._get(name, default)
        if not _is_finite(value) or value < _SMALLEST_NUMBER:
            bounds = f"a number greater than 0, of {_SMALLEST_NUMBER:g} to {_LARGEST_NUMBER:g}"
            raise self._wrong(name, bounds if _is_number(value) and value > 0 else "a number greater than 0", value)
        return float(value)

    def optional_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def boolean(self, name: str, default: bool | object = _REQUIRED) -> bool:
        value = self._get(name, default)
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def text(self, name: str, default: str | object = _REQUIRED) -> str:
        value = self._get(name, default)
        if not isinstance(value, str):
            raise self._wrong(name, "a string", value)
        return value

    def numbers(self, name: str, length: int) -> tuple[float, ...]:
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length or not all(map(_is_finite, value)):
            raise self._wrong(name, f"a list of {length} numbers", value)
        return tuple(float(item) for item in value)

    def texts(self, name: str, length: int) -> tuple[str, ...]:
        """Return a list of exactly `length` strings, one per layer."""
        value = self._get(name, _REQUIRED)
        if not isinstance(value, list) or len(value) != length or not all(isinstance(item, str) for item in value):
            raise self._wrong(name, f"a list of {length} strings, one a layer", value)
        return tuple(value)

    def section(self, name: str) -> ConfigReader:
        value = self.values.get(name) or {}
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object", value)
        return ConfigReader(value, f"{self.where}: {name}")

    def offset(self, name: str) -> float:
        value = self._get(name, _REQUIRED)
        if not _is_finite(value):
            raise self._wrong(name, "a number", value)
        return float(value)

    def _get(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        if value is not None:
            return value
        if default is _REQUIRED:
            raise CheckpointInvalid(f"{self.where}: {name} is missing.")
        return default

    def _wrong(self, name: str, wanted: str, value: Any) -> CheckpointInvalid:
        shown = repr(value)
        return CheckpointInvalid(f"{self.where}: {name} must be {wanted}, not {shown[:80]}.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_finite(value: Any) -> bool:
    """Return True for a number that FP32 can hold; JSON's integers have any length."""
    return _is_number(value) and abs(value) <= _LARGEST_NUMBER


class AskedValues(dict[str, Any]):
    """The values of a config.json that remember which of them were asked for."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.asked: set[str] = set()
        for name in _SECTIONS:
            if isinstance(values.get(name), Mapping):
                self[name] = AskedValues(values[name])

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)

    def not_asked(self, where: str = "") -> dict[str, Any]:
        """Return the values that no reader asked for, by name. In a section that was read, the name is SECTION.NAME."""
        rest: dict[str, Any] = {}
        for name, value in self.items():
            if name in self.asked and isinstance(value, AskedValues):
                rest |= value.not_asked(f"{where}{name}.")
            elif name not in self.asked:
                rest[f"{where}{name}"] = value
        return rest


def unknown_keys(
    values: AskedValues,
    where: str = "config.json",
    refused: Mapping[str, tuple[Any, ...]] = REFUSED,
    known: frozenset[str] = WITHOUT_EFFECT | FOLLOWED_WHERE_NEEDED,
) -> list[str]:
    """Return the names that no reader asked for and that no table has.

    Raises `CheckpointInvalid` if a value changes what is computed, and no reader asked for it.
    """
    unknown = []
    for place, value in values.not_asked().items():
        name = place if place in refused or place in known else place.rpartition(".")[2]
        if name in refused and value is not None and value not in refused[name]:
            raise NotNative(
                f"{where}: {place} is {str(value)[:80]}, which this architecture does not have here: it would be computed"
                " without it."
            )
        if name not in known and name not in refused:
            unknown.append(place)
    return sorted(unknown)
