"""The web page in a real browser, with one server of each kind of model: what its users do, and that it asks no one else."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.settings import DEMO_DIRECTORY
from external_tools import node_package
from tests.attack.kinds import write_model
from tests.live.live_server import PATIENCE, LiveServer, live, until
from tiny_encoders import write_encoder

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: `make venv` does it")

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.full, pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")]

KEY = "one-secret"
PHONE = {"width": 360, "height": 740}
CHOICES = {"name": {"enum": ["Ivy", "Felix"]}, "age": {"enum": [3, 4]}}
STORY = "Tell me a story about a fox."
# What a model may write to attack the page that shows it.
HOSTILE = """# Title <img src=x onerror=alert(1)>
<script>alert(2)</script> **bold** [bad](javascript:alert(3)) ![pixel](https://evil.example/p.png)
[good](https://example.com/a) `code <b>` https://example.com/b.

- one
- two

| a | b |
|---|---|
| 1 | <iframe src="https://evil.example"></iframe> |

```html
<script>alert(4)</script>
```
"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=BROWSER, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture(scope="module")
def decoder() -> Iterator[LiveServer]:
    with live(DEMO_DIRECTORY, calibrate="off") as server:
        yield server


Open = Callable[..., Any]


def wait(page: Any, condition: Callable[[], bool]) -> None:
    """Wait for what the browser's events change; they are delivered only while playwright is called."""

    def is_met() -> bool:
        page.wait_for_timeout(10)
        return condition()

    until(is_met)


@pytest.fixture
def visit(browser: Any) -> Iterator[Open]:
    """Open the page of a server. Afterwards: no error of the console, and no request to another origin."""
    contexts: list[Any] = []
    told: list[str] = []

    def open_page(server: LiveServer, part: str = "", **options: Any) -> Any:
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(PATIENCE * 1000)
        page.on("pageerror", lambda error: told.append(f"error: {error}"))
        page.on("console", lambda line: told.append(line.text) if line.type in ("error", "warning") else None)
        page.on("request", lambda sent: None if sent.url.startswith(server.url) else told.append(sent.url))
        page.goto(f"{server.url}/#{part}")
        return page

    open_page.told = told  # type: ignore[attr-defined]
    yield open_page
    for context in contexts:
        context.close()
    assert told == []


def send(page: Any, text: str) -> None:
    page.locator(".message").fill(text)
    page.locator(".message").press("Enter")


def wait_for_answers(page: Any, number: int = 1) -> None:
    page.locator(".stats:not(:empty)").nth(number - 1).wait_for()


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


# ---- Talk ------------------------------------------------------------------------------------------------------------


def test_a_story_is_streamed_with_its_figures(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    send(page, STORY)
    wait_for_answers(page)
    assert len(page.locator(".assistant .prose").inner_text()) > 50
    figures = page.locator(".stats").inner_text()
    assert re.search(r"\d+ tokens · [\d,.]+ tokens/s · first token .*queue .*prefill", figures), figures
    assert page.title() == "llama – Armature"


def test_stop_ends_the_request_in_the_server(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    aborted = decoder.metric("armature_requests_total", api="chat", outcome="aborted")
    decoder.reins.hold()
    for stop in (lambda: page.get_by_role("button", name="Stop").click(), lambda: page.keyboard.press("Escape")):
        send(page, STORY)
        page.get_by_role("button", name="Stop").wait_for()
        assert decoder.reins.reached.wait(PATIENCE)
        stop()
        page.get_by_role("button", name="Send", exact=True).wait_for()
        decoder.reins.release()
        until(lambda: decoder.idle)
        decoder.reins.hold()
    decoder.reins.release()
    assert decoder.metric("armature_requests_total", api="chat", outcome="aborted") == aborted + 2
    assert page.locator(".stats").all_inner_texts() == ["stopped by you"] * 2


def test_an_answer_follows_a_schema(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".settings summary").click()
    page.get_by_role("button", name="Insert an example").first.click()
    example = json.loads(page.get_by_label("JSON schema").input_value())
    assert example["required"] == ["name", "age"]
    page.get_by_label("JSON schema").fill(json.dumps({**example, "properties": CHOICES}))
    page.locator(".settings summary").click()
    send(page, "Who is the fox?")
    wait_for_answers(page)
    answer = json.loads(page.locator(".assistant pre").inner_text())
    assert answer["name"] in CHOICES["name"]["enum"] and answer["age"] in CHOICES["age"]["enum"]
    page.locator(".settings summary").click()
    page.get_by_label("JSON schema").fill("{")
    send(page, "And now?")
    page.locator(".assistant .error").wait_for()
    assert "JSON schema is not valid JSON" in page.locator(".assistant .error").inner_text()


def test_an_error_is_shown_in_the_servers_words_and_retried(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".settings summary").click()
    page.get_by_label("Top p").fill("7")
    send(page, STORY)
    error = page.locator(".assistant .error")
    error.wait_for()
    assert "top_p" in error.inner_text()
    page.get_by_label("Top p").fill("")
    page.get_by_role("button", name="Retry").click()
    wait_for_answers(page)
    assert error.count() == 0
    visit.told[:] = [text for text in visit.told if "400" not in text]  # type: ignore[attr-defined]


def test_a_message_is_edited_and_columns_have_their_own_settings(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder, viewport={"width": 1200, "height": 800})
    bodies = answer_with(page, {"content": "Yes."})
    send(page, "First?")
    wait_for_answers(page)
    page.get_by_role("button", name="Edit").click()
    box = page.get_by_label("Edit the message")
    box.fill("Second?")
    box.press("Enter")
    wait(page, lambda: len(bodies) == 2)
    wait_for_answers(page)
    assert [message["content"] for message in bodies[1]["messages"]] == ["Second?"]
    page.get_by_role("button", name="Add a column").click()
    column = page.get_by_role("region", name="Column 2", exact=True)
    column.get_by_label("System prompt").fill("Be brief.")
    column.get_by_label("Temperature").fill("0")
    send(page, "Third?")
    wait(page, lambda: len(bodies) == 4)
    one, two = sorted(bodies[2:], key=lambda body: len(body["messages"]))
    assert (one["messages"][0]["role"], two["messages"][0]["content"]) == ("user", "Be brief.")
    assert ("temperature" in one, two["temperature"]) == (False, 0)
    assert len(one["messages"]) == 3


def test_probabilities_are_shown_for_the_token_under_the_pointer(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    for mode in ("Chat", "Completion"):
        page.get_by_role("button", name=mode, exact=True).click()
        page.locator(".settings summary").click()
        page.get_by_label("Probabilities of tokens").check()
        page.get_by_label("Max tokens").fill("12")
        page.locator(".settings summary").click()
        send(page, "Once upon")
        wait_for_answers(page)
        page.get_by_role("button", name="Tokens").click()
        page.locator(".token").nth(2).hover()
        assert re.search(r"had a probability of [\d.]+%", page.locator(".token-card").inner_text())
        before = page.locator(".token.chosen").inner_text()
        page.locator(".tokens").focus()
        page.keyboard.press("ArrowRight")
        assert page.locator(".token-card li").count() >= 5
        assert page.locator(".token").nth(3).get_attribute("class").endswith("chosen"), before


def test_calls_of_tools_are_shown_and_answered(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Bern"}'}}
    bodies = answer_with(page, {"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls")
    page.locator(".settings summary").click()
    page.get_by_role("button", name="Insert an example").nth(1).click()
    send(page, "How is the weather in Bern?")
    page.get_by_label("Result of get_weather").fill("Rain.")
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    assert '"city": "Bern"' in page.locator(".call pre").inner_text()
    page.get_by_role("button", name="Send result").click()
    wait(page, lambda: len(bodies) == 2)
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}


def test_markup_in_an_answer_is_text(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    answer_with(page, *({"content": part} for part in HOSTILE.splitlines(keepends=True)))
    send(page, "Attack!")
    wait_for_answers(page)
    answer = page.locator(".assistant .prose")
    assert answer.locator("script, img, iframe").count() == 0
    assert [link.get_attribute("href") for link in answer.locator("a").all()] == [
        "https://evil.example/p.png",
        "https://example.com/a",
        "https://example.com/b",
        "https://evil.example/",
    ]
    assert all("noopener" in link.get_attribute("rel") for link in answer.locator("a").all())
    assert answer.locator("li").all_inner_texts() == ["one", "two"]
    assert answer.locator("td").all_inner_texts() == ["1", '<iframe src="https://evil.example"></iframe>']
    assert answer.locator("pre").inner_text() == "<script>alert(4)</script>"
    assert answer.locator("strong").inner_text() == "bold"
    assert "[bad](javascript:alert(3))" in answer.inner_text()
    assert dialogs == []


def test_history_is_in_the_browser_alone(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    answer_with(page, {"content": "An **old** answer."})
    send(page, "An old question")
    wait_for_answers(page)
    page.reload()
    page.locator(".message").wait_for()
    assert page.locator(".turn").count() == 0
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="An old question", exact=True).click()
    assert page.locator(".assistant strong").inner_text() == "old"
    page.get_by_role("button", name="History").click()
    page.get_by_role("button", name="Delete An old question").click()
    page.get_by_text("There are none yet.").wait_for()
    assert page.evaluate("localStorage.getItem('armature.conversations')") == "[]"


# ---- the other parts -------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Open) -> None:
    with live(DEMO_DIRECTORY, calibrate="off", api_keys=(KEY,)) as server:
        page = visit(server)
        page.get_by_label("Key").fill("wrong")
        page.get_by_role("button", name="Use the key").click()
        page.get_by_text("send it as").wait_for()
        wait(page, lambda: any("401" in text for text in visit.told))  # type: ignore[attr-defined]
        visit.told.clear()  # type: ignore[attr-defined]
        page.get_by_label("Key").fill(KEY)
        page.get_by_role("button", name="Use the key").click()
        send(page, STORY)
        wait_for_answers(page)
        assert page.evaluate("sessionStorage.getItem('armature.key')") == KEY
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        assert findings(page) == []


def test_texts_are_compared_and_ranked(visit: Open, tmp_path: Path) -> None:
    with live(write_model("encoder", tmp_path), calibrate="off") as server:
        page = visit(server)
        page.get_by_role("button", name="Compare", exact=True).click()
        page.locator(".matrix").wait_for()
        cosines = [float(text) for text in page.locator(".matrix td").all_inner_texts() if text]
        assert len(cosines) == 16
        assert cosines[0] == cosines[5] == 1.0 and max(cosines[1:4]) < 1.0
        page.get_by_role("button", name="Rank").click()
        page.locator(".ranked li").first.wait_for()
        assert "train" in page.locator(".ranked li").first.inner_text()
        assert findings(page) == []


def test_texts_are_classified(visit: Open, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    with live(model, calibrate="off") as server:
        page = visit(server)
        page.get_by_role("button", name="Classify").click()
        page.locator(".ranked meter").first.wait_for()
        assert page.locator(".ranked > li").count() == 2
        assert page.locator(".ranked meter").count() == 6
        assert findings(page) == []


def test_a_program_gets_a_form_of_its_signature(visit: Open, tmp_path: Path) -> None:
    with live(write_model("program", tmp_path / "model"), calibrate="off") as server:
        page = visit(server)
        assert page.locator("legend").first.inner_text() == "ids – INT64"
        page.get_by_role("button", name="Infer").click()
        page.get_by_text("Values of score").wait_for()
        page.locator("select").first.select_option("given")
        page.get_by_label("Values as JSON").first.fill("[[1, 2, 3, 4")
        page.get_by_role("button", name="Infer").click()
        page.get_by_text("The values of ids are not valid JSON").wait_for()
        assert findings(page) == []


def test_the_machine_is_described_in_words(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder, "machine")
    page.locator(".lead").wait_for()
    assert re.match(
        r"llama, a decoder with 4\.2M parameters, is served on 1 of \d+ cores in fp32",
        page.locator(".lead").inner_text(),
    )
    text = page.locator(".page").inner_text()
    plan = decoder.client.get("/info").json()["plan"]
    assert plan["precision"]["reason"] in text and plan["max_model_len"]["reason"] in text
    assert "None" not in text and "undefined" not in text and "NaN" not in text


def test_now_follows_the_requests(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder, "now")
    page.clock.install()
    page.reload()
    page.get_by_text("0 running").wait_for()
    decoder.generate(max_tokens=200, ignore_eos=True)
    value = page.locator(".card", has_text="Tokens a second").locator("dd").first
    until(lambda: value.inner_text() not in ("–", "0"))
    assert "ms" in page.locator(".card", has_text="First token").inner_text()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.locator("#tab-machine").click()
    page.locator(".lead").wait_for()
    asked.clear()
    page.clock.fast_forward(30_000)
    page.locator("#theme").click()
    assert asked == [], "nothing is asked while Now is not shown"


def test_the_list_of_routes_loads_nothing(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{decoder.url}/docs")
    page.locator("summary", has_text="POST /v1/chat/completions").first.wait_for()
    assert page.evaluate("getComputedStyle(document.body).maxWidth") == "960px", "its style is let in"
    assert asked == [f"{decoder.url}/docs"]
    assert findings(page) == []


@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [{"width": 1200, "height": 800}, PHONE], ids=["wide", "phone"])
def test_axe_finds_nothing_and_nothing_runs_over(
    visit: Open, decoder: LiveServer, viewport: dict[str, int], theme: str
) -> None:
    page = visit(decoder, viewport=viewport, color_scheme=theme)
    answer_with(page, {"content": HOSTILE})
    send(page, "Show everything")
    wait_for_answers(page)
    page.locator(".settings summary").click()
    page.get_by_label("System prompt").wait_for()
    told = {"talk": findings(page)}
    page.get_by_role("button", name="History").click()
    told["history"] = findings(page)
    page.keyboard.press("Escape")
    for part, ready in (("machine", ".lead"), ("now", ".card")):
        page.locator(f"#tab-{part}").click()
        page.locator(ready).first.wait_for()
        told[part] = findings(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), part
    assert {part: found for part, found in told.items() if found} == {}


def test_the_keyboard_reaches_everything(visit: Open, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    page.locator(".skip").focus()
    reached = []
    for _ in range(14):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.className"))
    for name in ("Talk", "Machine", "Now", "API", "Chat", "Completion", "New", "History", "Add a column", "message"):
        assert any(name in text for text in reached), (name, reached)
