"""Pack files: complete or absent, equal bit for bit, and damaged or foreign ones are rejected."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from app.weights.cache_file import PARTIAL, FileUnusable
from app.weights.packs import ALIGNMENT, PackReader, open_pack, write_pack

KEY = {"checkpoint": "a", "recipe": "b"}
BLOBS = {
    "large": torch.randint(0, 256, (5 * 2**20 + 3,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)),
    "floats": torch.arange(7.0),
    "none": torch.empty(0, dtype=torch.uint8),
}


def write(file: Path) -> Path:
    write_pack(file, KEY, BLOBS, lambda done, total: None)
    return file


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write(tmp_path / "packs" / "one.pack")


@pytest.mark.parametrize("how", [PackReader.read, lambda pack, name: pack.mapping()(name)], ids=["read", "mapped"])
def test_blobs_come_back_as_they_went(file: Path, how: Callable[[PackReader, str], torch.Tensor]) -> None:
    pack = open_pack(file, KEY)
    blobs = {name: how(pack, name) for name in pack.blobs}
    pack.close()
    assert list(blobs) == list(BLOBS)
    for name, blob in blobs.items():
        assert torch.equal(blob, BLOBS[name].view(torch.uint8))
        assert blob.data_ptr() % ALIGNMENT == 0 or not len(blob)
    assert pack.size == file.stat().st_size


def test_progress_rises_to_the_whole(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    write_pack(tmp_path / "one.pack", KEY, BLOBS, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard) and heard[-1] == (sum(blob.nbytes for blob in BLOBS.values()),) * 2


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def damage_a_blob(file: Path) -> None:
    pack = open_pack(file, KEY)
    pack.close()
    flip(file, pack.blobs["large"].start + 2**22)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-ALIGNMENT])


def cut_in_the_header(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:50])


def link(file: Path) -> None:
    file.rename(file.with_suffix(".other"))
    file.symlink_to(file.with_suffix(".other"))


def pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a blob's byte": (damage_a_blob, "the bytes of large are damaged"),
    "the header": (lambda file: flip(file, 60), "its header is damaged"),
    "its length": (lambda file: flip(file, 22), "not a whole pack"),
    "the first byte": (lambda file: flip(file, 0), "not a whole pack"),
    "cut short": (cut, "cut short"),
    "cut in the header": (cut_in_the_header, "not a whole pack"),
    "empty": (lambda file: file.write_bytes(b""), "not a whole pack"),
    "others may write": (lambda file: file.chmod(0o664), "others may write"),
    "all may write": (lambda file: file.chmod(0o646), "others may write"),
    "a link": (link, "cannot be opened"),
    "a folder": (lambda file: (file.unlink(), file.mkdir()), "not a regular file"),
    "a pipe": (pipe, "not a regular file"),
}


@pytest.mark.parametrize("how", [PackReader.read, lambda pack, name: pack.mapping()(name)], ids=["read", "mapped"])
@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_not_sound_is_refused(file: Path, name: str, how: Callable[[PackReader, str], torch.Tensor]) -> None:
    damage, sentence = DAMAGES[name]
    damage(file)
    with pytest.raises(FileUnusable, match=sentence):
        how(open_pack(file, KEY), "large")


def test_what_was_made_for_something_else_is_refused(file: Path) -> None:
    with pytest.raises(FileUnusable, match="made for another checkpoint, recipe or version"):
        open_pack(file, {**KEY, "recipe": "c"})


def test_another_users_file_is_refused(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fstat(os.open(file, os.O_RDONLY))
    monkeypatch.setattr(os, "fstat", lambda descriptor: os.stat_result([*real[:4], os.getuid() + 1, *real[5:]]))
    with pytest.raises(FileUnusable, match="belongs to user"):
        open_pack(file, KEY)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        open_pack(tmp_path / "none.pack", KEY)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()], ids=["full", "Ctrl-C"])
def test_what_ends_a_writing_leaves_what_was_there(
    file: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    before = file.read_bytes()
    calls = []

    def fails(descriptor: int, some: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) == 2:
            raise error
        return len(some)

    monkeypatch.setattr(os, "pwrite", fails)
    with pytest.raises(type(error)):
        write(file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]


def test_a_disk_without_room_is_not_filled_first(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, room = file.read_bytes(), sum(blob.nbytes for blob in BLOBS.values())
    system = SimpleNamespace(f_blocks=1000, f_bavail=room - 1, f_frsize=1)
    monkeypatch.setattr(os, "fstatvfs", lambda descriptor: system)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", lambda *given: pytest.fail("something was written"))
        with pytest.raises(OSError, match="No space left on device"):
            write(file)
    assert file.read_bytes() == before and list(file.parent.iterdir()) == [file]
    for system.f_blocks, system.f_bavail in ((1000, room), (0, 0)):  # just enough, and a file system that tells nothing
        write(file)


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda descriptor, some, at: real(descriptor, some[: max(1, len(some) // 2)], at))
    pack = open_pack(write(tmp_path / "one.pack"), KEY)
    assert torch.equal(pack.read("large"), BLOBS["large"])


def test_what_a_killed_process_left_is_swept(file: Path) -> None:
    old, young = (file.parent / f"{PARTIAL}{name}" for name in ("old", "young"))
    for left in (old, young):
        left.write_bytes(b"x")
    os.utime(old, (0, 0))
    write(file)
    assert not old.exists() and young.exists()
