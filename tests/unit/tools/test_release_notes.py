"""Notes of a release, and tags that are not a release."""

from __future__ import annotations

import pytest

from tools.release_notes import main, notes

CHANGELOG = """# Changelog

## [Unreleased]

- not yet

## [0.2.0] - 2027-01-31

### Fixed

- this

## [0.1.0] - 2026-11-22

## [0.0.9]

- no day

[0.2.0]: https://forge.example/compare
"""


def test_the_section_of_the_tag_and_nothing_else() -> None:
    assert notes("v0.2.0", "0.2.0", CHANGELOG) == "### Fixed\n\n- this"


def test_links_at_the_end_are_no_notes() -> None:
    text = "## [1.0.0] - 2028-02-29\n\n- all\n\n[1.0.0]: https://forge.example/compare\n"
    assert notes("v1.0.0", "1.0.0", text) == "- all"


@pytest.mark.parametrize(
    ("tag", "version", "said"),
    [
        ("v0.2.1", "0.2.0", "should be v0.2.0"),
        ("0.2.0", "0.2.0", "should be v0.2.0"),
        ("v0.3.0", "0.3.0", "no line"),
        ("v0.0.9", "0.0.9", "no line"),
        ("v0.1.0", "0.1.0", "the section of 0.1.0 in CHANGELOG.md is empty"),
    ],
)
def test_what_is_no_release_is_said(tag: str, version: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        notes(tag, version, CHANGELOG)


def test_a_wrong_tag_is_an_exit_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["v0.0.0"]) == 1
    assert "the tag should be v" in capsys.readouterr().err
    assert main([]) == 2
