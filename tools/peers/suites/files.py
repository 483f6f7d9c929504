"""The suites and their files."""

from __future__ import annotations

from dataclasses import dataclass, field

from tools.peers.suites.server_pool import ROOT
from tools.peers.suites.sources import LLAMA_CPP, VLLM, Package

DEMO = "app/demo/llama"


@dataclass(frozen=True, slots=True)
class Suite:
    """Files with tests, and how pytest runs them.

    `package` has the tests; without one they are ours. `above` says that the tests are imported as a package, from the
    folder above. `decoder` is a checkpoint, or `real` for the one that `make real-model` writes.
    `environment` is the folder of the virtual environment: packages that exclude each other have their own.
    `programs` are packages that tests only start; each has an environment of its own.
    """

    name: str
    package: Package | None
    files: tuple[str, ...]
    options: tuple[str, ...]
    decoder: str = DEMO
    above: bool = False
    requirements: list[str] = field(default_factory=list)
    node_packages: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    environment: str = "venv"


LLAMA_CPP_FILES = (
    "basic", "chat_completion", "compat_anthropic", "compat_oai_responses", "completion", "ctx_shift", "embedding",
    "ignore_eos", "infill", "rerank", "security", "template", "tokenize", "tool_call",
)  # fmt: skip
VLLM_FILES = (
    "anthropic/test_messages.py",
    "openai/chat_completion/test_chat.py",
    "openai/chat_completion/test_chat_completion.py",
    "openai/chat_completion/test_chat_echo.py",
    "openai/chat_completion/test_chat_logit_bias_validation.py",
    "openai/chat_completion/test_completion_with_function_calling.py",
    "openai/chat_completion/test_extra_content_fields.py",
    "openai/chat_completion/test_logprob_token_ids.py",
    "openai/chat_completion/test_non_object_body_validation.py",
    "openai/completion/test_completion.py",
    "openai/completion/test_completion_text_offset.py",
    "openai/completion/test_prompt_validation.py",
    "openai/completion/test_token_in_token_out.py",
    "openai/models/test_models.py",
    "openai/responses/test_basic.py",
    "openai/responses/test_errors.py",
    "openai/responses/test_function_call.py",
    "openai/responses/test_simple.py",
    "openai/responses/test_stateful.py",
    "openai/responses/test_streaming_events.py",
    "openai/responses/test_structured_output.py",
    "openai/test_chunked_prompt.py",
    "openai/test_return_token_ids.py",
    "openai/test_return_tokens_as_ids.py",
    "openai/test_stop_token_ids.py",
    "pooling/embed/test_cohere_online.py",
    "pooling/embed/test_online.py",
    "pooling/embed/test_online_dimensions.py",
    "pooling/scoring/test_bi_encoder_online.py",
    "serve/instrumentator/test_basic.py",
    "serve/tokenize/test_tokenization.py",
)
CLIENTS = ROOT / "requirements" / "clients.in"
CLIENT_FILES = ("agents", "clients", "dialects", "openai_tools", "encoder_clients", "oip")
NODE_PACKAGES = (
    "ai@6", "zod@4", "@ai-sdk/openai@3", "@ai-sdk/openai-compatible@2", "@anthropic-ai/sdk", "openai",
    "@openai/codex", "@anthropic-ai/claude-code", "opencode-ai", "@qwen-code/qwen-code", "@continuedev/cli", "cline",
    "@mariozechner/pi-coding-agent",
)  # fmt: skip
PROGRAMS = ("aider-chat", "llm", "openai-agents")
SUITES = {
    suite.name: suite
    for suite in (
        Suite(
            "llama.cpp",
            LLAMA_CPP,
            tuple(f"unit/test_{name}.py" for name in LLAMA_CPP_FILES),
            ("-m", "not slow", "-p", "tools.peers.suites.llama_cpp_plugin"),
        ),
        Suite(
            "vllm",
            VLLM,
            tuple(f"tests/entrypoints/{name}" for name in VLLM_FILES),
            (
                "--confcutdir=tests/entrypoints",
                "-o",
                "asyncio_default_fixture_loop_scope=function",
                "-p",
                "tools.peers.suites.vllm_plugin",
            ),
            requirements=["anthropic", "pybase64", "regex", "requests"],
            above=True,
        ),
        Suite(
            "clients",
            None,
            tuple(f"tests/live/test_live_{name}.py" for name in CLIENT_FILES),
            ("-W", "default", "-p", "tools.peers.suites.outcomes"),
            requirements=["-r", str(CLIENTS)],
            node_packages=NODE_PACKAGES,
            programs=PROGRAMS,
        ),
        Suite(
            "chroma",
            None,
            ("tests/live/test_live_chroma.py",),
            ("-W", "default", "-p", "tools.peers.suites.outcomes"),
            requirements=["chromadb"],
            environment="venv-chroma",
        ),
        Suite("schemas", None, (), ()),
    )
}
