"""`make real-formats`: the wanted files of a package are written at once, or none."""

from __future__ import annotations

import io
import sys
import tarfile
from pathlib import Path

import pytest

from tools import real_formats
from tools.real_formats import write_files

FILES = {
    "p-1/models/templates/one.jinja": b"{{ messages }}",
    "p-1/models/templates/note.txt": b"no",
    "p-1/one.jinja": b"no",
}


def archive(folder: Path, files: dict[str, bytes]) -> Path:
    path = folder / "package.tar.gz"
    with tarfile.open(path, "w:gz") as written:
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            written.addfile(entry, io.BytesIO(content))
        link = tarfile.TarInfo("p-1/models/templates/link.jinja")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        written.addfile(link)
    return path


def test_only_wanted_files_are_written(tmp_path: Path) -> None:
    write_files(archive(tmp_path, FILES), tmp_path / "found", real_formats._is_template)
    assert {path.name: path.read_bytes() for path in (tmp_path / "found").iterdir()} == {"one.jinja": b"{{ messages }}"}


def test_an_archive_without_them_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the files"):
        write_files(archive(tmp_path, FILES), tmp_path / "found", real_formats._is_tokenizer)
    assert not (tmp_path / "found").exists()


def test_a_package_that_cannot_be_had_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = [sys.executable, "-c", "raise SystemExit(3)"]
    assert real_formats._get("some-package", tmp_path / "found", command, real_formats._is_template) == 1
    assert "cannot get some-package" in capsys.readouterr().err
    assert not (tmp_path / "found").exists()
