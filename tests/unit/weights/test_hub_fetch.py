"""Fetching from a server with the hub's routes, by the real client: which files, what is resumed and checked, refusals."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import CheckpointInvalid, FetchFailed, ModelUnavailable, ServiceStopping, StartupError
from app.metrics.load_progress import LoadProgress
from app.server.model_source import missing_model, open_or_fetch_model
from app.settings import Settings
from app.weights.hub.cache import METADATA, HubName, cached_revisions, find_snapshot, is_complete, remove_revisions
from app.weights.hub.fetch import _bytes_counter, fetch_model
from app.weights.open import open_model
from hub_server import Hub, client_of, hub_server
from tiny_checkpoints import write_checkpoint
from tiny_encoders import Modules, write_encoder

TINY = HubName("org/tiny")
TINY_FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint as it is published: with files that nobody needs for serving, pickles among them."""
    directory = write_checkpoint(tmp_path_factory.mktemp("published") / "tiny")
    for other in ("README.md", "pytorch_model.bin", "model.gguf", "modeling_tiny.py", "tokenizer.model"):
        (directory / other).write_bytes(b"nobody reads this")
    (directory / "onnx").mkdir()
    (directory / "onnx" / "model.safetensors").write_bytes(b"nor this")
    return directory


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    with hub_server() as served, client_of(served, tmp_path / "hub", monkeypatch):
        yield served


def fetch(name: HubName = TINY) -> Path:
    return fetch_model(name, lambda progress: None)


def refusal(kind: type[StartupError], name: HubName = TINY) -> str:
    with pytest.raises(kind) as refused:
        fetch(name)
    assert type(refused.value) is kind
    return refused.value.message


def files_of(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_only_the_needed_files_are_fetched(hub: Hub, checkpoint: Path) -> None:
    hosted = hub.host("org/tiny", checkpoint)
    folder = fetch()
    assert files_of(folder) == TINY_FILES
    assert folder.name == hosted.commit
    opened = open_model(Path("org/tiny"))
    assert (opened.name, opened.directory) == ("org/tiny", folder)


def test_what_is_cached_is_not_fetched_nor_asked_for_again(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    settings = Settings(model=Path("org/tiny"))
    assert missing_model(settings) == TINY
    open_or_fetch_model(settings)
    hub.requests.clear()
    assert missing_model(settings) is None
    assert open_or_fetch_model(settings).name == "org/tiny"
    assert hub.requests == []
    fetch()  # `armature pull` asks for the newest commit
    assert {one.split("/")[-2] for one in hub.requests} == {"revision"}


def test_the_files_of_an_index_are_fetched(hub: Hub, tmp_path: Path) -> None:
    directory = write_checkpoint(tmp_path / "sharded", shards=3)
    (directory / "consolidated.safetensors").write_bytes(b"the same weights in another form")
    hub.host("org/tiny", directory)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert files_of(fetch()) == sorted({*TINY_FILES, *shards, "model.safetensors.index.json"} - {"model.safetensors"})


@pytest.mark.parametrize("lists_tokens", [True, False])
def test_files_about_tokens_are_fetched_where_older_versions_need_them(
    hub: Hub, tmp_path: Path, lists_tokens: bool
) -> None:
    directory, maps = write_checkpoint(tmp_path / "old"), ["added_tokens.json", "special_tokens_map.json"]
    for name in maps:
        (directory / name).write_text("{}")
    config = json.loads((directory / "tokenizer_config.json").read_text())
    more = {"added_tokens_decoder": {}} if lists_tokens else {}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | more))
    hub.host("org/tiny", directory)
    assert files_of(fetch()) == sorted([*TINY_FILES, *([] if lists_tokens else maps)])


