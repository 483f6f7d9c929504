"""The page needs nothing beside it, says what the tables say, lets no result file write markup, and can be read in light and dark."""

from __future__ import annotations

import importlib.util
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from armature_bench.compare.result import CompareResult, write_result
from armature_bench.console import MeasurementFailed
from armature_bench.report.report import make_report
from armature_bench.report.tables import ReportOrigin
from synthetic_results import GRAVITON, XEON, made_decoder, made_encoder, made_info

pytest.importorskip("matplotlib", reason="the plots need the extra `bench`")

EVIL = '<script>alert(1)</script> $x^{2$ _"quoted"'
HERE = ReportOrigin("0.2.0", made_info(XEON, "int4", "decoder")["facts"])
DOUBTS = ["Others took up to 12% of all cores, in 3 of 12 loads.", f"A doubt of {EVIL}"]


def reported(folder: Path, *results: CompareResult, force: bool = False) -> str:
    paths = [folder / f"{index}.json" for index in range(len(results))]
    for result, path in zip(results, paths, strict=True):
        write_result(result, path)
    assert make_report(paths, folder / "report", force, HERE) == 0
    return (folder / "report" / "report.html").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("report")


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    first = made_decoder(samples=30, hourly_price=1.4, doubts=DOUBTS, name=f"_a {EVIL}")
    return reported(folder, first, made_decoder(GRAVITON, samples=30, hourly_price=1.1))


class Page(HTMLParser):
    """What a browser would do with it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text: str) -> None:
        self.words += text

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def test_it_stands_alone_and_is_small(page: str, folder: Path) -> None:
    parsed = Page(page)
    assert len(page.encode()) < 2_000_000
    assert not {tag for tag, _ in parsed.tags} & {"script", "link", "img", "iframe", "object", "image"}
    links = [
        value
        for _, attributes in parsed.tags
        for name, value in attributes.items()
        if name in ("href", "src", "xlink:href")
    ]
    assert links and all(link and link.startswith("#") for link in links)
    assert len(parsed.all("style")) == 1  # a drawing's own would hold for the whole page
    assert "url(http" not in page and "@import" not in page
    assert (folder / "report" / "latency.png").read_bytes().startswith(b"\x89PNG")


def test_every_name_stands_for_one_thing(page: str) -> None:
    parsed = Page(page)
    ids = [attributes["id"] for _, attributes in parsed.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    wanted = {
        str(link)[1:]
        for tag in ("a", "use")
        for attributes in parsed.all(tag)
        for link in attributes.values()
        if str(link)[:1] == "#"
    }
    wanted |= set(re.findall(r"url\(#([^)]+)\)", page))
    assert wanted <= set(ids)


def test_what_a_file_says_is_never_markup(page: str) -> None:
    assert "<script" not in page
    assert page.count("&lt;script&gt;") > 4
    assert f"A doubt of {EVIL}" in Page(page).words


def test_doubts_and_origin_come_before_the_answer_and_that_before_all_figures(page: str) -> None:
    texts = (
        DOUBTS[0],
        "Measured with version 0.1.0; this report was made with 0.2.0.",
        'id="answer"',
        "<table",
        "<svg",
    )
    order = [page.index(text) for text in texts]
    assert order == sorted(order)
    assert "is the cheapest" in page


def test_tables_and_drawings_have_text_alternatives(page: str) -> None:
    parsed = Page(page)
    assert {heading["scope"] for heading in parsed.all("th")} == {"col", "row", "rowgroup"}
    drawings = parsed.all("svg")
    assert len(drawings) == 4 and all(len(str(drawing["aria-label"])) > 60 for drawing in drawings)
    assert page.count("<caption") == page.count("<table")
    assert parsed.all("html")[0]["lang"] == "en"


def variables(block: str) -> dict[str, str]:
    return dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6})", block))


def luminance(colour: str) -> float:
    """WCAG 2.2, relative luminance."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


def test_light_dark_and_printed_pages_can_be_read(page: str) -> None:
    """4.5 for words, 3 for lines and marks: WCAG 2.2, 1.4.3 and 1.4.11."""
    style = page[page.index("<style>") : page.index("</style>")]
    light, dark, printed = (
        variables(style[found.end() :].split("}")[0]) for found in re.finditer(r":root(?::root)? \{", style)
    )
    assert light.keys() == dark.keys() == printed.keys()
    used = set(re.findall(r"var\(--([\w-]+)\)", page))
    assert used <= light.keys() and len([name for name in used if name.startswith("series")]) > 1
    for colours in (light, dark, printed):
        words = [(name, "paper") for name in ("ink", "muted", "link", "better", "worse")] + [("doubt", "doubt-paper")]
        marks = [(name, "paper") for name in colours if name.startswith(("series", "cause"))]
        assert {pair: contrast(colours[pair[0]], colours[pair[1]]) >= 4.5 for pair in words} == dict.fromkeys(
            words, True
        )
        assert {pair: contrast(colours[pair[0]], colours[pair[1]]) >= 3 for pair in marks} == dict.fromkeys(marks, True)


@pytest.mark.parametrize("info", [{}, {"model": {}, "facts": None, "plan": None, "calibration": None}])
def test_a_server_that_says_little_of_itself_is_reported_all_the_same(info: dict[str, None], tmp_path: Path) -> None:
    write_result(made_encoder(samples=2, info=info), tmp_path / "one.json")
    assert make_report([tmp_path / "one.json"], None, False, HERE) == 0


@pytest.mark.full
def test_what_cannot_be_drawn_is_said_in_its_place(tmp_path: Path) -> None:
    """Two models without a load in common, on machines that were not calibrated."""
    results = [made_decoder(samples=1), made_encoder(samples=2)]
    uncalibrated = [each.model_copy(update={"info": each.info | {"calibration": None}}) for each in results]
    page = reported(tmp_path, *uncalibrated, force=True)
    assert "no load in common" in page and "no latency distribution is drawn" in page and "there is no roofline" in page
    assert "The model differs from that of the first result" in page
    pictures = {path.stem for path in (tmp_path / "report").glob("*.png")}
    assert pictures == {"throughput-clients", "throughput-batch"}


def test_different_models_and_damaged_files_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(MeasurementFailed, match="different models"):
        reported(tmp_path, made_decoder(samples=1), made_encoder(samples=2))
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(MeasurementFailed, match="damaged"):
        make_report([tmp_path / "bad.json"], tmp_path / "report", False, HERE)
    assert not (tmp_path / "report").exists()


def test_without_matplotlib_the_tables_can_be_had_and_the_page_says_how(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    write_result(made_encoder(samples=2), tmp_path / "one.json")
    with pytest.raises(MeasurementFailed, match=r"armature-serve\[bench\]"):
        make_report([tmp_path / "one.json"], tmp_path / "report", False, HERE)
    assert make_report([tmp_path / "one.json"], None, False, HERE) == 0
    assert "Throughput and request latency" in capsys.readouterr().out


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "report").write_text("a file")
    with pytest.raises(MeasurementFailed, match="cannot be written"):
        reported(tmp_path, made_encoder(samples=2))
