"""The web page in a real browser, with one server of each kind of model: what its users do, and that it asks no one else."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from app.settings import DEMO_DIRECTORY
from tests.attack.kinds import write_model
from tests.live.live_server import PATIENCE, LiveServer, live, until
from tests.live.web_browser import WITHOUT_BROWSER, Visits, answer_with, findings, send, wait, wait_for_answers
from tiny_encoders import write_encoder

pytestmark = [pytest.mark.full, WITHOUT_BROWSER]

KEY = "one-secret"
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
# What a model may write to be read.
RICH = r"""
The sum \(\sum_{i=1}^n i = \frac{n(n+1)}{2}\), also $n^2$.

$$
\begin{pmatrix} a & b \\ c & d \end{pmatrix}
$$

- [x] done
- [ ] to do

| name | price |
|:-----|------:|
| pear | 12.50 |

```python
def double(x: int) -> int:  # twice
    return x * 2
```

مرحبا بالعالم
"""


# ---- Talk ------------------------------------------------------------------------------------------------------------


def test_a_story_is_streamed_with_its_figures(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    send(page, STORY)
    wait_for_answers(page)
    assert len(page.locator(".assistant .prose").inner_text()) > 50
    figures = page.locator(".stats").inner_text()
    assert re.search(r"\d+ tokens · [\d,.]+ tokens/s · first token .*queue .*prefill", figures), figures
    assert page.title() == "llama – Armature"


def test_stop_ends_the_request_in_the_server(visit: Visits, decoder: LiveServer) -> None:
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


def test_an_answer_follows_a_schema(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Insert an example").first.click()
    example = json.loads(page.get_by_label("JSON schema").input_value())
    assert example["required"] == ["name", "age"]
    page.get_by_label("JSON schema").fill(json.dumps({**example, "properties": CHOICES}))
    page.get_by_role("button", name="Settings").click()
    send(page, "Who is the fox?")
    wait_for_answers(page)
    answer = json.loads(page.locator(".assistant pre").inner_text())
    assert answer["name"] in CHOICES["name"]["enum"] and answer["age"] in CHOICES["age"]["enum"]
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("JSON schema").fill("{")
    send(page, "And now?")
    page.locator(".user .error").wait_for()
    assert "JSON schema is not valid JSON" in page.locator(".user .error").inner_text()


def test_an_error_is_shown_in_the_servers_words_and_retried(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Top p").fill("7")
    send(page, STORY)
    error = page.locator(".user .error")
    error.wait_for()
    assert "top_p" in error.inner_text()
    page.get_by_label("Top p").fill("")
    page.get_by_role("button", name="Try again").click()
    wait_for_answers(page)
    assert error.count() == 0
    visit.told[:] = [text for text in visit.told if "400" not in text]


def test_a_message_is_edited_and_columns_have_their_own_settings(visit: Visits, decoder: LiveServer) -> None:
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


def test_probabilities_are_shown_for_the_token_under_the_pointer(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    for mode in ("Chat", "Completion"):
        page.get_by_role("button", name=mode, exact=True).click()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Probabilities of tokens").check()
        page.get_by_label("Max tokens").fill("12")
        page.get_by_role("button", name="Settings").click()
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


def test_calls_of_tools_are_shown_and_answered(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    call = {"index": 0, "id": "call_1", "function": {"name": "get_weather", "arguments": '{"city": '}}
    rest = {"index": 0, "function": {"arguments": '"Bern"}'}}
    bodies = answer_with(page, {"tool_calls": [call]}, {"tool_calls": [rest]}, finish="tool_calls")
    page.get_by_role("button", name="Settings").click()
    page.get_by_role("button", name="Insert an example").nth(1).click()
    send(page, "How is the weather in Bern?")
    page.get_by_label("Result of get_weather").fill("Rain.")
    assert bodies[0]["tools"][0]["function"]["name"] == "get_weather"
    assert '"city": "Bern"' in page.locator(".call pre").inner_text()
    page.get_by_role("button", name="Send result").click()
    wait(page, lambda: len(bodies) == 2)
    assert bodies[1]["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"city": "Bern"}'
    assert bodies[1]["messages"][2] == {"role": "tool", "tool_call_id": "call_1", "content": "Rain."}


def test_markup_in_an_answer_is_text(visit: Visits, decoder: LiveServer) -> None:
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


# ---- the other parts -------------------------------------------------------------------------------------------------


def test_a_key_is_asked_for_and_kept_in_the_tab(visit: Visits) -> None:
    with live(DEMO_DIRECTORY, calibrate="off", api_keys=(KEY,)) as server:
        page = visit(server)
        page.get_by_label("Key").fill("wrong")
        page.get_by_role("button", name="Use the key").click()
        page.get_by_text("send it as").wait_for()
        wait(page, lambda: any("401" in text for text in visit.told))
        visit.told.clear()
        page.get_by_label("Key").fill(KEY)
        page.get_by_role("button", name="Use the key").click()
        send(page, STORY)
        wait_for_answers(page)
        assert page.evaluate("sessionStorage.getItem('armature.key')") == KEY
        assert KEY not in page.evaluate("JSON.stringify(localStorage)")
        assert findings(page) == []


def test_texts_are_compared_and_ranked(visit: Visits, tmp_path: Path) -> None:
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


def test_texts_are_classified(visit: Visits, tmp_path: Path) -> None:
    model = write_encoder(tmp_path / "model", "BertForSequenceClassification", num_labels=3)
    with live(model, calibrate="off") as server:
        page = visit(server)
        page.get_by_role("button", name="Classify").click()
        page.locator(".ranked meter").first.wait_for()
        assert page.locator(".ranked > li").count() == 2
        assert page.locator(".ranked meter").count() == 6
        assert findings(page) == []


def test_a_program_gets_a_form_of_its_signature(visit: Visits, tmp_path: Path) -> None:
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


def test_the_machine_is_described_in_words(visit: Visits, decoder: LiveServer) -> None:
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


def test_now_follows_the_requests(visit: Visits, decoder: LiveServer) -> None:
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


def test_the_list_of_routes_loads_nothing(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{decoder.url}/docs")
    page.locator("summary", has_text="POST /v1/chat/completions").first.wait_for()
    assert page.evaluate("getComputedStyle(document.body).maxWidth") == "960px", "its style is let in"
    assert asked == [f"{decoder.url}/docs"]
    assert findings(page) == []


@pytest.mark.cases(ci=6)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1280, 1920])
def test_axe_finds_nothing_and_nothing_runs_over(visit: Visits, decoder: LiveServer, width: int, theme: str) -> None:
    page = visit(decoder, viewport={"width": width, "height": 800}, color_scheme=theme)
    page.locator(".welcome").wait_for()
    told = {"empty": findings(page)}
    answer_with(page, {"content": HOSTILE + RICH})
    send(page, "Show everything")
    wait_for_answers(page)
    page.locator("math").first.wait_for()
    page.locator(".hl-keyword").first.wait_for()
    told["talk"] = findings(page)
    if not page.get_by_label("Search the conversations").is_visible():
        page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="Rename, export or delete").click()
    told["list"] = findings(page)
    page.get_by_label("Search the conversations").press("Escape")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt").wait_for()
    told["settings"] = findings(page)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    for part, ready in (("machine", ".lead"), ("now", ".card")):
        page.locator(f"#tab-{part}").click()
        page.locator(ready).first.wait_for()
        told[part] = findings(page)
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), part
    assert {part: found for part, found in told.items() if found} == {}


def test_the_keyboard_reaches_everything(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    page.locator(".skip").focus()
    reached = []
    for _ in range(20):
        page.keyboard.press("Tab")
        reached.append(page.evaluate("document.activeElement.textContent.trim() || document.activeElement.className"))
    for name in (
        "Talk",
        "Machine",
        "Now",
        "API",
        "Chat",
        "Completion",
        "New",
        "Conversations",
        "Add a column",
        "message",
    ):
        assert any(name in text for text in reached), (name, reached)
