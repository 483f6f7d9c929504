"""Tiny random checkpoints of transformers' classes that do tasks besides generation, and their engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers

from app.messages import RequestFailed, RunTask

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
WORDS = "this is text of new york who lives in paris it example about sport".split()
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
TEXTS = (
    "this is a text of new york",
    "paris",
    "who lives in a new town? it is an example of a longer text about sport.",
)
LABELS = ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
NLI = ("contradiction", "neutral", "entailment")
SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "embedding_size", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads"), 4),
    **dict.fromkeys(("intermediate_size", "hidden_dim"), 48),
    "max_position_embeddings": 66,
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "pad_token_id": 0,
}


def write_words(directory: Path) -> Any:
    """Write a WordPiece tokenizer of a few words and all letters, and return it."""
    from transformers import BertTokenizer

    vocab = [*SPECIAL, *_LETTERS, *(f"##{letter}" for letter in _LETTERS), *".,?!", *WORDS]
    (directory / "vocab.txt").write_text("\n".join(vocab))
    tokenizer = BertTokenizer(str(directory / "vocab.txt"))
    tokenizer.save_pretrained(directory)
    return tokenizer


def write_task_checkpoint(directory: Path, architecture: str, labels: tuple[str, ...] = (), **values: Any) -> Any:
    """Write a tiny model whose outputs differ by much, with its tokenizer, and return it."""
    import transformers

    kind = getattr(transformers, architecture)
    tokenizer = write_words(directory)
    given: dict[str, Any] = {**SIZES, "vocab_size": len(tokenizer), **values}
    if labels:
        given |= {"id2label": dict(enumerate(labels)), "label2id": {label: place for place, label in enumerate(labels)}}
    return save(directory, kind(kind.config_class(**given)))


def save(directory: Path, model: Any) -> Any:
    """Write a model with random weights of a usual size."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.copy_(torch.randn_like(parameter) / parameter[0].numel() ** 0.5)
    model.eval().save_pretrained(directory)
    return model


def task_engine(directory: Path, **settings: Any) -> Any:
    from app.engine.build import BuildRequest, build
    from app.server.prepare import prepare
    from app.settings import Settings

    values = {"engine": "transformers", "precision": "fp32", "threads": 1, **settings}
    prepared = prepare(Settings(model=directory, cache_dir=directory / "cache", **values))
    return build(BuildRequest(prepared.checkpoint, prepared.plan))


def ask(
    engine: Any, name: str, inputs: list[Any], files: tuple[bytes, ...] = (), *, parameters: Any = None, **more: Any
) -> list[Any]:
    """The results of inputs that are in the engine together, each in a request of its own."""
    written, found = json.dumps({**(parameters or {}), **more}).encode(), {}
    for place, given in enumerate(inputs):
        own = (files[given],) if files else ()
        message = RunTask(str(place), name, json.dumps([0 if files else given]).encode(), written, 0.0, own)
        found |= {str(place): event.error for event in engine.add(message)}
    while engine.has_work:
        for event in engine.step():
            is_failed = isinstance(event, RequestFailed)
            found[event.request_id] = event.error if is_failed else json.loads(event.arrays["result"].data)
    return [found[str(place)] for place in range(len(inputs))]


def write_picture_checkpoint(directory: Path, name: str) -> tuple[Any, Any]:
    """Write a tiny model of pictures: ViT with three labels, CLIP or SigLIP. Return it, and what reads its inputs."""
    import transformers

    vision: dict[str, Any] = {"image_size": 32, "patch_size": 8, "hidden_size": 32, "num_hidden_layers": 2}
    vision |= {"num_attention_heads": 4, "intermediate_size": 48}
    size = {"height": 32, "width": 32}
    if name == "labels":
        labels = {"id2label": {0: "one", 1: "two", 2: "three"}, "label2id": {"one": 0, "two": 1, "three": 2}}
        processor = transformers.ViTImageProcessor(size=size)
        processor.save_pretrained(directory)
        return save(
            directory, transformers.ViTForImageClassification(transformers.ViTConfig(**vision, **labels))
        ), processor
    tokenizer = write_words(directory)
    text = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": 3, "max_position_embeddings": 64}
    kinds = {
        "clip": (transformers.CLIPConfig, transformers.CLIPModel),
        "siglip": (transformers.SiglipConfig, transformers.SiglipModel),
    }
    config, kind = kinds[name]
    both = {"projection_dim": 32} if name == "clip" else {}
    processor = transformers.SiglipImageProcessor(size=size)
    processor.save_pretrained(directory)
    return save(directory, kind(config(text_config=text, vision_config=vision, **both))), (tokenizer, processor)


def write_speech_checkpoint(directory: Path, name: str) -> Any:
    """Write a tiny Whisper, or a tiny model with CTC, with what reads its sounds.

    `ctc` normalizes each sound over its length, `ctc with layers` each place of it.
    """
    import transformers

    if name.startswith("ctc"):
        vocab = {
            "<pad>": 0,
            "<s>": 1,
            "</s>": 2,
            "<unk>": 3,
            "|": 4,
            **{one: 5 + at for at, one in enumerate(_LETTERS)},
        }
        (directory / "vocab.json").write_text(json.dumps(vocab))
        transformers.Wav2Vec2CTCTokenizer(str(directory / "vocab.json")).save_pretrained(directory)
        transformers.Wav2Vec2FeatureExtractor().save_pretrained(directory)
        norm = "layer" if name == "ctc with layers" else "group"
        config = transformers.Wav2Vec2Config(
            **{**SIZES, "vocab_size": len(vocab)}, conv_dim=[16] * 3, conv_kernel=[10, 8, 4], conv_stride=[10, 8, 4],
            feat_extract_norm=norm,
            num_feat_extract_layers=3, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=2,
        )  # fmt: skip
        return save(directory, transformers.Wav2Vec2ForCTC(config))
    words = ["<|endoftext|>", "<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>"]
    words += ["<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: at for at, symbol in enumerate(symbols)}
    tokenizer = transformers.WhisperTokenizer(vocab=vocab, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    tokenizer.add_tokens([f"<|{at * 0.02:.2f}|>" for at in range(1501)])
    tokenizer.save_pretrained(directory)
    ids = {word: tokenizer.convert_tokens_to_ids(word) for word in words}
    transformers.WhisperFeatureExtractor(feature_size=16).save_pretrained(directory)
    end = ids["<|endoftext|>"]
    config = transformers.WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=32, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        decoder_start_token_id=ids["<|startoftranscript|>"], max_target_positions=64, eos_token_id=end, pad_token_id=end,
        bos_token_id=end,
    )  # fmt: skip
    model = transformers.WhisperForConditionalGeneration(config)
    given = {
        "lang_to_id": {word: ids[word] for word in ("<|en|>", "<|de|>")}, "is_multilingual": True,
        "task_to_id": {"transcribe": ids["<|transcribe|>"], "translate": ids["<|translate|>"]},
        "no_timestamps_token_id": ids["<|notimestamps|>"], "max_initial_timestamp_index": 50, "max_length": 32,
        "alignment_heads": [[1, 0]], "prev_sot_token_id": ids["<|startofprev|>"],
        "decoder_start_token_id": ids["<|startoftranscript|>"], "eos_token_id": end, "pad_token_id": end,
    }  # fmt: skip
    model.generation_config = transformers.GenerationConfig(**given)
    return save(directory, model)
