"""Keys out of a file: which lines are some, and that a server without them never starts open; and names with several keys."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from app.errors import SettingsInvalid
from app.server.startup import accepts_any_name, read_api_keys
from app.settings import Settings


def keys_of(file: Path) -> tuple[str, ...]:
    return read_api_keys(Settings(api_keys=("given",), api_key_file=file))


def test_a_key_a_line(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# of the web shop\nfirst \n\n  second\n")
    assert keys_of(file) == ("given", "first", "second")


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "does not exist. Is the secret there, and mounted?"),
        (b"", "holds no key, so every request would be refused."),
        (b"# none yet\n\n", "holds no key, so every request would be refused."),
        (b"sk-secret\xff", "is not UTF-8 text with one key per line."),
    ],
)
def test_a_file_without_keys(tmp_path: Path, content: bytes | None, sentence: str) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(SettingsInvalid) as caught:
        keys_of(file)
    assert caught.value.message == f"api_key_file {file} {sentence}"


def test_a_folder_in_its_place(tmp_path: Path) -> None:
    """As a container's bind mount makes one where there was no file."""
    with pytest.raises(SettingsInvalid, match="cannot be read: Is a directory"):
        keys_of(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="root is somebody else for a moment")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    os.seteuid(65534)
    try:
        with pytest.raises(
            SettingsInvalid, match=r"api_key_file .*/keys cannot be read by user 65534: .* has mode 0700"
        ):
            keys_of(tmp_path / "keys")
    finally:
        os.seteuid(0)


@pytest.mark.parametrize(
    ("settings", "num_keys", "anywhere"),
    [
        ({}, 0, (True, False)),
        ({}, 1, (True, False)),
        ({}, 2, (False, False)),
        ({"lora": ("law=/adapters/law",)}, 0, (False, False)),
        ({"lora_root": Path("/adapters")}, 1, (False, False)),
        ({"any_model_name": "on", "lora": ("law=/adapters/law",)}, 2, (True, True)),
        ({"any_model_name": "off"}, 0, (False, False)),
    ],
)
def test_any_model_name_is_accepted_unless_it_may_be_a_mistake(
    settings: dict[str, Any], num_keys: int, anywhere: tuple[bool, bool]
) -> None:
    assert accepts_any_name(Settings(**settings), num_keys) == anywhere
