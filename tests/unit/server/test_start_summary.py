"""The lines of a ready server: few, each with what people ask first, and a command that can be pasted."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from app.server.prepare import Prepared, prepare
from app.server.process import start_summary, try_command
from app.settings import DEMO_DIRECTORY, Settings
from exported_programs import write_program

MAX_LINES = 12  # of the console at start, the address and warnings included
URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_program(tmp_path_factory.mktemp("program"), "recommender")


def prepared(model: Path | None = None, **settings: Any) -> Prepared:
    return prepare(Settings(model=model, calibrate="off", threads=1, precision="fp32", **settings))


def test_a_decoder_is_summarized() -> None:
    start = prepared()
    lines = dict(start_summary(start, URL, 2.04, has_chat=True))
    assert list(lines) == ["model", "machine", "precision", "memory", "speed", "ready", "try"]
    assert len(lines) + 3 <= MAX_LINES
    assert all("\n" not in line and "None" not in line for line in lines.values())
    assert lines["model"] == f"llama: LlamaForCausalLM, 4M parameters of bfloat16, from {DEMO_DIRECTORY}"
    assert "1 thread, " in lines["machine"] and "of memory available" in lines["machine"]
    assert lines["precision"] == f"fp32. {start.plan.decisions['precision'].reason}"
    assert "of KV cache for 64 sequences at a time, of up to 2,048 tokens" in lines["memory"]
    assert "tokens/s" in lines["speed"] or "estimate" in lines["speed"]
    assert lines["ready"] == f"in 2.0 s at {URL} (/ is a page to try the model, /docs lists the API)"


def test_without_the_page_none_is_named() -> None:
    lines = dict(start_summary(prepared(page="off"), URL, 2.0, has_chat=True))
    assert lines["ready"] == f"in 2.0 s at {URL} (/docs lists the API)"


def test_models_that_do_not_generate_have_no_cache(program: Path) -> None:
    for model in (DEMO_DIRECTORY.parent / "bert", program):
        lines = dict(start_summary(prepared(model), URL, 2.0, has_chat=False))
        assert lines["memory"].endswith("of weights")
        assert all("\n" not in line and "None" not in line for line in lines.values())


@pytest.mark.parametrize(("has_chat", "path"), [(True, "/v1/chat/completions"), (False, "/v1/completions")])
def test_a_decoder_is_tried_with_its_usual_route(has_chat: bool, path: str) -> None:
    words = shlex.split(try_command(prepared(), URL, has_chat))
    assert words[:2] == ["curl", f"{URL}{path}"]
    assert json.loads(words[-1])["max_tokens"] == 64


def test_the_key_is_asked_for_and_never_printed() -> None:
    command = try_command(prepared(api_keys=("secret",)), "https://0.0.0.0:8443", has_chat=True)
    assert "secret" not in command and "'authorization: Bearer YOUR_KEY'" in command
    assert command.startswith("curl https://127.0.0.1:8443/v1/") and "--insecure" in command
    assert try_command(prepared(), "http://[::]:80", has_chat=True).startswith("curl 'http://[::1]:80/v1/")


def test_a_gpu_is_named() -> None:
    start = prepared()
    plan = start.plan.changed(device="mps")
    assert dict(start_summary(dataclasses.replace(start, plan=plan), URL, 2.0, has_chat=True))["machine"].startswith(
        "mps of "
    )
