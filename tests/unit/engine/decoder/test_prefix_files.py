"""Files of the prompt cache: what was written is read, and nothing else ever is, whatever happened to the files."""

from __future__ import annotations

import errno
import logging
import os
import random
import struct
from io import FileIO
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.decoder import prompt_cache
from app.engine.decoder.prompt_cache import PrefixBlock, PrefixFiles, private_folder
from app.errors import SettingsInvalid

SIZE = 4  # tokens of a block
ROWS = bytes(range(96))
IDENTITY = {"checkpoint": "one"}


def files_in(folder: Path, max_bytes: int = 2**20, **identity: str) -> PrefixFiles:
    return PrefixFiles(folder, identity or IDENTITY, max_bytes)


def blocks_of(files: PrefixFiles, *token_ids: int) -> list[PrefixBlock]:
    return list(files.names(SIZE).blocks(list(token_ids), 0))


def read(files: PrefixFiles, block: PrefixBlock) -> bytes | None:
    rows = bytearray(len(ROWS))
    return bytes(rows) if files.read(block, memoryview(rows)) else None


def written(files: PrefixFiles) -> list[Path]:
    return sorted(files.folder.iterdir())


def test_what_was_written_is_read_by_another_process_too(tmp_path: Path) -> None:
    first, second = blocks_of(files_in(tmp_path), 1, 2, 3, 4, 5, 6, 7, 8, 9)
    assert files_in(tmp_path).write(first, memoryview(ROWS))
    again = files_in(tmp_path)
    assert read(again, first) == ROWS and again.contains(first)
    assert read(again, second) is None and not again.contains(second)


