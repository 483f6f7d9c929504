"""Any fields at all on the routes of encoders: a body is answered or refused as an invalid request, never anything else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.api.encoders.schemas import (
    ClassifyBody,
    CohereEmbedBody,
    CohereEmbedV2Body,
    DecodeBody,
    EmbedAllBody,
    EmbedBody,
    EmbeddingsBody,
    PoolingBody,
    PredictBody,
    RerankBody,
    ScoreBody,
    SimilarityBody,
    TeiEmbedBody,
)
from app.api.native.schemas import TokenizeBody
from app.api.schemas import Body
from app.models.encoders.config import EncoderConfig
from fake_encoder import CLASSIFIER, CONFIG, CROSS_ENCODER
from tests.api.encoder_client import asking

ROUTES: dict[str, tuple[type[Body], EncoderConfig]] = {
    "/v1/embeddings": (EmbeddingsBody, CONFIG),
    "/v1/rerank": (RerankBody, CROSS_ENCODER),
    "/v1/classify": (ClassifyBody, CLASSIFIER),
    "/encode": (EmbedBody, CONFIG),
    "/embed": (TeiEmbedBody, CONFIG),
    "/": (PredictBody, CLASSIFIER),
    "/decode": (DecodeBody, CONFIG),
    "/tokenize": (TokenizeBody, CONFIG),
    "/v1/embed": (CohereEmbedBody, CONFIG),
    "/v2/embed": (CohereEmbedV2Body, CONFIG),
    "/v2/rerank": (RerankBody, CROSS_ENCODER),
    "/score": (ScoreBody, CROSS_ENCODER),
    "/pooling": (PoolingBody, CONFIG),
    "/embed_all": (EmbedAllBody, CLASSIFIER),
    "/predict": (PredictBody, CLASSIFIER),
    "/rerank": (RerankBody, CONFIG),
    "/similarity": (SimilarityBody, CONFIG),
}
WORDS = st.text(max_size=3) | st.sampled_from(["the fox", "hello " * 20])
TEXTS = WORDS | st.lists(WORDS, max_size=3) | st.lists(st.lists(WORDS | st.integers(-1, 400), max_size=3), max_size=2)
ODDITIES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS | st.just("text"), inner, max_size=2),
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    """Often nearly right: fields by their names, with texts or anything else in them."""
    known = st.sampled_from(sorted(ROUTES[path][0].model_fields))
    wanted = st.fixed_dictionaries(
        {
            name: TEXTS
            for name in ("input", "inputs", "query", "documents", "texts", "queries")
            if name in ROUTES[path][0].model_fields
        }
    )
    return st.tuples(wanted, st.dictionaries(known | WORDS, ODDITIES, max_size=2)).map(
        lambda parts: parts[0] | parts[1]
    )


@pytest.mark.cases(test=4, ci=9)
@pytest.mark.parametrize("path", ROUTES)
@given(given_data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_body_is_answered_or_refused(path: str, given_data: st.DataObject) -> None:
    body = given_data.draw(bodies(path))

    async def ask() -> None:
        async with asking(ROUTES[path][1]) as (client, _):
            content = json.dumps(body).encode()
            response = await client.post(path, content=content, headers={"content-type": "application/json"})
            assert response.status_code in (200, 400), response.text
            if response.status_code == 400:
                assert response.json().get("error") or response.json()["message"]

    asyncio.run(ask())
