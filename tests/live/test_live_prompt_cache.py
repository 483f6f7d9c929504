"""A server finds the prompts that an earlier one computed, and says the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from app.errors import SettingsInvalid
from tests.live.live_server import LiveServer, live, starting, until

TEXT = "It was the best of times, it was the worst of times, it was the age of wisdom. " * 2
ASKED: dict[str, Any] = {"prompt": TEXT, "max_tokens": 12, "temperature": 0}


def ask(server: LiveServer, **changes: Any) -> tuple[str, int, int]:
    """The text, the tokens of the prompt, and those of them that were cached."""
    answer = server.client.post("/v1/completions", json={**ASKED, **changes}).json()
    usage = answer["usage"]
    return answer["choices"][0]["text"], usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("prefixes/*.prefix"))


def test_a_prompt_is_found_after_a_restart(tiny: Path, tmp_path: Path) -> None:
    with live(tiny, prompt_cache=tmp_path) as first:
        text, length, cached = ask(first)
        assert length > 128 and cached == 0
    assert kept(tmp_path), "what is not written yet is written at the end"
    assert {file.stat().st_mode & 0o777 for file in kept(tmp_path)} == {0o600}
    with live(tiny, prompt_cache=tmp_path) as second:
        assert ask(second) == (text, length, 128)
        assert second.metric("armature_tokens_total", kind="cached") == 128
        assert ask(second)[2] == length - 1, "then memory has it"
        assert ask(second, prompt="Another " + TEXT)[2] == 0
        reason = second.client.get("/info").json()["plan"]["prompt_cache"]
        assert reason["value"] == str(tmp_path) and "Prompts can be recovered" in reason["reason"]


def test_prompts_are_kept_while_the_server_runs(tiny: Path, tmp_path: Path) -> None:
    """Two servers share the folder: one finds what the other has just computed."""
    with live(tiny, prompt_cache=tmp_path) as first, live(tiny, prompt_cache=tmp_path) as second:
        text, length, _ = ask(first)
        until(lambda: bool(kept(tmp_path)))
        assert ask(second) == (text, length, 128)


def test_another_model_or_precision_finds_nothing(tiny: Path, tmp_path: Path) -> None:
    with live(tiny, prompt_cache=tmp_path) as first:
        ask(first)
    with live(tiny, prompt_cache=tmp_path, precision="bf16") as second:
        assert ask(second)[2] == 0


def test_a_folder_that_others_can_enter_stops_the_start(tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "prefixes").mkdir()
    (tmp_path / "prefixes").chmod(0o755)
    with starting(tiny, prompt_cache=tmp_path) as server:
        until(lambda: bool(server.fatal))
    (error,) = server.fatal
    assert isinstance(error, SettingsInvalid) and "chmod 700" in error.message


def test_nothing_is_kept_unless_it_is_asked_for(server: LiveServer) -> None:
    assert server.find_served.worker._callbacks.on_pause is None
