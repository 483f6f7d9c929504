"""config.json of encoders: defaults as in transformers, old spellings, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.errors import CheckpointInvalid
from app.models.decoders.config import ModelConfig
from app.models.encoders.config import DenseConfig, EncoderConfig, HeadConfig, PoolingConfig
from app.models.encoders.config_reader import SentenceConfig, is_encoder, read_encoder
from app.models.encoders.families import ENCODER_FAMILIES
from encoder_families import FAMILIES
from reference_models import transformers
from tiny_encoders import SUFFIX, encoder_values

CLASSIFIER = f"Bert{SUFFIX}"


def read(architecture: str = "BertModel", **overrides: Any) -> EncoderConfig:
    return read_encoder(encoder_values(architecture, **overrides))


# What transformers' own classes say where a config.json is silent: the field of ours, and the attribute of theirs.
DEFAULTS = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "vocab_size": "vocab_size",
}


@pytest.mark.parametrize("family", [family.stem for family in ENCODER_FAMILIES] + ["EuroBert"])
def test_a_saved_config_reads_as_it_was(family: str) -> None:
    theirs = getattr(transformers, f"{family}Config")(**({"embedding_size": 256} if family == "Electra" else {}))
    theirs.architectures = [f"{family}Model"]
    ours = read_encoder(json.loads(theirs.to_json_string()))
    values = {"hidden_size": getattr(theirs, "dim", None), "intermediate_size": getattr(theirs, "hidden_dim", None)}
    for field, attribute in DEFAULTS.items():
        assert getattr(ours, field) == (values.get(field) or getattr(theirs, attribute)), field
    longest = theirs.max_position_embeddings
    assert ours.max_model_len == longest - (0 if ours.padding_id is None else ours.padding_id + 1)
    assert ours.norm_eps == next((getattr(theirs, name) for name in NORMS if hasattr(theirs, name)), 1e-12)
    ropes = getattr(theirs, "rope_parameters", None) or {}
    thetas = {one["rope_theta"] for one in (ropes.values() if "full_attention" in ropes else [ropes]) if one}
    assert {rope.theta for rope in ours.ropes if rope is not None} == thetas


NORMS = ("layer_norm_eps", "norm_eps", "rms_norm_eps")


def test_old_and_new_words_of_modernbert_are_the_same() -> None:
    old = encoder_values("ModernBertModel")
    new = {name: value for name, value in old.items() if "global" not in name and "theta" not in name}
    new["layer_types"] = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
    new["rope_parameters"] = {
        "full_attention": {"rope_type": "default", "rope_theta": 160000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    assert read_encoder(old) == read_encoder(new)
    assert read_encoder(old).windows == (None, 8, 8, None)


def test_nomics_first_words() -> None:
    new = encoder_values("NomicBertModel")
    old = {
        "architectures": ["NomicBertModel"],
        "model_type": "nomic_bert",
        "n_layer": 2,
        "n_head": new["num_attention_heads"],
        "n_embd": new["hidden_size"],
        "n_inner": new["intermediate_size"],
        "n_positions": new["max_position_embeddings"],
        "layer_norm_epsilon": new["layer_norm_eps"],
        "rotary_emb_base": 1000,
        "rotary_emb_fraction": 1.0,
        "activation_function": "swiglu",
        "vocab_size": new["vocab_size"],
        "type_vocab_size": 2,
    }
    assert read_encoder(old) == read_encoder(new)
    with pytest.raises(CheckpointInvalid, match="prenorm True is not supported; False is"):
        read_encoder({**old, "prenorm": True})


def test_what_is_an_encoder() -> None:
    none, pooled = SentenceConfig(), SentenceConfig(PoolingConfig())
    assert is_encoder(encoder_values("BertModel"), none) and is_encoder({"model_type": "mpnet"}, none)
    assert is_encoder(encoder_values("Qwen3Model"), none) and is_encoder(encoder_values(f"Llama{SUFFIX}"), none)
    causal = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}
    assert not is_encoder(causal, none) and is_encoder(causal, pooled)
    assert not is_encoder({"model_type": "llama"}, none)


@pytest.mark.parametrize("family", FAMILIES)
def test_pooling_leaves_any_head_out(family: str) -> None:
    values = encoder_values(family + SUFFIX)
    pooling = PoolingConfig(("cls", "mean"), dense=(DenseConfig("2_Dense", 64, 8),), normalizes=True)
    config = read_encoder(values, SentenceConfig(pooling, max_tokens=7, lowercases=True))
    assert (config.head, config.labels, config.pooling, config.max_model_len, config.lowercases) == (
        None,
        (),
        pooling,
        7,
        True,
    )
    assert config.embedding_size == 8 and config.outputs == ("embedding", "last_hidden_state")


def test_what_is_pooled_must_fit() -> None:
    pooling = PoolingConfig(dense=(DenseConfig("2_Dense", 33, 8),))
    with pytest.raises(CheckpointInvalid, match=r"2_Dense/config\.json: in_features is 33, but its input has 32"):
        read_encoder(encoder_values("BertModel"), SentenceConfig(pooling))


def test_a_decoder_keeps_its_layers() -> None:
    config = read("Qwen3Model")
    assert config.decoder is not None and config.decoder.architecture == "Qwen3ForCausalLM" and config.decoder.head_norm
    assert not config.bidirectional and config.pooling.modes == ("last",)
    assert read("EuroBertModel").bidirectional and read("Gemma3TextModel").bidirectional
    with pytest.raises(CheckpointInvalid, match="makes this decoder an encoder"):
        ModelConfig.from_hf({**encoder_values("Gemma3TextModel"), "architectures": ["Gemma3ForCausalLM"]})


def test_heads() -> None:
    assert read(CLASSIFIER).head == HeadConfig()
    assert read(f"DistilBert{SUFFIX}").head == HeadConfig(activation="relu")
    modern = HeadConfig("mean", dense_bias=False, activation="gelu", norm=True)
    assert read(f"ModernBert{SUFFIX}").head == modern
    assert read(f"EuroBert{SUFFIX}", classifier_pooling="bos").head == HeadConfig("cls", activation="gelu")
    assert read(f"Qwen3{SUFFIX}").head == HeadConfig("last", dense=False, bias=False)


def test_labels_and_what_their_logits_become() -> None:
    assert read(CLASSIFIER, id2label={"1": "no", "0": "yes"}).labels == ("yes", "no")
    assert read(CLASSIFIER, id2label=None).labels == ("LABEL_0", "LABEL_1")
    assert read(CLASSIFIER, num_labels=3).scores == "softmax"
    assert read(CLASSIFIER, num_labels=3, problem_type="multi_label_classification").scores == "sigmoid"
    assert read(CLASSIFIER).scores == "sigmoid"
    for labels in (1, 3):
        assert read(CLASSIFIER, num_labels=labels, problem_type="regression").scores == "identity"
        modern = read(f"ModernBert{SUFFIX}", num_labels=labels, problem_type="regression")
        assert modern.scores == "identity"
    named = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    assert read(CLASSIFIER, problem_type="regression", sentence_transformers=named).scores == "sigmoid"
    identity = {"activation_fn": "torch.nn.modules.linear.Identity"}
    assert read(CLASSIFIER, sentence_transformers=identity).scores == "identity"
    assert (
        read(CLASSIFIER, sbert_ce_default_activation_function="torch.nn.modules.linear.Identity").scores == "identity"
    )
    assert read_encoder(encoder_values(CLASSIFIER), SentenceConfig(scores="identity")).scores == "identity"


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "kind of problem": (
        CLASSIFIER,
        {"problem_type": "ranking"},
        "problem_type 'ranking' is not known; known are regression",
    ),
    "projected embeddings": ("ElectraModel", {"embedding_size": 16}, "embedding_size 16 is not hidden_size"),
    "unknown": (
        "BertModel",
        {"architectures": ["T5Model"]},
        r"\['T5Model'\] is not supported as an encoder; supported are BertModel",
    ),
    "another use": ("BertModel", {"architectures": ["BertForTokenClassification"]}, "not supported as an encoder"),
    "relative positions": (
        "BertModel",
        {"position_embedding_type": "relative_key"},
        "position_embedding_type 'relative_key'",
    ),
    "scores that grow": ("GteModel", {"logn_attention_scale": True}, "logn_attention_scale"),
    "half a translator": ("BertModel", {"is_decoder": True}, "is_decoder"),
    "heads": ("BertModel", {"num_attention_heads": 5}, "5 attention heads cannot share hidden_size 32"),
    "activation": ("BertModel", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu' is not known"),
    "gated relu": ("GteModel", {"hidden_act": "relu"}, "'relu' is not known"),
    "buckets": ("MPNetModel", {"relative_attention_num_buckets": 64}, "MPNet uses 32"),
    "pooling of a head": (
        f"ModernBert{SUFFIX}",
        {"classifier_pooling": "late"},
        "classifier_pooling 'late' is not known",
    ),
    "a head's activation": (f"ModernBert{SUFFIX}", {"classifier_activation": "mish"}, "classifier_activation 'mish'"),
    "labels": (CLASSIFIER, {"id2label": {"0": "a", "2": "b"}}, "must name the labels 0 to 1"),
    "scores": (CLASSIFIER, {"sbert_ce_default_activation_function": "my.Own"}, "score function 'my.Own'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_understood_is_named(case: str) -> None:
    architecture, overrides, sentence = REFUSED[case]
    with pytest.raises(CheckpointInvalid, match=sentence):
        read(architecture, **overrides)
