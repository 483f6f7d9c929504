"""Write the pictures of the web page in docs/images: `python -m tools.screenshots [NAME…]`, with Chromium and playwright.

The pictures follow the page by it. It starts the demo, prints how soon a browser without a cache paints the page, talks
to it, loads it with eight streams, and takes each picture in light and dark.
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

from tools.monitoring.demo_load import running
from tools.peers.ports import is_answered

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "images"
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
VIEWPORT = {"width": 1120, "height": 700}
THEMES = ("light", "dark")
COLOURS = 96  # of a picture: text and areas of a page need no more, and its file is a fifth of the size
STREAMS = 8
PAINTS = 9
NOW_SECONDS = 30  # the charts' lines begin when the page is opened
STORY = "Tell me a story about a fox."


@contextmanager
def serving() -> Iterator[str]:
    """Start the demo with a price and a power, and yield its address once it is ready."""
    command = [sys.executable, "-m", "app", "serve", "--port", "0", "--hourly-price", "0.1", "--watts", "40"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().removeprefix("listening on ").strip()
            while not is_answered(f"{url}/readyz"):
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()


def load(url: str) -> AbstractContextManager[None]:
    """Send eight streams again and again until the block ends."""
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 256, "ignore_eos": True}).encode()
    request = urllib.request.Request(f"{url}/generate", body, {"content-type": "application/json"})

    def stream() -> None:
        with urllib.request.urlopen(request) as response:
            response.read()

    return running([stream] * STREAMS, pause=0)


def show_talk(page: Any, url: str) -> None:
    """Show one question in two columns, the second with the probabilities of its tokens."""
    page.goto(url)
    page.get_by_role("button", name="Add a column").click()
    column = page.get_by_role("region", name="Column 2", exact=True)
    column.get_by_label("Temperature").fill("1")
    column.get_by_label("Seed").fill("3")
    column.get_by_label("Probabilities of tokens").check()
    column.locator("summary").click()
    page.locator(".message").fill(STORY)
    page.locator(".message").press("Enter")
    page.locator(".stats:not(:empty)").nth(1).wait_for()
    column.get_by_role("button", name="Tokens").click()
    column.locator(".log").evaluate("(log) => log.scrollTo(0, 0)")
    page.get_by_role("region", name="Column 1", exact=True).locator(".log").evaluate("(log) => log.scrollTo(0, 0)")
    column.locator(".token.p3, .token.p4").first.hover()


def show_machine(page: Any, url: str) -> None:
    page.goto(f"{url}/#machine")
    page.locator(".lead").wait_for()


def show_now(page: Any, url: str) -> None:
    page.goto(f"{url}/#now")
    page.locator(".card").first.wait_for()
    with load(url):
        page.wait_for_timeout(NOW_SECONDS * 1000)


def first_paint(browser: Any, url: str) -> float:
    """Return the median milliseconds from the start of navigation to the first text or image, each in a new profile."""
    found = []
    for _ in range(PAINTS):
        with browser.new_context() as profile:
            page = profile.new_page()
            page.goto(url, wait_until="load")
            wanted = "() => performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            found.append(float(page.wait_for_function(wanted).json_value()))
    return statistics.median(found)


PICTURES: dict[str, Callable[[Any, str], None]] = {"talk": show_talk, "machine": show_machine, "now": show_now}


def save(picture: bytes, path: Path) -> None:
    from PIL import Image

    reduced = Image.open(BytesIO(picture)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    reduced.save(path, optimize=True)


def main(arguments: list[str]) -> int:
    from playwright.sync_api import sync_playwright

    unknown = set(arguments) - set(PICTURES)
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if unknown or browser is None:
        print(f"There is no picture {min(unknown)}." if unknown else "There is no Chromium.", file=sys.stderr)
        return 2
    TARGET.mkdir(exist_ok=True)
    with serving() as url, sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        print(f"first paint: {first_paint(launched, url):.0f} ms")
        for name in arguments or PICTURES:
            page = launched.new_page(viewport=VIEWPORT)
            page.set_default_timeout(120_000)
            PICTURES[name](page, url)
            for theme in THEMES:
                page.emulate_media(color_scheme=theme)
                path = TARGET / f"page-{name}-{theme}.png"
                save(page.screenshot(), path)
                print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1000:.0f} kB")
            page.close()
        launched.close()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