def test_the_names_of_later_blocks_do_not_depend_on_where_one_begins(tmp_path: Path) -> None:
    files, tokens = files_in(tmp_path), list(range(40))
    whole = [one.name for one in files.names(SIZE).blocks(tokens, 0)]
    assert [one.name for one in files.names(SIZE).blocks(tokens, 3)] == whole[3:]
    growing = files.names(SIZE)
    for end in (9, 10, 40):
        found = list(growing.blocks(tokens[:end], 0))
        assert [one.name for one in found] == whole[: end // SIZE]
        assert bytes(found[-1].token_bytes) == struct.pack(f"<{len(found) * SIZE}i", *tokens[: len(found) * SIZE])


def test_a_block_is_found_only_after_the_same_tokens_and_for_the_same_model(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    mine, other = blocks_of(files, 1, 2, 3, 4, 5, 6, 7, 8), blocks_of(files, 1, 2, 3, 9, 5, 6, 7, 8)
    files.write(mine[1], memoryview(ROWS))
    assert read(files, mine[1]) == ROWS and read(files, other[1]) is None
    foreign = files_in(tmp_path, checkpoint="another")
    assert read(foreign, blocks_of(foreign, 1, 2, 3, 4, 5, 6, 7, 8)[1]) is None


def test_a_collision_of_names_gives_nobody_the_rows_of_others(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    (mine,), (other,) = blocks_of(files, 1, 2, 3, 4), blocks_of(files, 1, 2, 3, 5)
    files.write(mine, memoryview(ROWS))
    (files.folder / mine.name).rename(files.folder / other.name)
    assert read(files, other) is None
    foreign = files_in(tmp_path, checkpoint="another")
    (same,) = blocks_of(foreign, 1, 2, 3, 5)
    (files.folder / other.name).rename(files.folder / same.name)
    assert read(foreign, same) is None


def test_only_its_user_can_read_what_is_kept(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    files.write(blocks_of(files, 1, 2, 3, 4)[0], memoryview(ROWS))
    assert files.folder.stat().st_mode & 0o777 == 0o700
    assert [file.stat().st_mode & 0o777 for file in written(files)] == [0o600]


def test_a_folder_that_others_can_enter_is_refused(tmp_path: Path) -> None:
    folder = private_folder(tmp_path / "own")
    folder.chmod(0o750)
    with pytest.raises(SettingsInvalid, match=r"other users can enter .*own \(mode 750\).*chmod 700"):
        private_folder(folder)
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsInvalid, match="cannot be used"):
        private_folder(tmp_path / "file")


def test_a_file_that_others_could_have_written_is_removed(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    (block,) = blocks_of(files, 1, 2, 3, 4)
    files.write(block, memoryview(ROWS))
    (files.folder / block.name).chmod(0o620)
    assert read(files, block) is None and not files.contains(block)


@given(st.integers(0, 400), st.integers(1, 255), st.sampled_from(["change", "cut", "grow", "empty", "swap"]))
def test_a_damaged_file_is_never_used(
    tmp_path_factory: pytest.TempPathFactory, place: int, change: int, kind: str
) -> None:
    files = files_in(tmp_path_factory.mktemp("files"))
    (block,) = blocks_of(files, 1, 2, 3, 4)
    files.write(block, memoryview(ROWS))
    file = files.folder / block.name
    content = bytearray(file.read_bytes())
    place %= len(content)
    if kind == "change":
        content[place] ^= change
    elif kind == "swap":
        content[place:] = random.Random(change).randbytes(len(content) - place)
    else:
        content = {"cut": content[:place], "grow": content + content[: place + 1], "empty": bytearray()}[kind]
    file.write_bytes(content)
    assert read(files, block) is None
    assert files.write(block, memoryview(ROWS)) and read(files, block) == ROWS


def test_a_damaged_file_is_named_once_and_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = files_in(tmp_path)
    (block,) = blocks_of(files, 1, 2, 3, 4)
    files.write(block, memoryview(ROWS))
    file = files.folder / block.name
    file.write_bytes(file.read_bytes()[:-1])
    assert [read(files, block) for _ in range(3)] == [None] * 3
    assert [record.getMessage() for record in caplog.records] == [
        f"the file {file} of the prompt cache cannot be used (it has been cut short): it is removed"
    ]


def file_bytes(tmp_path: Path) -> int:
    files = files_in(tmp_path / "measured")
    files.write(blocks_of(files, 1, 2, 3, 4)[0], memoryview(ROWS))
    return written(files)[0].stat().st_size


def test_what_was_used_least_recently_goes_first(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_bytes=3 * file_bytes(tmp_path))
    blocks = [blocks_of(files, 1, 2, 3, number)[0] for number in range(5)]
    for number, block in enumerate(blocks[:3]):
        assert files.write(block, memoryview(ROWS))
        os.utime(files.folder / block.name, (number, number))
    assert read(files, blocks[0]) == ROWS  # it is used again
    files.begin()
    assert files.write(blocks[3], memoryview(ROWS)) and files.write(blocks[4], memoryview(ROWS))
    assert [files.contains(block) for block in blocks] == [True, False, False, True, True]


def test_the_bound_holds_for_all_models_together_and_a_prefix_never_removes_itself(tmp_path: Path) -> None:
    files = files_in(tmp_path, max_bytes=4 * file_bytes(tmp_path))
    foreign = files_in(tmp_path, max_bytes=4 * file_bytes(tmp_path), checkpoint="another")
    for block in blocks_of(foreign, *range(3 * SIZE)):
        assert foreign.write(block, memoryview(ROWS))
    files.begin()
    blocks = blocks_of(files, *range(9 * SIZE))
    kept = [files.write(block, memoryview(ROWS)) for block in blocks]
    assert kept == [True] * kept.index(False) + [False] * (9 - kept.index(False)) and kept.index(False) >= 3
    assert sum(file.stat().st_size for file in written(files)) <= 4 * file_bytes(tmp_path)
    assert [read(files, block) is not None for block in blocks] == kept


def test_of_one_prefix_the_last_blocks_go_first(tmp_path: Path) -> None:
    files = files_in(tmp_path)
    blocks = blocks_of(files, *range(5 * SIZE))
    for block in blocks:
        files.write(block, memoryview(ROWS))
    small = files_in(tmp_path, max_bytes=sum(file.stat().st_size for file in written(files)))
    small.begin()
    small.write(blocks_of(small, 9, 9, 9, 9)[0], memoryview(ROWS))
    left = [small.contains(block) for block in blocks]
    assert left == sorted(left, reverse=True) and left[0] and not left[-1]


def test_a_full_disk_ends_writing_with_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    files = files_in(tmp_path)
    first, second = blocks_of(files, *range(2 * SIZE))
    files.write(first, memoryview(ROWS))

    class Full(FileIO):
        def write(self, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("app.weights.cache_file.FileIO", Full)
        assert not files.write(second, memoryview(ROWS))
    assert not files.write(second, memoryview(ROWS)), "it is not tried again"
    assert read(files, first) == ROWS, "what is there is still read"
    assert len(written(files)) == 1
    (warning,) = caplog.records
    assert warning.levelno == logging.WARNING and "(No space left on device): serving goes on" in warning.getMessage()


def test_a_server_that_finds_its_files_removed_by_another_one_goes_on(tmp_path: Path) -> None:
    mine, theirs = files_in(tmp_path), files_in(tmp_path)
    (block,) = blocks_of(mine, 1, 2, 3, 4)
    mine.write(block, memoryview(ROWS))
    assert theirs.write(block, memoryview(ROWS)) and read(mine, block) == ROWS
    (theirs.folder / block.name).unlink()
    assert read(mine, block) is None
    mine.touch(block)
    assert mine.write(block, memoryview(ROWS)) and read(theirs, block) == ROWS


def test_a_file_that_shrinks_while_it_is_read_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = files_in(tmp_path)
    (block,) = blocks_of(files, 1, 2, 3, 4)
    files.write(block, memoryview(ROWS))
    real = os.preadv

    def shrinking(descriptor: int, buffers: Any, offset: int) -> int:
        os.truncate(files.folder / block.name, offset)
        return real(descriptor, buffers, offset)

    monkeypatch.setattr(prompt_cache.os, "preadv", shrinking)
    assert read(files, block) is None
