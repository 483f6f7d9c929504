"""Names of models on the hub: what is one, which path has precedence, and what is suggested instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import CheckpointInvalid
from app.weights.hub.cache import HubName, find_snapshot, parse_hub_name
from app.weights.open import find_model, open_model
from tiny_checkpoints import write_checkpoint

COMMIT = "c" * 40


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "hub"


def cached(cache: Path, repo_id: str, commit: str = COMMIT, ref: str = "main") -> Path:
    """Write a checkpoint into the cache, as a snapshot of a branch."""
    folder = cache / f"models--{repo_id.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True, exist_ok=True)
    if ref:
        (folder / "refs" / ref).write_text(commit)
    return write_checkpoint(folder / "snapshots" / commit)


@pytest.mark.parametrize(
    "text, name",
    [
        ("org/name", HubName("org/name")),
        ("Qwen/Qwen2.5-0.5B", HubName("Qwen/Qwen2.5-0.5B")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/3", HubName("org/name", "refs/pr/3")),
        ("org/name:some-Q4_K_M.gguf", HubName("org/name", "main", "some-Q4_K_M.gguf")),
        ("org/name@v1:sub/x.gguf", HubName("org/name", "v1", "sub/x.gguf")),
    ],
)
def test_a_name_has_a_revision_and_a_file(text: str, name: HubName) -> None:
    assert parse_hub_name(Path(text)) == name
    assert str(name) == text


@pytest.mark.parametrize(
    "text",
    [
        "bert",
        "/models/tiny",
        "../name",
        "~/name",
        "a/b/c",
        "org/na me",
        "org/x--y",
        "org/name.git",
        "org/name@../../x",
        "org/name@/etc/x",
        "org/name:/x.gguf",
        "org/a..b",
        "org/name:../x.gguf",
        "org/name:x.bin",
        "org/" + "n" * 97,
    ],
)
def test_a_path_is_no_name(text: str) -> None:
    assert parse_hub_name(Path(text)) is None


def test_a_directory_of_the_name_has_precedence(cache: Path, tmp_path: Path) -> None:
    cached(cache, "org/name")
    write_checkpoint(tmp_path / "org" / "name")
    assert find_model(Path("org/name")) == (Path("org/name"), "")


def test_the_cache_is_found_by_name_revision_and_commit(cache: Path) -> None:
    newer = "d" * 40
    main, other = cached(cache, "org/name"), cached(cache, "org/name", newer, "v2")
    assert find_snapshot(HubName("org/name")) == main
    assert find_snapshot(HubName("org/name", "v2")) == find_snapshot(HubName("org/name", newer)) == other
    assert find_snapshot(HubName("org/name", "v3")) is None
    opened = open_model(Path("org/name@v2"))
    assert (opened.name, opened.directory) == ("org/name", other)


def test_a_folder_of_the_cache_is_its_model(cache: Path) -> None:
    snapshot = cached(cache, "org/name", ref="")
    folder = cache / "models--org--name"
    assert find_model(folder) == find_model(snapshot) == (snapshot, "org/name")
    cached(cache, "org/name", "d" * 40, ref="")
    assert find_model(folder) == (folder, "")  # two snapshots, and no branch says which
    cached(cache, "org/name", "e" * 40)
    assert find_model(folder) == (folder / "snapshots" / ("e" * 40), "org/name")


def test_a_file_of_a_snapshot_is_handed_over(cache: Path) -> None:
    file = cached(cache, "org/name") / "x.gguf"
    file.write_bytes(b"GGUF")
    assert find_model(Path("org/name:x.gguf")) == (file, "org/name")


@pytest.mark.parametrize(
    "text, expected",
    [
        (
            "https://hub.example/org/name/tree/main",
            "is an address; a model of Hugging Face's hub is given by its name: org/name.",
        ),
        ("hf://org/name", "given by its name: org/name."),
        ("bret", "bret is neither a directory or file here, nor a name: demo, bert, minilm. Did you mean bert?"),
        ("Tiny-Llama", "Did you mean org/tiny-llama? A model of Hugging Face's hub is given as ORG/NAME."),
        ("org/tiny-lama", "the hub's cache does not have it. Did you mean org/tiny-llama? armature pull org/tiny-lama"),
        ("else/where", "else/where is no directory here, and the hub's cache does not have it. armature pull else/"),
        ("org/tiny-llama@v2", "org/tiny-llama@v2 is no directory here"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(cache: Path, text: str, expected: str) -> None:
    cached(cache, "org/tiny-llama")
    with pytest.raises(CheckpointInvalid) as refused:
        open_model(Path(text))
    assert expected in refused.value.message
