"""A pytest plugin: vLLM's tests over HTTP against our server.

The tests get a `RemoteOpenAIServer` of ours. vLLM itself is not installed: its modules are placeholders, and a test
that calls one of them tests a class and not a server, so it does not apply.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest

from tools.peers.suites.checkpoints import endless_checkpoint, long_checkpoint
from tools.peers.suites.outcomes import Outcomes
from tools.peers.suites.server_pool import ServerPool

# Packages that only vLLM's own classes need, next to vLLM.
PLACEHOLDERS = ("vllm", "mteb", "openai_harmony", "tblib", "mistral_common", "tests.models")
VERSION = "0.33.0"
# Files whose tests count on texts that do not end.
ENDLESS = ("completion/test_completion.py", "test_return_token_ids.py", "test_return_tokens_as_ids.py")

# Files with longer texts than the demo's context.
LONG_CONTEXT = 12_288
LONG_TEXTS = (
    "test_chunked_prompt.py",
    "test_tokenization.py",
    "serve/instrumentator/test_basic.py",
)
# Files with token ids that the demo's vocabulary has not, and a size that is enough for them.
LARGE_VOCABULARY, VOCABULARY = ("test_logprob_token_ids.py", "completion/test_completion.py"), 5120


class Placeholder:
    """Anything that a module of vLLM defines. Whoever calls it tests a class of vLLM."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name

    def __getattr__(self, name: str) -> Any:
        if name == "model_validate":
            return namespace
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")

    def __call__(self, *arguments: object, **options: object) -> Any:
        if "PYTEST_CURRENT_TEST" not in os.environ:  # a module of tests is being imported
            return Placeholder(self.__name__)
        pytest.skip(f"calls {self.__name__.rpartition('.')[2]} of vLLM, not a server")

    def __mro_entries__(self, bases: object) -> tuple[type, ...]:
        return (object,)

    def __or__(self, other: object) -> object:
        return object

    __ror__ = __or__

    def __getitem__(self, key: object) -> object:
        return object


def namespace(value: Any) -> Any:
    """Return an object with the fields of a JSON value, as a response class of vLLM reads it."""
    if isinstance(value, dict):
        return types.SimpleNamespace(**{name: namespace(item) for name, item in value.items()})
    return [namespace(item) for item in value] if isinstance(value, list) else value


class PlaceholderModule(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Placeholder(f"{self.__name__}.{name}")


class PlaceholderFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports placeholders for vLLM's modules."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if any(name == known or name.startswith(f"{known}.") for known in PLACEHOLDERS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return PlaceholderModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: a placeholder has no code."""


def _client(library: str, kind: str, path: str) -> Callable[..., Any]:
    """Return a method that makes a client of a library for the server."""

    def make(server: RemoteOpenAIServer, **options: Any) -> Any:
        place = {"base_url": f"{server.url_root}{path}", "api_key": "none", "timeout": 300, "max_retries": 0}
        return getattr(importlib.import_module(library), kind)(**place | options)

    return make


class RemoteOpenAIServer:
    """What the tests use of vLLM's class of the same name, with our server behind it."""

    DUMMY_API_KEY = "none"
    pool: ServerPool
    get_client, get_async_client = _client("openai", "OpenAI", "/v1"), _client("openai", "AsyncOpenAI", "/v1")
    get_client_anthropic = _client("anthropic", "Anthropic", "")
    get_async_client_anthropic = _client("anthropic", "AsyncAnthropic", "")

    def __init__(self, model: str, vllm_serve_args: Sequence[str], **options: Any) -> None:
        given = list(map(str, vllm_serve_args))
        if any(word.startswith("--enable-lora") for word in given):
            given = [word for word in given if "lora" not in word]
        self.model = _value(given, "--served-model-name") or model
        settings: dict[str, object] = {"served_model_name": self.model}
        encoder = _is_encoder(model)
        longest = _value(given, "--max-model-len", "--max_model_len")
        if longest and not encoder:
            shape = json.loads(Path(self.pool.configuration["decoder_directory"], "config.json").read_text("utf-8"))
            context = LONG_CONTEXT if _runs(LONG_TEXTS) else shape["max_position_embeddings"]
            settings["max_model_len"] = min(int(longest), context)
        if key := _value(given, "--api-key"):
            settings["api_keys"] = key
        if limit := _value(given, "--max-logprobs"):
            settings["max_logprobs"] = int(limit)
        if policy := _value(given, "--scheduling-policy"):
            settings["scheduling_policy"] = policy
        self.url_root = self.pool.url(self._checkpoint(encoder), **settings)
        self.host, _, port = self.url_root.removeprefix("http://").partition(":")
        self.port = int(port)

    def _checkpoint(self, encoder: bool) -> str:
        configuration = self.pool.configuration
        if encoder:
            return str(configuration["encoder"])
        decoder, work = Path(configuration["decoder_directory"]), Path(configuration["work"])
        if _runs(LARGE_VOCABULARY):
            return str(endless_checkpoint(decoder, work, vocab_size=VOCABULARY))
        if _runs(ENDLESS):
            return str(endless_checkpoint(decoder, work))
        if _runs(LONG_TEXTS):
            return str(long_checkpoint(decoder, work, LONG_CONTEXT))
        return str(configuration["decoder"])

    def __enter__(self) -> RemoteOpenAIServer:
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the server to the pool."""

    def url_for(self, *parts: str) -> str:
        return urljoin(f"{self.url_root}/", "/".join(part.strip("/") for part in parts))


def _value(words: Sequence[str], *names: str) -> str | None:
    """Return the value of an option: the last one, if it is given several times."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            found = value if equals else words[at + 1]
    return found


def _runs(files: Sequence[str]) -> bool:
    return any(file in os.environ["PYTEST_CURRENT_TEST"] for file in files)


def _is_encoder(model: str) -> bool:
    return any(word in model.lower() for word in ("embed", "e5", "bge", "gte", "rerank", "minilm", "bert"))


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put placeholders and our server into the place of vLLM before conftests and tests import it."""
    sys.meta_path.insert(0, PlaceholderFinder())
    RemoteOpenAIServer.pool = pool = ServerPool()
    ours: Any = PlaceholderModule("tests.utils")
    ours.RemoteOpenAIServer = ours.RemoteVLLMServer = RemoteOpenAIServer
    ours.ROCM_EXTRA_ARGS, ours.ROCM_ENV_OVERRIDES = [], {}
    ours.create_new_process_for_each_test = lambda *arguments: lambda test: test
    sys.modules["tests.utils"] = ours
    give_tokenizer(pool.configuration)
    early_config.addinivalue_line("markers", "skip_global_cleanup: a marker of vLLM")
    early_config.add_cleanup(pool.close)
    early_config.pluginmanager.register(
        Outcomes("vllm", Path(pool.configuration["outcomes"]), "Placeholder", "Mock object")
    )


def give_tokenizer(configuration: dict[str, str]) -> None:
    import vllm.tokenizers
    import vllm.transformers_utils.repo_utils
    import vllm.version

    def get_tokenizer(tokenizer_name: str = "", *arguments: object, **options: object) -> Any:
        from transformers import AutoTokenizer

        kind = "encoder" if _is_encoder(tokenizer_name) else "decoder"
        return AutoTokenizer.from_pretrained(configuration[f"{kind}_directory"])

    vllm.tokenizers.get_tokenizer = get_tokenizer
    # Fixtures download adapters, which only tests with the adapter's name use.
    vllm.transformers_utils.repo_utils.hf_api = lambda: types.SimpleNamespace(snapshot_download=lambda **options: "")
    vllm.version.__version__ = VERSION
