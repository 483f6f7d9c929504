"""Any bytes at all: a body is understood or refused as an invalid request, never anything else; sampling parameters too."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.native import DetokenizeBody, GenerateBody, TokenizeBody
from app.api.openai.schemas import ChatBody, CompletionBody, MessagePart
from app.api.schemas import Body, SamplingFields, parse_body
from app.errors import InvalidRequest

BODIES: tuple[type[Body], ...] = (ChatBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody)
NAMES = sorted({name for body in BODIES for name in (*body.model_fields, *body.NEUTRAL, *body.IGNORED)})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), VALUES), max_size=2)


def understood(model: type[Body], content: bytes) -> None:
    try:
        parsed = parse_body(model, content)
        if isinstance(parsed, SamplingFields):
            parsed.params()
    except InvalidRequest as error:
        assert error.message
        assert len(error.message) < 5_000


@pytest.mark.parametrize("model", BODIES)
@given(content=st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(model: type[Body], content: bytes) -> None:
    understood(model, content)


@pytest.mark.parametrize("model", BODIES)
@given(
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    prompt=st.text(max_size=4) | VALUES,
    messages=MESSAGES,
)
def test_any_fields(model: type[Body], fields: dict[str, Any], prompt: Any, messages: Any) -> None:
    given_fields = {"prompt": prompt, "messages": messages, **fields}
    understood(model, json.dumps(given_fields).encode())


def test_what_is_ignored_is_forgotten() -> None:
    body = parse_body(
        ChatBody,
        b'{"messages": [{"role": "user", "content": "a", "refusal": null}], "metadata": [[], []], "tools": []}',
    )
    assert body.model_extra == body.messages[0].model_extra == {}


def test_a_part_keeps_its_two_words() -> None:
    assert MessagePart(type="text", text="a").model_dump() == {"type": "text", "text": "a"}
