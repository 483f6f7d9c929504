"""Everyday calls of unchanged clients and frameworks: answers, streams, tools, schemas and vectors.

`make clients` installs them into an environment of their own and runs this file. A client that is not installed is
skipped by its name.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import io
import json
import math
import os
import shutil
import subprocess
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from app.settings import DEMO_DIRECTORY
from picture_checkpoints import write_reader
from tests.live.live_server import LiveServer, live
from tiny_encoders import write_encoder

# Warnings of the clients' own code are not ours. Each client is imported while warnings are only shown.
pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("default")]

STORY = "Tell me a story."
LIMIT = 24  # tokens of an answer
VERCEL = Path(__file__).with_name("vercel_client.mjs")


class Trip(BaseModel):
    """Where to go, and for how long. Without further properties, which a small model would invent for long."""

    model_config = ConfigDict(extra="forbid")

    city: str = Field(json_schema_extra={"enum": ["Paris", "Rome"]})
    days: int = Field(ge=1, le=9)


def client_module(name: str, package: str) -> Any:
    """Import a module of a client, or skip the test and name the package to install."""
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it is fetched otherwise
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ModuleNotFoundError as missing:
        pytest.skip(f"{missing.name} is not installed: pip install {package}, or make clients")


@pytest.fixture(scope="module")
def running() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, served_model_name="demo", any_model_name="on") as server:
        yield server


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    """A server of a tiny model that reads pictures."""
    path = tmp_path_factory.mktemp("reader") / "model"
    write_reader(path, "SmolVLMForConditionalGeneration/llama")
    with live(path, served_model_name="demo", any_model_name="on") as server:
        yield server


@pytest.fixture(scope="module")
def vectors(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveServer]:
    path = write_encoder(tmp_path_factory.mktemp("encoders") / "tiny")
    with live(path, any_model_name="on") as server:
        yield server


def check_trip(trip: Any) -> None:
    assert isinstance(trip, Trip)
    assert trip.city in ("Paris", "Rome")
    assert 1 <= trip.days <= 9


# ---- LangChain -----------------------------------------------------------------------------------------------------

FRAMEWORKS = ("openai", "ollama", "anthropic")


def langchain_model(kind: str, url: str) -> Any:
    """Return LangChain's chat model of that kind, with greedy answers."""
    module = client_module(f"langchain_{kind}", f"langchain-{kind}")
    if kind == "openai":
        return module.ChatOpenAI(
            model="gpt-x", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=LIMIT, max_retries=0
        )
    if kind == "ollama":
        return module.ChatOllama(model="demo", base_url=url, temperature=0, num_predict=LIMIT)
    # The client does not send its `temperature`; a message may be long, and there is no need to compare it.
    return module.ChatAnthropic(model="claude-x", base_url=url, api_key="none", max_tokens=LIMIT, max_retries=0)


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_langchain_answers_and_streams(running: LiveServer, kind: str) -> None:
    model = langchain_model(kind, running.url)
    whole = model.invoke(STORY)
    parts = list(model.stream(STORY))
    text = "".join(str(part.text) for part in parts)
    assert text
    assert str(whole.text)
    if kind != "anthropic":
        assert text == str(whole.text)
    assert whole.usage_metadata["output_tokens"] <= LIMIT


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_langchain_follows_a_type(running: LiveServer, kind: str) -> None:
    model = langchain_model(kind, running.url)
    for field in ("max_tokens", "num_predict"):
        if hasattr(model, field):
            setattr(model, field, 100)
    check_trip(model.with_structured_output(Trip).invoke(STORY))


@pytest.mark.parametrize("kind", ["openai", "anthropic"])
def test_langchain_calls_tools_and_sends_results(running: LiveServer, kind: str) -> None:
    messages = client_module("langchain_core.messages", "langchain-core")
    model = langchain_model(kind, running.url)
    model.max_tokens = 100
    first = model.bind_tools([Trip], tool_choice="any", parallel_tool_calls=False).invoke(STORY)
    (call,) = first.tool_calls
    check_trip(Trip(**call["args"]))
    history = [messages.HumanMessage(STORY), first, messages.ToolMessage("Sunny.", tool_call_id=call["id"])]
    assert str(model.bind_tools([Trip]).invoke(history).text)


