"""The report in a real browser without a network: all is drawn, nothing is fetched or runs over, in light and dark, wide and narrow."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest

from armature_bench.compare.result import write_result
from armature_bench.console import BenchOutcome, Figure
from armature_bench.report.load_page import write_load_page
from armature_bench.report.report import make_report
from armature_bench.report.tables import ReportOrigin
from external_tools import node_package
from synthetic_results import GRAVITON, XEON, made_decoder, made_info

Image = pytest.importorskip("PIL.Image", reason="the plots need the extra `bench`")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.full, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]

# What a reader's browser made of the page, told in its title; the page itself runs no script, so the copy that is looked at may.
PROBE = """
<script>
addEventListener("load", () => {
  const box = (element) => element.getBoundingClientRect();
  const drawn = [...document.querySelectorAll(".drawing svg")].map((svg) => [box(svg).width, box(svg).height]);
  const small = [...document.querySelectorAll("svg text")].filter((text) => box(text).height < 8).length;
  const style = getComputedStyle(document.body);
  const line = getComputedStyle(document.querySelector("svg path[style*='--series-0']"));
  const names = performance.getEntriesByType("resource").map((entry) => entry.name);
  document.body.replaceChildren(JSON.stringify({
    drawn, small, names, paper: style.backgroundColor, ink: style.color, line: line.stroke, over: over,
  }));
});
const over = document.documentElement.scrollWidth - document.documentElement.clientWidth;
</script>
"""


@dataclass(frozen=True, slots=True)
class Seen:
    """Sizes in CSS pixels; `over`: how far the page is wider than its window; `names`: what was fetched beside it."""

    drawn: list[list[float]]
    small: int
    names: list[str]
    paper: str
    ink: str
    line: str
    over: float


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two results of machines that do not exist, one with doubts."""
    folder = tmp_path_factory.mktemp("browser")
    results = [
        made_decoder(samples=40, doubts=["Others took up to 12% of all cores."]),
        made_decoder(GRAVITON, samples=40),
    ]
    paths = [folder / f"{result.name}.json" for result in results]
    for result, path in zip(results, paths, strict=True):
        write_result(result, path)
    make_report(paths, folder / "report", False, ReportOrigin("0.1.0", made_info(XEON, "int4", "decoder")["facts"]))
    return folder / "report" / "report.html"


def browse(page: Path, *flags: str) -> str:
    assert BROWSER is not None, "skipped without one"
    profile = page.parent / "profile"
    always = (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--no-first-run",
        f"--user-data-dir={profile}",
    )
    nowhere = "--host-resolver-rules=MAP * ~NOTFOUND"
    found = subprocess.run(
        [BROWSER, *always, nowhere, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    return found.stdout


def look(page: Path, *flags: str) -> Seen:
    text = re.sub(r"<meta http-equiv[^>]+>", "", page.read_text(encoding="utf-8"))
    probed = page.with_name("probed.html")
    probed.write_text(text.replace("</body>", PROBE + "</body>"), encoding="utf-8")
    found = re.search(r"<body>(\{.*\})</body>", browse(probed, "--dump-dom", *flags), re.DOTALL)
    assert found, "the page's script told what it saw"
    return Seen(**json.loads(found[1]))


def test_it_is_drawn_whole_and_fetches_nothing(page: Path) -> None:
    seen = look(page, "--window-size=1200,900")
    assert len(seen.drawn) == 4
    assert all(width > 900 and height > 300 for width, height in seen.drawn)
    assert (seen.over, seen.small, seen.names) == (0, 0, [])
    assert (seen.paper, seen.ink, seen.line) == ("rgb(255, 255, 255)", "rgb(27, 31, 36)", "rgb(0, 114, 178)")


def test_it_is_dark_where_the_reader_has_it_dark_and_fits_a_telephone(page: Path) -> None:
    seen = look(page, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert (seen.paper, seen.ink, seen.line) == ("rgb(20, 23, 27)", "rgb(232, 235, 238)", "rgb(91, 180, 240)")
    assert seen.over == 0
    assert all(width >= 600 for width, _ in seen.drawn)  # these scroll by themselves: their words stay legible


@pytest.fixture
def load_page(tmp_path: Path) -> Path:
    """The page of a bench of one server, interrupted, so that it has a caveat."""
    requests = [
        {"intended": n / 9, "first_token": 0.01 + n / 1e3, "last_token": 0.2 + n / 1e3, "tokens": 8, "pieces": 8}
        for n in range(90)
    ]
    runs = [{"level": f"×{clients}", "server": "ours", "requests": requests[:: 9 - clients]} for clients in (1, 8)]
    figures = (Figure("×1 TTFT", 20.0, "ms", p99=99.0, parts={"p90": 90.0}),)
    outcome = BenchOutcome("http", "a model", figures, {"runs": runs}, complete=False, notes=("A note.",))
    write_load_page(outcome, tmp_path / "load.html", "0.1.0")
    return tmp_path / "load.html"


def test_the_page_of_a_load_is_drawn_too(load_page: Path) -> None:
    seen = look(load_page, "--window-size=1200,900")
    assert len(seen.drawn) == 6
    assert all(width > 900 and height > 300 for width, height in seen.drawn)
    assert (seen.over, seen.small, seen.names) == (0, 0, [])
    assert seen.line == "rgb(0, 114, 178)"
    dark = look(load_page, "--window-size=500,900", "--blink-settings=preferredColorScheme=0")
    assert (dark.paper, dark.line, dark.over) == ("rgb(20, 23, 27)", "rgb(91, 180, 240)", 0)


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", ["page", "load_page"])
def test_the_pages_are_accessible(name: str, scheme: Literal["light", "dark"], request: pytest.FixtureRequest) -> None:
    program = (node_package("axe-core") / "axe.min.js").read_text(encoding="utf-8")
    playwright = pytest.importorskip("playwright.sync_api")
    path: Path = request.getfixturevalue(name)
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        page = browser.new_context(color_scheme=scheme, bypass_csp=True).new_page()  # the page itself runs no script
        page.goto(path.as_uri())
        page.evaluate(program)
        found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
        browser.close()
    assert [each["help"] for each in found] == []


def test_it_can_be_looked_at_and_printed(page: Path) -> None:
    picture, print_ = page.with_name("page.png"), page.with_name("page.pdf")
    browse(page, "--window-size=1200,2400", f"--screenshot={picture}")
    colours = {colour for _, colour in Image.open(picture).convert("RGB").getcolors(2**24)}
    assert {(0, 114, 178), (194, 84, 0), (255, 246, 224)} <= colours  # both results' lines, and the banner of doubts
    browse(page, f"--print-to-pdf={print_}", "--no-pdf-header-footer")
    assert print_.read_bytes().startswith(b"%PDF") and print_.stat().st_size > 50_000