def test_the_modules_of_sentence_transformers_are_fetched(hub: Hub, tmp_path: Path) -> None:
    directory = write_encoder(tmp_path / "encoder", modules=Modules(dense=((8, "torch.nn.modules.activation.Tanh"),)))
    hub.host("org/tiny", directory)
    folder = fetch()
    assert {"modules.json", "1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= set(
        files_of(folder)
    )
    assert open_model(folder).name == "org/tiny"
    (folder / "modules.json").unlink()  # without it the vectors would differ
    assert not is_complete(TINY)


def test_a_revision_is_its_own_snapshot(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint, revisions=("main", "v2"))
    fetch(HubName("org/tiny", "v2"))
    assert find_snapshot(TINY) is None
    hub.models["org/tiny"].commit = "e" * 40
    assert fetch().name == "e" * 40
    assert [(one.refs, one.commit[0]) for one in cached_revisions()] == [(("main",), "e"), (("v2",), "a")]
    remove_revisions("org/tiny", ["e" * 40])
    assert files_of(find_snapshot(HubName("org/tiny", "v2")) or Path()) == TINY_FILES


def test_a_gguf_file_is_fetched_with_its_other_parts(hub: Hub, tmp_path: Path) -> None:
    directory = tmp_path / "gguf"
    directory.mkdir()
    for file in ("one.gguf", "two-00001-of-00002.gguf", "two-00002-of-00002.gguf", "README.md"):
        (directory / file).write_bytes(file.encode())
    hub.host("org/tiny", directory)
    assert files_of(fetch(HubName("org/tiny", file="one.gguf"))) == ["one.gguf"]
    assert missing_model(Settings(model=Path("org/tiny:one.gguf"))) is None
    folder = fetch(HubName("org/tiny", file="two-00001-of-00002.gguf"))
    assert (folder / "two-00002-of-00002.gguf").read_bytes() == b"two-00002-of-00002.gguf"
    assert "has no file tow.gguf: it has one.gguf, two-0" in refusal(
        CheckpointInvalid, HubName("org/tiny", file="tow.gguf")
    )
    assert "Of its GGUF files one is given as org/tiny:one.gguf" in refusal(CheckpointInvalid)


