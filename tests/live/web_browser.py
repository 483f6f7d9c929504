"""Chromium for the tests of the web page: what a page is opened with, what it must not do, and answers that a test writes itself."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from external_tools import node_package
from tests.live.live_server import PATIENCE, LiveServer, until

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WITHOUT_BROWSER = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
# A name that leads here and is not localhost: pages of it are not in a secure context.
INSECURE_HOST = "model.test"
# What Chromium says there of a header that only secure contexts have.
ONLY_SECURE = "The Cross-Origin-Opener-Policy header has been ignored"
Open = Callable[..., Any]

# Answers that a test feeds piece by piece: `streams` has one entry a request, with its body.
STREAMS = """
const real = window.fetch;
window.streams = [];
window.fetch = (path, options) => {
  if (!/v1\\/(chat\\/)?completions$/.test(path)) return real(path, options);
  let controller;
  const content = new ReadableStream({ start(given) { controller = given; } });
  options.signal.addEventListener("abort", () => controller.error(new DOMException("", "AbortError")));
  const send = (line) => controller.enqueue(new TextEncoder().encode(`data: ${line}\\n\\n`));
  const choose = (delta, finish_reason) => send(JSON.stringify({ choices: [{ index: 0, delta, finish_reason }] }));
  window.streams.push({
    body: JSON.parse(options.body),
    say: (content) => choose({ content }, null),
    finish: (reason) => (choose({}, reason), send("[DONE]"), controller.close()),
    send,
    close: () => controller.close(),
    lose: () => controller.error(new TypeError("network error")),
  });
  return Promise.resolve(new Response(content, { headers: { "content-type": "text/event-stream" } }));
};
"""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; the test is skipped where playwright is not installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make venv` does it")
    with playwright.sync_playwright() as driver:
        flags = ["--no-sandbox", f"--host-resolver-rules=MAP {INSECURE_HOST} 127.0.0.1"]
        launched = driver.chromium.launch(executable_path=BROWSER, args=flags)
        yield launched
        launched.close()


class Visits:
    """Opens pages of servers, and collects what they may not do: errors, warnings, requests to other hosts."""

    def __init__(self, browser: Any) -> None:
        self.told: list[str] = []
        self._browser = browser
        self._contexts: list[Any] = []

    def __call__(self, server: LiveServer, part: str = "", host: str = "127.0.0.1", **options: Any) -> Any:
        """Open a page in a profile of its own. `host`: the server's name in the address; `script` runs before the page's."""
        url = server.url.replace("127.0.0.1", host)
        script = options.pop("script", None)
        context = self._browser.new_context(**options)
        self._contexts.append(context)
        if script:
            context.add_init_script(script)
        return self.open_tab(context, f"{url}/#{part}", url)

    def open_tab(self, context: Any, address: str, origin: str) -> Any:
        """Open an address in a profile that is open already."""
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("pageerror", lambda error: self.told.append(f"error: {error}"))
        page.on("console", self._hear)
        page.on("request", lambda sent: None if sent.url.startswith((origin, "blob:")) else self.told.append(sent.url))
        page.goto(address)
        return page

    def _hear(self, line: Any) -> None:
        if line.type in ("error", "warning") and not line.text.startswith(ONLY_SECURE):
            self.told.append(line.text)

    def close(self) -> None:
        for context in self._contexts:
            context.close()


def wait(page: Any, condition: Callable[[], bool]) -> None:
    """Wait for what the browser's events change; they are delivered only while playwright is called."""

    def is_met() -> bool:
        page.wait_for_timeout(10)
        return condition()

    until(is_met)


def send(page: Any, text: str) -> None:
    page.locator(".message").fill(text)
    page.locator(".message").press("Enter")


def wait_for_answers(page: Any, number: int = 1) -> None:
    page.locator(".stats:not(:empty)").nth(number - 1).wait_for()


def feed(page: Any, call: str, number: int = -1) -> None:
    """Call a function of the newest stream, or of one by its number."""
    page.wait_for_function(f"streams.at({number})")
    page.evaluate(f"streams.at({number}).{call}")


def answer_with(page: Any, *deltas: dict[str, Any], finish: str = "stop") -> list[dict[str, Any]]:
    """Let every request for an answer get these events, and return the list of the requests' bodies."""
    chunks = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    events = "".join(f"data: {json.dumps(each)}\n\n" for each in (*chunks, {"choices": [], "usage": usage}))
    bodies: list[dict[str, Any]] = []

    def fulfil(route: Any) -> None:
        bodies.append(route.request.post_data_json)
        route.fulfill(content_type="text/event-stream", body=f"{events}data: [DONE]\n\n")

    page.route("**/v1/chat/completions", fulfil)
    return bodies


def findings(page: Any) -> list[str]:
    """What axe finds, in sentences."""
    page.evaluate((node_package("axe-core") / "axe.min.js").read_text())
    found = page.evaluate("axe.run(document, {resultTypes: ['violations']})")["violations"]
    return [f"{each['id']}: {each['help']} {[node['target'] for node in each['nodes']][:3]}" for each in found]
