"""Chroma, unchanged, with the embeddings of this server. `make clients` installs it apart: it excludes other clients."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from tests.live.live_server import LiveServer, live
from tiny_encoders import Modules, write_encoder

TEXTS = ["the fox said hello", "hello", "green world"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    with live(
        write_encoder(tmp_path_factory.mktemp("encoders") / "embedder", "BertModel", modules=Modules())
    ) as server:
        yield server


def test_chroma_embeds_and_finds(embedder: LiveServer) -> None:
    chromadb: Any = pytest.importorskip("chromadb", reason="the client is not installed: make clients")
    from chromadb.utils.embedding_functions import HuggingFaceEmbeddingServer

    embed = HuggingFaceEmbeddingServer(url=f"{embedder.url}/embed")
    ours = embedder.client.post("/embed", json={"inputs": TEXTS}).json()
    assert numpy.array(embed(TEXTS)) == pytest.approx(numpy.array(ours), abs=1e-6)
    collection = chromadb.EphemeralClient().create_collection("texts", embedding_function=embed)
    collection.add(ids=["0", "1", "2"], documents=TEXTS)
    assert collection.query(query_texts=[TEXTS[2]], n_results=1)["documents"] == [[TEXTS[2]]]
