"""A pytest plugin: llama.cpp's server tests against our server.

`ServerProcess.start` of the tests starts a server of ours with the same options. The texts that the tests expect are
those of llama.cpp's test models, so every text agrees with them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.peers.suites.checkpoints import endless_checkpoint
from tools.peers.suites.outcomes import Outcomes
from tools.peers.suites.server_pool import ServerPool

ENCODERS = ("bert-bge-small", "jina-reranker")
MAX_CONTEXT = 2048  # of the demo
DEFAULT_SLOTS = 4


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Put our servers into the place of theirs before their conftest imports their module."""
    sys.path.insert(0, "")
    sys.modules.setdefault("wget", types.ModuleType("wget"))  # their module imports it to download models
    pool = ServerPool()
    replace(pool)
    early_config.add_cleanup(pool.close)
    early_config.pluginmanager.register(Outcomes("llama.cpp", Path(pool.configuration["outcomes"])))


def replace(pool: ServerPool) -> None:
    import utils  # of the tests, which pytest runs in their folder

    def start(server: Any, timeout_seconds: float = 0) -> None:
        url = pool.url(_model(server, pool.configuration), **_options(server))
        server.server_host, _, port = url.removeprefix("http://").partition(":")
        server.server_port = int(port)

    for name in ("make_request", "make_stream_request"):
        setattr(utils.ServerProcess, name, with_defaults(getattr(utils.ServerProcess, name)))
    utils.ServerProcess.start = start
    utils.ServerProcess.stop = lambda server: None
    utils.ServerPreset.load_all = lambda: None
    utils.match_regex = lambda regex, text: isinstance(text, str)


def with_defaults(send: Callable[..., Any]) -> Callable[..., Any]:
    """Return `send` with the defaults of the server's options `--n-predict` and `--seed` in each completion."""

    def send_with_defaults(server: Any, method: str, path: str, data: Any = None, *more: Any, **options: Any) -> Any:
        if path == "/completion" and isinstance(data, dict):
            defaults = {"n_predict": server.n_predict, "seed": server.seed}
            data = {name: value for name, value in defaults.items() if value is not None} | data
        return send(server, method, path, data, *more, **options)

    return send_with_defaults


def _is_encoder(server: Any) -> bool:
    names = f"{server.model_hf_repo} {server.model_hf_file}"
    return any(name in names for name in ENCODERS)


def _model(server: Any, configuration: dict[str, str]) -> str:
    """Return the checkpoint: the given one, with the chat template and the temperature of the options."""
    if _is_encoder(server):
        return configuration["encoder"]
    file = server.chat_template_file
    template = Path(file).read_text(encoding="utf-8") if file else None
    base, work = Path(configuration["decoder_directory"]), Path(configuration["work"])
    return str(endless_checkpoint(base, work, server.temperature, template))


def _options(server: Any) -> dict[str, object]:
    """Translate the options of `llama-server` that our server has."""
    options: dict[str, object] = {"served_model_name": server.model_alias or "tinyllama-2"}
    slots = server.n_slots or DEFAULT_SLOTS
    if not _is_encoder(server):
        options["max_running_seqs"] = slots
        if server.n_ctx:
            options["max_model_len"] = min(MAX_CONTEXT, server.n_ctx if server.kv_unified else server.n_ctx // slots)
    if server.api_key:
        options["api_keys"] = server.api_key
    options["cors_allow_origins"] = server.cors_origins or "*"  # llama.cpp's default
    return options
