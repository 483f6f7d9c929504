"""What the OpenAPI document promises holds for every route and kind of model, and `/docs` needs no other host."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.attack.api_fuzz import fuzz, strict
from tests.attack.kinds import KINDS, serving
from tests.live.live_server import LiveServer

FIXED_CASES = {"decoder": "/v1/messages", "encoder": "/v1/embeddings"}  # routes to which they are sent here
EXAMPLES = 6  # of each operation; `make fuzz` sends more, and the fixed cases of the coverage phase to every route


@pytest.mark.full
@pytest.mark.parametrize(
    "kind", [kind if kind == "decoder" else pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS]
)
def test_no_route_answers_500_or_what_it_does_not_declare(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("schemathesis")
    with serving(kind, tmp_path / "model") as server:
        results = [fuzz(server.url, EXAMPLES // 2 if kind == "decoder" else 2, aliases=False, coverage=False)]
        if kind in FIXED_CASES:
            results.append(fuzz(server.url, EXAMPLES, routes=re.compile(f"^{FIXED_CASES[kind]}$")))
        assert server.client.get("/readyz").status_code == 200
    for result in results:
        assert result.failures == {}, result.output
        assert result.server_errors == 0
        assert result.cases > 100


@pytest.mark.parametrize(
    "documents",
    [[{"text": "x"}, "y"], ["y", {"text": "x"}], [{"text": "x"}, {"text": "y"}]],
    ids=["object first", "string first", "objects"],
)
def test_documents_of_both_forms_are_ranked(documents: list[Any], tmp_path: Path) -> None:
    """An object before a string was answered with 500."""
    with serving("encoder", tmp_path) as server:
        answer = server.client.post("/v1/rerank", json={"query": "a", "documents": documents})
        unknown = server.client.post(
            "/v1/rerank", json={"query": "a", "documents": [*documents, {"text": "z", "no": 1}]}
        )
    assert answer.status_code == 200, answer.text
    assert unknown.status_code == 200, unknown.text


def test_bodies_declare_what_is_refused_and_that_unknown_fields_are_not(server: LiveServer) -> None:
    schemas = server.client.get("/openapi.json").json()["components"]["schemas"]
    chat = schemas["ChatBody"]
    assert chat["additionalProperties"] is True
    assert chat["properties"]["mirostat"] == {"enum": [0, None]}
    assert chat["properties"]["prompt"] == {"enum": [None]}
    assert schemas["RerankBody"]["additionalProperties"] is True


def test_events_and_nulls_are_declared(server: LiveServer) -> None:
    """An event is an object with its data as text; null is accepted where a field has no effect."""
    document = server.client.get("/openapi.json").json()
    responses = document["paths"]["/v1/responses"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    data = responses["schema"]["properties"]["data"]
    assert data["contentSchema"]["anyOf"][0] == {"$ref": "#/components/schemas/ResponseEvent"}
    chat = document["paths"]["/v1/chat/completions"]["post"]["responses"]["200"]["content"]["text/event-stream"]
    assert {"const": "[DONE]"} in chat["schema"]["properties"]["data"]["anyOf"]
    assert document["components"]["schemas"]["ResponsesBody"]["properties"]["store"]["enum"] == [False, None]


def test_the_strict_document_has_no_default(server: LiveServer) -> None:
    document = strict(server.client.get("/openapi.json").json())
    assert not any(
        "default" in operation["responses"] for path in document["paths"].values() for operation in path.values()
    )


def test_the_documentation_loads_nothing(server: LiveServer) -> None:
    page = server.client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert re.findall(r'(?:src|href)="([^"#]+)"', page.text) == ["data:,", "openapi.json"]
    assert "<script" not in page.text
    document = server.client.get("/openapi.json").json()
    for path in document["paths"]:
        assert path in page.text
    assert httpx.get(f"{server.url}/", follow_redirects=True).status_code == 200