def test_progress_counts_the_bytes_of_all_missing_files(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    seen: list[LoadProgress] = []
    folder = fetch_model(TINY, seen.append)
    fetched = [file for file in folder.iterdir() if file.name not in METADATA]  # these are needed for the total
    assert {one.total_bytes for one in seen} == {sum(file.stat().st_size for file in fetched)}
    assert [one.done_bytes for one in seen] == sorted(one.done_bytes for one in seen)
    assert (seen[-1].percent, seen[-1].phase) == (100, "fetching org/tiny")


def test_a_broken_connection_is_resumed(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000)  # whole chunks are kept
    hub.host("org/tiny", checkpoint)
    hub.breaks_after["model.safetensors"] = 5_000
    folder = fetch()
    assert (folder / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    sent = [one for one in hub.requests if one.startswith("GET") and "/model.safetensors" in one]
    assert len(sent) == 2 and sent[1].endswith(" from 5000")


def test_after_a_stop_the_complete_files_are_kept(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    total = (checkpoint / "model.safetensors").stat().st_size

    def stop(progress: LoadProgress) -> None:
        if progress.total_bytes - progress.done_bytes < total:  # within the weights
            raise ServiceStopping("stop")

    with pytest.raises(ServiceStopping):
        fetch_model(TINY, stop)
    kept = files_of(find_snapshot(TINY) or Path())
    assert kept == [file for file in TINY_FILES if file != "model.safetensors"]
    assert not list(Path("hub").rglob("*.incomplete"))
    assert missing_model(Settings(model=Path("org/tiny"))) == TINY
    hub.requests.clear()
    assert files_of(fetch()) == TINY_FILES
    assert hub.fetched() == []  # the weights come from the storage; nothing else was missing


def test_what_a_killed_process_left_is_removed(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    blobs = fetch().parent.parent / "blobs"
    abandoned, others = blobs / "1.incomplete", blobs / "2.incomplete"
    for file in (abandoned, others):
        file.write_bytes(b"half")
    os.utime(abandoned, (1e9, 1e9))
    fetch()
    assert [file.name for file in blobs.glob("*.incomplete")] == [others.name]  # another process may be writing it


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_a_file_with_another_hash_is_removed(hub: Hub, checkpoint: Path, file: str) -> None:
    hub.host("org/tiny", checkpoint)
    hub.damaged.add(file)
    assert f"{file} of org/tiny arrived damaged" in refusal(FetchFailed)
    assert file not in files_of(find_snapshot(TINY) or Path())
    hub.damaged.clear()
    assert files_of(fetch()) == TINY_FILES


def test_a_file_with_another_size_is_refused(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    hub.short.add("model.safetensors")
    assert "did not arrive whole: Consistency check failed" in refusal(FetchFailed)
    assert "model.safetensors" not in files_of(find_snapshot(TINY) or Path())


def test_a_name_that_the_hub_does_not_have(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.host("org/tiny", checkpoint)
    told = refusal(ModelUnavailable, HubName("org/tinny"))  # nothing is in the cache: the hub has similar names
    assert "the hub has no model of this name that is public. Did you mean org/tiny? A private model needs a" in told
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert "no model of this name that this token may read" in refusal(ModelUnavailable, HubName("org/none"))
    assert "org/tiny has no revision v9: give a branch" in refusal(ModelUnavailable, HubName("org/tiny", "v9"))


def test_models_that_need_rights(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.host("org/tiny", checkpoint, token="mine")
    assert "A private model needs a token" in refusal(ModelUnavailable)
    monkeypatch.setenv("HF_TOKEN", "expired")
    assert "The hub refuses the token for org/tiny. Give a token" in refusal(ModelUnavailable)
    monkeypatch.setenv("HF_TOKEN", "mine")
    assert files_of(fetch()) == TINY_FILES  # and the storage asserts that it was not sent the token
    hub.host("org/gated", checkpoint, gated=True)
    told = refusal(ModelUnavailable, HubName("org/gated"))
    assert f"org/gated is gated. Accept its terms on {hub.url}/org/gated, then" in told


@pytest.mark.parametrize(
    "status, kind, expected",
    [
        (403, ModelUnavailable, "The hub forbids this token to read org/tiny."),
        (429, FetchFailed, "too many requests. Try again later"),
        (503, FetchFailed, "answers 503 for org/tiny. Try again later."),
        (200, FetchFailed, "does not answer as a hub does for org/tiny: Expecting value"),
    ],
)
def test_a_hub_that_refuses(hub: Hub, status: int, kind: type[StartupError], expected: str) -> None:
    hub.status = status
    assert expected in refusal(kind)


def test_a_cache_that_cannot_be_written(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.host("org/tiny", checkpoint)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(checkpoint / "config.json" / "hub"))
    told = refusal(ModelUnavailable)
    assert told.endswith(": Not a directory. HF_HUB_CACHE sets the folder of the cache.")


def test_the_bytes_of_xet_storage_are_counted_once() -> None:
    """Its downloads report the bytes of the file and those of the network, to the library's own reporter."""
    from huggingface_hub.utils._xet_progress_reporting import XetDownloadProgressReporter

    counts: list[int] = []
    with XetDownloadProgressReporter(
        reconstruction_desc="", total=100, log_level=30, tqdm_class=_bytes_counter(counts.append)
    ) as reporter:
        for done in (60, 100):
            reporter.update_progress(
                SimpleNamespace(
                    total_bytes=100,
                    total_bytes_completed=done,
                    total_bytes_completion_rate=1.0,
                    total_transfer_bytes_completed=done // 2,
                    total_transfer_bytes_completion_rate=1.0,
                )
            )
    assert counts == [60, 40]


def test_no_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checkpoint: Path) -> None:
    with hub_server() as gone:
        pass
    with client_of(gone, tmp_path / "hub", monkeypatch):
        told = refusal(FetchFailed)
    assert told.startswith(f"The hub ({gone.url}) cannot be reached for org/tiny: ConnectError")
    assert told.endswith("A directory with the model's files needs none: --model DIR.")


def test_a_cache_that_an_older_library_wrote_is_completed_or_used(hub: Hub, checkpoint: Path) -> None:
    hub.host("org/tiny", checkpoint)
    folder = fetch()
    shutil.rmtree(folder.parent.parent / "trees")  # the list of files on the hub, which only newer libraries keep
    from huggingface_hub import _tree_cache

    _tree_cache._IN_MEMORY_TREE_CACHE.clear()
    settings = Settings(model=Path("org/tiny"))
    assert missing_model(Settings(model=Path("org/tiny"), offline="on")) is None
    assert missing_model(settings) == TINY
    hub.status = 503
    assert open_or_fetch_model(settings).name == "org/tiny"
    hub.status = 0
    open_or_fetch_model(settings)
    assert missing_model(settings) is None


@pytest.mark.parametrize("by_variable", [False, True])
def test_offline_fetches_nothing(
    hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch, by_variable: bool
) -> None:
    from huggingface_hub import constants

    hub.host("org/tiny", checkpoint)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    settings = Settings(model=Path("org/tiny"), offline="off" if by_variable else "on")
    with pytest.raises(ModelUnavailable, match="Nothing is fetched, since offline is on"):
        open_or_fetch_model(settings)
    assert hub.requests == []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    (fetch() / "tokenizer.json").unlink()
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", by_variable)
    with pytest.raises(ModelUnavailable, match="does not have all files of it"):
        open_or_fetch_model(settings)
    assert hub.requests == []


def _without(directory: Path, *files: str, **added: bytes) -> None:
    for file in files:
        (directory / file).unlink()
    for name, content in added.items():
        (directory / name.replace("__", ".")).write_bytes(content)


@pytest.mark.cases(test=3)
@pytest.mark.parametrize(
    "removed, added, expected",
    [
        (["model.safetensors"], {"pytorch_model__bin": b"1"}, "pickled weights only (pytorch_model.bin)"),
        (["model.safetensors"], {"a__gguf": b"1"}, "no *.safetensors file. Of its GGUF files one is given as org/tiny:a"),
        (["model.safetensors"], {"a__safetensors": b"", "b__safetensors": b""}, "has 2 *.safetensors files and no model"),
        (["tokenizer.json"], {}, "org/tiny has no tokenizer.json"),
        (["config.json"], {"adapter_config__json": b"{}"}, "org/tiny is an adapter"),
        (["config.json"], {}, "org/tiny has no config.json"),
        ([], {"model__safetensors__index__json": b'{"weight_map": {"a": "x.safetensors"}}'}, "that the hub does not have: x"),
        ([], {"config__json": json.dumps({"architectures": ["FancyForCausalLM"]}).encode()}, "FancyForCausalLM"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_before_its_weights(
    hub: Hub, tmp_path: Path, removed: list[str], added: dict[str, Any], expected: str
) -> None:
    directory = write_checkpoint(tmp_path / "published")
    _without(directory, *removed, **added)
    hub.host("org/tiny", directory)
    assert expected in refusal(CheckpointInvalid)
    assert not [one for one in hub.requests if one.endswith((".safetensors", ".bin", ".gguf"))]


def test_a_full_disk_is_known_before(hub: Hub, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.host("org/tiny", checkpoint)
    usage = shutil.disk_usage(checkpoint)
    monkeypatch.setattr("app.weights.hub.fetch.shutil.disk_usage", lambda path: usage._replace(free=1000))
    assert "are free there. Remove models (armature list, armature rm)" in refusal(ModelUnavailable)
    assert not [one for one in hub.requests if one.endswith("tokenizer.json")]
