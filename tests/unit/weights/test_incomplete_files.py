"""Checkpoints that are not there, not readable or copied by half: each is refused with what is wrong and what would mend it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from app.errors import CheckpointInvalid
from app.weights.checkpoint import INDEX
from app.weights.open import open_model
from tiny_checkpoints import write_checkpoint

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 2200119864\n"
NOBODY = 65534
SHARD = "model-00002-of-00003.safetensors"


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointInvalid) as caught:
        open_model(path)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "models" / "tiny")


# ---- no volume ---------------------------------------------------------------------------------------------------------


def test_a_volume_that_is_not_mounted(tmp_path: Path) -> None:
    said = refusal(tmp_path / "models" / "tiny")
    assert (
        f"{tmp_path}/models/tiny does not exist, nor does {tmp_path}/models: is a volume with models mounted there?"
        in said
    )


def test_a_volume_that_is_empty(tmp_path: Path) -> None:
    """As one is that was just made: ext4 has a folder of its own in it."""
    (tmp_path / "models" / "lost+found").mkdir(parents=True)
    assert f"does not exist, and {tmp_path}/models is empty: is a volume" in refusal(tmp_path / "models" / "tiny")
    assert f"{tmp_path}/models is empty: is a volume mounted there, and the model in it?" in refusal(
        tmp_path / "models"
    )


def test_a_volume_with_other_models(model: Path) -> None:
    assert f"does not exist ({model.parent} has tiny)." in refusal(model.with_name("tinny"))


# ---- no permission -----------------------------------------------------------------------------------------------------


@pytest.fixture
def volume() -> Iterator[Path]:
    """A model whose folders anybody may enter, which those of pytest are not."""
    with tempfile.TemporaryDirectory(prefix="armature-models-") as folder:
        Path(folder).chmod(0o755)
        model = write_checkpoint(Path(folder) / "models" / "tiny")
        for file in model.iterdir():
            file.chmod(0o644)
        yield model
        model.parent.chmod(0o700)
        model.chmod(0o700)


@contextmanager
def nobody() -> Iterator[None]:
    """Root may read everything, so for a moment it is somebody else."""
    was_root = os.geteuid() == 0
    if was_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if was_root:
            os.seteuid(0)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_file_that_may_not_be_read(volume: Path, name: str) -> None:
    file = volume / name
    file.chmod(0o000)
    with nobody():
        user, said = os.geteuid(), refusal(volume)
    owner = f"{file} belongs to user {file.stat().st_uid} and group {file.stat().st_gid} and has mode 0000"
    assert f"{file} cannot be read by user {user}: {owner}." in said


@pytest.mark.parametrize(("closes", "others"), [("models", 0), ("models", 4), ("tiny", 0), ("tiny", 1), ("tiny", 4)])
def test_a_folder_that_may_not_be_read(volume: Path, closes: str, others: int) -> None:
    """One that may be entered and not listed may hold what is read by name, but nobody knows which weights there are."""
    closed = volume if closes == "tiny" else volume.parent
    closed.chmod(others * 0o111)
    with nobody():
        said = refusal(volume)
    assert (
        f"{closed} belongs to user {closed.stat().st_uid} and group {closed.stat().st_gid} and has mode 0{others * 111:03}."
        in said
    )


def test_a_volume_out_of_order(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(file: Path) -> None:
        raise OSError(116, "Stale file handle", str(file))

    monkeypatch.setattr("app.weights.files.open_regular", fail)
    assert f"{model}/tokenizer_config.json cannot be read: Stale file handle. Is its volume in order?" in refusal(model)


# ---- half copied -------------------------------------------------------------------------------------------------------


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-10])


def link(file: Path) -> None:
    file.unlink()
    file.symlink_to("../../blobs/4665")


def under_way(file: Path) -> None:
    file.rename(file.with_name(file.name + ".incomplete"))


def point(file: Path) -> None:
    file.write_text(POINTER)


HALVES: dict[str, tuple[str, Callable[[Path], None], str]] = {
    "config cut": ("config.json", cut, "is not JSON: "),
    "index cut": (INDEX, cut, "is not JSON: "),
    "shard cut": (SHARD, cut, f"{SHARD} has been cut short: it has "),
    "shard missing": (SHARD, lambda file: file.unlink(), f"lacks 1 of 3 shards: {SHARD}. Copy or download them too."),
    "shard under way": (SHARD, under_way, f"{SHARD}.incomplete there: a copy is running or was interrupted."),
    "config under way": ("config.json", under_way, "config.json.incomplete there: a copy is running"),
    "tokenizer under way": ("tokenizer.json", under_way, "tokenizer.json.incomplete there: a copy is running"),
    "shard a pointer": (
        SHARD,
        point,
        f"{SHARD} is a Git LFS pointer, not the file itself: fetch the file with git lfs pull.",
    ),
    "config a pointer": ("config.json", point, "config.json is a Git LFS pointer"),
    "tokenizer a pointer": ("tokenizer.json", point, "tokenizer.json is a Git LFS pointer"),
    "shard a link": (SHARD, link, f"lacks 1 of 3 shards: {SHARD}"),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_copy_that_is_not_whole(tmp_path: Path, name: str) -> None:
    file, damage, sentence = HALVES[name]
    model = write_checkpoint(tmp_path / "tiny", shards=3)
    damage(model / file)
    assert sentence in refusal(model)


def test_what_a_copy_left_beside_a_whole_model_is_no_matter(model: Path) -> None:
    (model / "model.safetensors.part").write_bytes(b"of an earlier try")
    assert open_model(model).name == "tiny"


def test_a_copy_of_a_cache_without_what_its_links_mean(model: Path) -> None:
    link(model / "model.safetensors")
    said = refusal(model)
    assert f"{model}/model.safetensors is a link to ../../blobs/4665, which is not there. Copy files, not links" in said


def test_a_download_of_the_hub_that_was_broken_off(model: Path) -> None:
    (model / "model.safetensors").unlink()
    partial = model / ".cache" / "huggingface" / "download" / "x.incomplete"
    partial.parent.mkdir(parents=True)
    partial.touch()
    assert "no *.safetensors file. .cache/huggingface/download/x.incomplete there" in refusal(model)


@pytest.mark.parametrize(
    ("content", "sentence"), [(POINTER, "Git LFS pointer"), ("PK\3\4 cut", "Copy or download it to")]
)
def test_a_program_that_is_not_whole(tmp_path: Path, content: str, sentence: str) -> None:
    (tmp_path / "net.pt2").write_text(content)
    assert sentence in refusal(tmp_path / "net.pt2")
