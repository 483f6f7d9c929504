"""Encoders through the loader: whatever they are stored in, what stays in the file, and packs of their products."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
import torch.nn.functional as F

from app.backends.base import HostBackend
from app.models.encoders.encoder import BertBody, Encoder
from app.weights.checkpoint import open_checkpoint
from app.weights.load import Model, Packing, load_model
from app.weights.packs import PackFolder
from armature_kernels.native.arguments import OpCode
from armature_kernels.native.operations import has_kernel
from loaded_models import load, plan_of
from run_encoder import encoded, random_texts
from tiny_encoders import SUFFIX, Modules, write_encoder

CPU = cast(HostBackend, SimpleNamespace(device=torch.device("cpu")))
TEXTS = random_texts((5, 1, 30))


def outputs(model: object) -> torch.Tensor:
    encoder = cast(Encoder, model)
    name = encoder.config.outputs[0]
    return encoded(encoder, TEXTS, (name,))[name]


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("architecture", ["MPNetModel", "GteModel", f"ModernBert{SUFFIX}", "Qwen3Model"])
def test_stored_in_fewer_bits(tmp_path: Path, architecture: str, stored: torch.dtype) -> None:
    exact, fewer = (
        load(write_encoder(tmp_path / str(dtype), architecture, dtype=dtype)) for dtype in (torch.float32, stored)
    )
    assert F.cosine_similarity(outputs(fewer), outputs(exact), dim=-1).min() > 0.999


def test_tables_stay_in_the_file(tmp_path: Path) -> None:
    model = cast(Encoder, load(write_encoder(tmp_path, "RobertaModel", dtype=torch.float16)))
    embeddings = cast(BertBody, model.body).embeddings
    assert embeddings.positions is not None and embeddings.types is not None
    for table in (embeddings.tokens, embeddings.positions, embeddings.types):
        assert table.weight.dtype == torch.float16
    assert embeddings.norm.weight.dtype == torch.float32


def test_progress_is_reported_to_the_end(tmp_path: Path) -> None:
    directory = write_encoder(
        tmp_path, "NomicBertModel", modules=Modules(dense=((24, "torch.nn.modules.activation.Tanh"),))
    )
    told: list[tuple[int, int]] = []
    load(directory, progress=lambda done, total: told.append((done, total)))
    bytes_of_all = sum(entry.nbytes for entry in open_checkpoint(directory).tensors.values())
    assert [done for done, _ in told] == sorted(done for done, _ in told) and told[-1] == (bytes_of_all, bytes_of_all)


@pytest.mark.skipif(not has_kernel(OpCode.LINEAR_INT), reason="integer forms need the native library")
@pytest.mark.parametrize("architecture", ["GteModel", "Gemma3TextModel"])
def test_packs_are_kept_for_the_next_start(tmp_path: Path, architecture: str) -> None:
    checkpoint = open_checkpoint(write_encoder(tmp_path / "model", architecture))

    def start() -> Model:
        return load_model(
            checkpoint,
            plan_of("int8", 64),
            CPU,
            None,
            Packing(PackFolder(tmp_path / "cache", lambda done, total: None)),
        )

    first, kept = outputs(start()), list((tmp_path / "cache").rglob("*.pack"))
    assert len(kept) == 1 and torch.equal(outputs(start()), first)
