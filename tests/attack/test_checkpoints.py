"""A checkpoint reads its own files only: links out of it, pipes, devices and impossible names are refused with a sentence."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from app.errors import CheckpointInvalid, SettingsInvalid
from app.server.process import tls_context
from app.server.startup import read_api_keys
from app.settings import DEMO_DIRECTORY, Settings
from app.text.chat import MAX_TEMPLATE_BYTES, open_chat_template
from app.text.tokenizer import Tokenizer
from app.weights.cache_file import checkpoint_fingerprint
from app.weights.checkpoint import Checkpoint
from app.weights.files import MAX_JSON_BYTES, file_in, open_regular
from app.weights.hub.cache import _snapshot_in
from app.weights.open import open_model

INDEX = "model.safetensors.index.json"
DECODER_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "model.safetensors", "chat_template.jinja",
)  # fmt: skip
ENCODER_FILES = (
    "config.json", "tokenizer.json", "model.safetensors", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json",
    "1_Pooling/config.json",
)  # fmt: skip
ALL_FILES = [("llama", name) for name in DECODER_FILES] + [("bert", name) for name in ENCODER_FILES]


def read(directory: Path) -> None:
    """Reads everything that a start reads except the weights' values."""
    opened = open_model(directory)
    assert isinstance(opened, Checkpoint)
    tokenizer = Tokenizer(directory)
    template = open_chat_template(directory, tokenizer.config, tokenizer.named_tokens)
    if template is not None:
        template.close()


