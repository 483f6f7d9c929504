"""Any bytes at all: a body is understood or refused as an invalid request, never anything else; sampling parameters too."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.anthropic import routes as anthropic
from app.api.anthropic.schemas import MessagesBody
from app.api.llama_cpp.schemas import LlamaCppBody
from app.api.native.schemas import DetokenizeBody, GenerateBody, TokenizeBody
from app.api.ollama import routes as ollama
from app.api.ollama.schemas import NameBody, OllamaChatBody, OllamaEmbedBody, OllamaGenerateBody
from app.api.openai.schemas import ChatBody, CompletionBody, MessagePart
from app.api.openai.translate import chat_request
from app.api.openai_responses import routes as responses
from app.api.openai_responses.schemas import ResponsesBody
from app.api.schemas import Body, SamplingFields, parse_body
from app.errors import InvalidRequest
from tests.api.scripted_service import ScriptedService

DIALECTS: tuple[type[Body], ...] = (
    MessagesBody, ResponsesBody, LlamaCppBody, OllamaChatBody, OllamaGenerateBody, OllamaEmbedBody, NameBody,
)  # fmt: skip
BODIES = (ChatBody, CompletionBody, GenerateBody, TokenizeBody, DetokenizeBody, *DIALECTS)
RUNTIME: Any = SimpleNamespace(service=ScriptedService())
NAMES = sorted({name for body in BODIES for name in (*body.model_fields, *body.REFUSED, *body.FOREIGN)})
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(["role", "content", "name", "tool_calls"]), VALUES), max_size=2)


def understood(model: type[Body], content: bytes) -> None:
    try:
        parsed = parse_body(model, content)
        match parsed:
            case MessagesBody():
                chat_request(anthropic.chat_body(parsed), {})
            case ResponsesBody():
                chat_request(responses.chat_body(parsed), {})
            case OllamaChatBody() if parsed.messages:
                ollama.chat_generation(RUNTIME, parsed)
            case OllamaGenerateBody():
                ollama.prompt_generation(RUNTIME, parsed)
            case SamplingFields() if not isinstance(parsed, LlamaCppBody):
                parsed.params()
    except InvalidRequest as error:
        assert error.message
        assert len(error.message) < 5_000


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("model", BODIES)
@given(content=st.binary(max_size=64) | st.text(max_size=64).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_any_bytes(model: type[Body], content: bytes) -> None:
    understood(model, content)


@pytest.mark.cases(test=2)
@pytest.mark.parametrize("model", BODIES)
@given(
    fields=st.dictionaries(st.sampled_from(NAMES), VALUES, max_size=5),
    prompt=st.text(max_size=4) | VALUES,
    messages=MESSAGES,
)
def test_any_fields(model: type[Body], fields: dict[str, Any], prompt: Any, messages: Any) -> None:
    required = {"max_tokens": 5, "model": "demo", "input": messages}
    given_fields = {**required, "prompt": prompt, "messages": messages, **fields}
    if model in (GenerateBody, ChatBody, CompletionBody, TokenizeBody, DetokenizeBody, LlamaCppBody, NameBody):
        given_fields = {"prompt": prompt, "messages": messages, **fields}
    understood(model, json.dumps(given_fields).encode())


def test_what_is_ignored_is_forgotten() -> None:
    body = parse_body(
        ChatBody,
        b'{"messages": [{"role": "user", "content": "a", "refusal": null}], "metadata": [[], []], "tools": []}',
    )
    assert body.model_extra == body.messages[0].model_extra == {}


def test_a_part_shows_its_text_or_its_refusal() -> None:
    assert MessagePart(type="text", text="a").shown == "a"
    assert MessagePart(type="refusal", refusal="no").shown == "no"


TEXTS = st.text(max_size=4)
BLOCKS = st.fixed_dictionaries(
    {"type": st.sampled_from(["text", "thinking", "tool_use", "tool_result", "image"])},
    optional={
        "text": TEXTS, "thinking": TEXTS, "id": TEXTS, "name": TEXTS, "tool_use_id": TEXTS,
        "input": st.dictionaries(TEXTS, SCALARS, max_size=2), "content": TEXTS | st.lists(VALUES, max_size=2),
    },
)  # fmt: skip
TURNS = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]), "content": TEXTS | st.lists(BLOCKS, max_size=3)}
)
PARTS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["input_text", "output_text"]), "text": TEXTS}), max_size=2
)
ITEMS = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "assistant", "developer"]), "content": TEXTS | PARTS}),
    st.fixed_dictionaries({"type": st.just("function_call"), "call_id": TEXTS, "name": TEXTS, "arguments": TEXTS}),
    st.fixed_dictionaries({"type": st.just("function_call_output"), "call_id": TEXTS, "output": TEXTS | PARTS}),
    st.fixed_dictionaries({"type": st.just("reasoning"), "content": PARTS}),
)


@given(turns=st.lists(TURNS, max_size=4), items=st.lists(ITEMS, max_size=5))
def test_any_history(turns: Any, items: Any) -> None:
    understood(MessagesBody, json.dumps({"max_tokens": 5, "messages": turns}).encode())
    understood(ResponsesBody, json.dumps({"input": items}).encode())