def test_langchain_embeds(vectors: LiveServer) -> None:
    module = client_module("langchain_openai", "langchain-openai")
    # Without the check it sends texts; with it, it fetches OpenAI's tokenizer and sends ids of that one.
    embeddings = module.OpenAIEmbeddings(
        model="tiny", base_url=f"{vectors.url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    many = embeddings.embed_documents(["the fox said hello", "world"])
    assert embeddings.embed_query("world") == pytest.approx(many[1], abs=1e-4)
    ollama = client_module("langchain_ollama", "langchain-ollama").OllamaEmbeddings(model="tiny", base_url=vectors.url)
    length = math.hypot(*many[1])
    assert ollama.embed_query("world") == pytest.approx([value / length for value in many[1]], abs=1e-4)


# ---- pictures ------------------------------------------------------------------------------------------------------


def a_picture() -> str:
    """A picture in base64."""
    image = importlib.import_module("PIL.Image")
    file = io.BytesIO()
    image.new("RGB", (60, 40), "red").save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def check_picture_was_read(reader: LiveServer, texts: list[str]) -> None:
    assert len(set(texts)) == 1 and texts[0], texts
    assert reader.metric("armature_pictures_total", kind="cached") >= 1


@pytest.mark.parametrize("kind", FRAMEWORKS)
def test_langchain_sends_a_picture(reader: LiveServer, kind: str) -> None:
    messages = client_module("langchain_core.messages", "langchain-core")
    model = langchain_model(kind, reader.url)
    url = f"data:image/png;base64,{a_picture()}"
    parts = [{"type": "text", "text": "What is it?"}, {"type": "image_url", "image_url": {"url": url}}]
    if kind == "anthropic":
        source = {"type": "base64", "media_type": "image/png", "data": a_picture()}
        parts[1] = {"type": "image", "source": source}
    asked = [messages.HumanMessage(parts)]
    whole = model.invoke(asked)
    assert whole.usage_metadata["input_tokens"] > 34
    streamed = "".join(str(part.text) for part in model.stream(asked))
    check_picture_was_read(reader, [streamed] if kind == "anthropic" else [streamed, str(whole.text)])


def test_openais_responses_send_a_picture(reader: LiveServer) -> None:
    openai = client_module("openai", "openai")
    url = f"data:image/png;base64,{a_picture()}"
    content = [
        {"type": "input_image", "image_url": url, "detail": "auto"},
        {"type": "input_text", "text": "What is it?"},
    ]
    options: Any = {"model": "demo", "input": [{"role": "user", "content": content}], "temperature": 0.0}
    options["max_output_tokens"] = LIMIT
    with openai.OpenAI(base_url=f"{reader.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.responses.create(**options)
        with client.responses.create(**options, stream=True) as events:
            streamed = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert whole.usage.input_tokens > 34
    check_picture_was_read(reader, [whole.output_text, streamed])


def test_anthropics_client_sends_a_picture(reader: LiveServer) -> None:
    anthropic = client_module("anthropic", "anthropic")
    source = {"type": "base64", "media_type": "image/png", "data": a_picture()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What is it?"}]
    options: Any = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    with anthropic.Anthropic(base_url=reader.url, api_key="none", max_retries=0, timeout=60) as client:
        counted = client.messages.count_tokens(**options).input_tokens
        with client.messages.stream(**options, max_tokens=LIMIT, extra_body={"temperature": 0.0}) as stream:
            streamed = "".join(stream.text_stream)
            usage = stream.get_final_message().usage
    assert usage.input_tokens + usage.cache_read_input_tokens == counted > 34
    check_picture_was_read(reader, [streamed])


def test_ollamas_client_sends_a_picture(reader: LiveServer) -> None:
    ollama = client_module("ollama", "ollama")
    options: Any = {"model": "demo", "options": {"num_predict": LIMIT, "temperature": 0}}
    options["messages"] = [{"role": "user", "content": "What is it?", "images": [base64.b64decode(a_picture())]}]
    with ollama.Client(host=reader.url, timeout=60) as client:
        whole = client.chat(**options)
        streamed = "".join(part.message.content or "" for part in client.chat(**options, stream=True))
    assert whole.prompt_eval_count > 34
    check_picture_was_read(reader, [whole.message.content, streamed])


# ---- LlamaIndex ----------------------------------------------------------------------------------------------------


def test_llama_index(running: LiveServer) -> None:
    module = client_module("llama_index.llms.openai_like", "llama-index-llms-openai-like")
    core = client_module("llama_index.core.llms", "llama-index-core")
    model = module.OpenAILike(
        model="demo", api_base=f"{running.url}/v1", api_key="none", is_chat_model=True, temperature=0.0,
        max_tokens=LIMIT, is_function_calling_model=True, max_retries=0,
    )  # fmt: skip
    whole = model.chat([core.ChatMessage(role="user", content=STORY)]).message.content
    parts = [part.delta for part in model.stream_chat([core.ChatMessage(role="user", content=STORY)])]
    assert "".join(part or "" for part in parts) == whole != ""
    assert model.complete("Once upon a time").text
    model.max_tokens = 100
    check_trip(model.as_structured_llm(Trip).complete(STORY).raw)


def test_llama_index_embeds(vectors: LiveServer) -> None:
    module = client_module("llama_index.embeddings.openai_like", "llama-index-embeddings-openai-like")
    model = module.OpenAILikeEmbedding(model_name="tiny", api_base=f"{vectors.url}/v1", api_key="none")
    assert len(model.get_text_embedding("the fox")) == len(model.get_query_embedding("world")) > 1


# ---- agents and types ----------------------------------------------------------------------------------------------


def test_pydantic_ai(running: LiveServer) -> None:
    ai = client_module("pydantic_ai", "pydantic-ai-slim[openai]")
    models = client_module("pydantic_ai.models.openai", "pydantic-ai-slim[openai]")
    providers = client_module("pydantic_ai.providers.openai", "pydantic-ai-slim[openai]")

    async def ask() -> None:
        provider = providers.OpenAIProvider(base_url=f"{running.url}/v1", api_key="none")
        chat = models.OpenAIChatModel("demo", provider=provider)
        settings = {"temperature": 0.0, "max_tokens": LIMIT}
        plain = ai.Agent(chat, model_settings=settings)
        whole = (await plain.run(STORY)).output
        async with plain.run_stream(STORY) as stream:
            assert [text async for text in stream.stream_text()][-1] == whole
        for kind in (ai.ToolOutput, ai.NativeOutput):
            agent = ai.Agent(chat, output_type=kind(Trip), model_settings=settings | {"max_tokens": 100})
            check_trip((await agent.run(STORY)).output)
        responses = models.OpenAIResponsesModel("demo", provider=provider)
        agent = ai.Agent(responses, output_type=ai.NativeOutput(Trip), model_settings={"max_tokens": 100})
        check_trip((await agent.run(STORY)).output)

    asyncio.run(ask())


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA"])
def test_instructor(running: LiveServer, mode: str) -> None:
    instructor = client_module("instructor", "instructor")
    openai = client_module("openai", "openai")
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as official:
        client = instructor.from_openai(official, mode=instructor.Mode[mode])
        asked: Any = [{"role": "user", "content": STORY}]
        check_trip(
            client.chat.completions.create(
                model="gpt-4o", messages=asked, response_model=Trip, max_tokens=100, max_retries=0
            )
        )


# ---- gateways and hubs ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "path"),
    [
        ("openai/demo", "/v1"),
        ("hosted_vllm/demo", "/v1"),
        ("text-completion-openai/demo", "/v1"),
        ("ollama_chat/demo", ""),
        ("anthropic/claude-x", ""),
    ],
)
def test_litellm(running: LiveServer, model: str, path: str) -> None:
    litellm = client_module("litellm", "litellm")
    asked: dict[str, Any] = {
        "model": model,
        "api_base": f"{running.url}{path}",
        "api_key": "none",
        "messages": [{"role": "user", "content": STORY}],
        "temperature": 0,
        "max_tokens": LIMIT,
    }
    whole = litellm.completion(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in litellm.completion(**asked, stream=True)]
    assert "".join(parts).strip() == whole.strip() != ""


@pytest.mark.parametrize(("model", "path"), [("openai/demo", "/v1"), ("anthropic/claude-x", "")])
def test_litellm_calls_tools(running: LiveServer, model: str, path: str) -> None:
    litellm = client_module("litellm", "litellm")
    tool = {"type": "function", "function": {"name": "go", "parameters": Trip.model_json_schema()}}
    answer = litellm.completion(
        model=model, api_base=f"{running.url}{path}", api_key="none", tools=[tool], tool_choice="required",
        messages=[{"role": "user", "content": STORY}], max_tokens=100,
    )  # fmt: skip
    check_trip(Trip(**json.loads(answer.choices[0].message.tool_calls[0].function.arguments)))


def test_litellm_embeds(vectors: LiveServer) -> None:
    litellm = client_module("litellm", "litellm")
    answer = litellm.embedding(
        model="openai/tiny", api_base=f"{vectors.url}/v1", api_key="none", input=["the fox"], encoding_format="float"
    )
    assert len(answer.data[0]["embedding"]) > 1


def test_huggingface_hub(running: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = client_module("huggingface_hub", "huggingface_hub")
    constants = client_module("huggingface_hub.constants", "huggingface_hub")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the tests set it; it would forbid loopback too
    client = hub.InferenceClient(base_url=running.url, api_key="none")
    asked: Any = {"messages": [{"role": "user", "content": STORY}], "max_tokens": LIMIT, "temperature": 0}
    whole = client.chat_completion(**asked).choices[0].message.content
    parts = [chunk.choices[0].delta.content or "" for chunk in client.chat_completion(**asked, stream=True)]
    assert "".join(parts) == whole != ""
    schema = {"name": "trip", "schema": Trip.model_json_schema(), "strict": True}
    form: Any = {"response_format": {"type": "json_schema", "json_schema": schema}, "max_tokens": 100}
    check_trip(Trip.model_validate_json(client.chat_completion(**asked | form).choices[0].message.content))


def test_cohere_reranks(vectors: LiveServer) -> None:
    cohere = client_module("cohere", "cohere")
    client = cohere.Client(api_key="none", base_url=vectors.url)
    answer = client.rerank(model="tiny", query="the fox", documents=["world", "the fox"], top_n=2)
    assert [result.index for result in answer.results] == [1, 0]


def test_haystack(running: LiveServer) -> None:
    chat = client_module("haystack.components.generators.chat", "haystack-ai")
    message = client_module("haystack.dataclasses", "haystack-ai").ChatMessage.from_user(STORY)
    options: Any = {
        "api_key": client_module("haystack.utils", "haystack-ai").Secret.from_token("none"),
        "model": "demo", "api_base_url": f"{running.url}/v1", "generation_kwargs": {"max_tokens": LIMIT, "temperature": 0},
    }  # fmt: skip
    whole = chat.OpenAIChatGenerator(**options).run([message])["replies"][0].text
    parts: list[str] = []
    chat.OpenAIChatGenerator(**options, streaming_callback=lambda chunk: parts.append(chunk.content)).run([message])
    assert "".join(parts) == whole != ""


# ---- Node ----------------------------------------------------------------------------------------------------------


def ask_vercel(url: str, *more: str) -> Any:
    """Return what Vercel's `ai` got of a server. CLIENTS_NODE_MODULES names the folder with it and its provider."""
    node, modules = shutil.which("node"), os.environ.get("CLIENTS_NODE_MODULES", "")
    if node is None or not (Path(modules) / "ai").is_dir():
        pytest.skip("needs node, and CLIENTS_NODE_MODULES with npm's ai, zod, @ai-sdk/openai-compatible: make clients")
    ran = subprocess.run(
        [node, str(VERCEL), url, modules, *more], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout)


def test_vercel_ai(running: LiveServer) -> None:
    said = ask_vercel(running.url)
    assert said["text"] == said["streamed"] != ""
    check_trip(Trip(**said["object"]))
    check_trip(Trip(**said["call"]))
    assert said["usage"] <= LIMIT
    assert said["responses"]


def test_vercel_ai_sends_a_picture(reader: LiveServer) -> None:
    said = ask_vercel(reader.url, a_picture())
    assert said["prompt"] > 34
    check_picture_was_read(reader, [said["text"], said["streamed"]])