def copied(kind: str, target: Path) -> Path:
    directory = Path(shutil.copytree(DEMO_DIRECTORY.parent / kind, target))
    if kind == "llama":
        (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    return directory


@pytest.mark.parametrize("kind, name", ALL_FILES)
def test_a_link_out_of_the_checkpoint_is_not_followed(kind: str, name: str, tmp_path: Path) -> None:
    """Even one to a file that would serve: what is outside does not belong to the checkpoint."""
    directory = copied(kind, tmp_path / "model")
    file, outside = directory / name, tmp_path / "outside"
    file.rename(outside)
    file.symlink_to(outside)
    with pytest.raises(CheckpointInvalid, match="leads out of the checkpoint") as caught:
        read(directory)
    assert str(file) in caught.value.message


@pytest.mark.parametrize("kind, name", ALL_FILES)
@pytest.mark.parametrize("special", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_opened(kind: str, name: str, special: str, tmp_path: Path) -> None:
    directory = copied(kind, tmp_path / "model")
    file = directory / name
    file.unlink()
    if special == "pipe":
        os.mkfifo(file)
    elif special == "device":
        file.symlink_to("/dev/zero")
    else:
        file.mkdir()
    with pytest.raises(CheckpointInvalid, match=r"not a regular file|leads out of the checkpoint"):
        read(directory)


def make_special(file: Path, kind: str) -> None:
    """Put something there from which reading waits, never ends, or fails."""
    if kind == "pipe":
        os.mkfifo(file)
    elif kind == "folder":
        file.mkdir()
    elif kind == "device":
        file.symlink_to("/dev/zero")
    else:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(file))


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "socket"])
def test_only_regular_files_are_opened_wherever_a_start_reads(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing here may wait: there is no writer, and a zero device has no end."""
    monkeypatch.chdir(tmp_path)  # the name of a socket is short
    file = Path(kind)
    make_special(file, kind)
    with pytest.raises(OSError):
        open_regular(file)
    with pytest.raises(SettingsInvalid, match="api_key_file"):
        read_api_keys(Settings(api_key_file=file))
    with pytest.raises(SettingsInvalid, match="tls_cert"):
        tls_context(Settings(tls_cert=file, tls_key=file))
    for name in (f"{kind}.gguf", f"{kind}.pt2"):
        make_special(Path(name), kind)
        with pytest.raises(CheckpointInvalid):
            open_model(Path(name))
    copied("llama", tmp_path / "model")
    notes, checkpoint = tmp_path / "packs", open_model(tmp_path / "model")
    assert isinstance(checkpoint, Checkpoint)
    os.utime(tmp_path / "model" / "config.json", (1, 1))
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    expected = checkpoint_fingerprint(checkpoint, notes, 1)
    (note,) = notes.glob("*.content")
    note.unlink()
    make_special(note.relative_to(tmp_path), kind)
    assert checkpoint_fingerprint(checkpoint, notes, 1) == expected
    refs = tmp_path / "models--a--b" / "refs"
    refs.mkdir(parents=True)
    make_special((refs / "main").relative_to(tmp_path), kind)
    assert _snapshot_in(refs.parent, "main") is None


def test_a_folder_that_leads_out_is_not_followed(tmp_path: Path) -> None:
    directory = copied("bert", tmp_path / "model")
    (directory / "1_Pooling").rename(tmp_path / "pooling")
    (directory / "1_Pooling").symlink_to(tmp_path / "pooling")
    with pytest.raises(CheckpointInvalid, match="leads out of the checkpoint"):
        read(directory)


def test_a_module_above_the_checkpoint_is_not_read(tmp_path: Path) -> None:
    """`..` is a folder's name without a separator."""
    directory = copied("bert", tmp_path / "model")
    (tmp_path / "config.json").write_bytes((directory / "1_Pooling/config.json").read_bytes())
    modules = json.loads((directory / "modules.json").read_text())
    modules[1]["path"] = ".."
    (directory / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(CheckpointInvalid, match="leads out of the checkpoint"):
        read(directory)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_volume_of_kubernetes_is_read(kind: str, tmp_path: Path) -> None:
    """Files are links to ..data/FILE, and ..data is a link to a folder with a time in its name."""
    volume = tmp_path / "volume"
    copied(kind, volume / "..2026_11_23_10_00_00.1")
    (volume / "..data").symlink_to("..2026_11_23_10_00_00.1")
    for file in (volume / "..data").iterdir():
        (volume / file.name).symlink_to(f"..data/{file.name}")
    read(volume)
    # A folder of a volume, mounted by links too.
    (tmp_path / "models").mkdir()
    (tmp_path / "models/one").symlink_to(volume)
    read(tmp_path / "models/one")


def write_hub_cache(kind: str, cache: Path) -> Path:
    model = cache / "models--owner--name"
    snapshot, blobs = model / "snapshots" / "0123abcd", model / "blobs"
    copied(kind, snapshot)
    blobs.mkdir()
    for number, file in enumerate(sorted(each for each in snapshot.rglob("*") if each.is_file())):
        file.rename(blobs / str(number))
        file.symlink_to(os.path.relpath(blobs / str(number), file.parent))
    return snapshot


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_a_hub_cache_is_read(kind: str, tmp_path: Path) -> None:
    read(write_hub_cache(kind, tmp_path))


def test_a_snapshot_reads_no_blob_of_another_model(tmp_path: Path) -> None:
    snapshot = write_hub_cache("llama", tmp_path)
    other = tmp_path / "models--owner--private" / "blobs" / "0"
    other.parent.mkdir(parents=True)
    other.write_text("{{ 'secret' }}")
    (snapshot / "chat_template.jinja").unlink()
    (snapshot / "chat_template.jinja").symlink_to(other)
    with pytest.raises(CheckpointInvalid, match="leads out of the checkpoint"):
        read(snapshot)


def name_shards(directory: Path, name: str) -> None:
    (directory / INDEX).write_text(json.dumps({"weight_map": {"model.embed_tokens.weight": name}}))


@pytest.mark.parametrize(
    "name",
    ["a" * 5_000, "é" * 200, "../config.json", "/etc/passwd", "a\0b", "\ud800.safetensors", "..", ".", "", "a/b"],
    ids=["long", "long in bytes", "above", "absolute", "null", "surrogate", "parent", "itself", "empty", "nested"],
)
def test_shards_with_impossible_names_give_a_short_sentence(name: str, tmp_path: Path) -> None:
    directory = copied("llama", tmp_path / "model")
    name_shards(directory, name)
    with pytest.raises(CheckpointInvalid) as caught:
        read(directory)
    assert len(caught.value.message) < 1_000
    caught.value.message.encode(errors="backslashreplace")


def test_a_link_to_itself_is_refused(tmp_path: Path) -> None:
    directory = copied("llama", tmp_path / "model")
    (directory / "config.json").unlink()
    (directory / "config.json").symlink_to("config.json")
    with pytest.raises(CheckpointInvalid, match=r"config\.json"):
        read(directory)


@pytest.mark.parametrize(
    "name, size",
    [("config.json", MAX_JSON_BYTES), ("chat_template.jinja", MAX_TEMPLATE_BYTES), ("modules.json", MAX_JSON_BYTES)],
)
def test_files_that_are_too_large_are_not_read(name: str, size: int, tmp_path: Path) -> None:
    directory = copied("llama", tmp_path / "model")
    with (directory / name).open("wb") as stream:
        stream.truncate(size + 1)  # takes no disk
    with pytest.raises(CheckpointInvalid, match="longer than"):
        read(directory)


@pytest.mark.parametrize("change", [lambda file: file.unlink(), lambda file: None], ids=["missing", "present"])
def test_a_plain_file_and_a_missing_one_are_paths(change: Callable[[Path], None], tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text("{}")
    change(file)
    assert file_in(tmp_path, "config.json") == file


def test_a_program_that_is_a_link_in_a_folder_is_not_followed(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (tmp_path / "outside.pt2").write_bytes(b"")
    (folder / "model.pt2").symlink_to(tmp_path / "outside.pt2")
    with pytest.raises(CheckpointInvalid, match="leads out of the checkpoint"):
        open_model(folder)
