"""Conversations on the web page in a real browser: refusals, cut streams, reloads, several tabs, files, copies and the list."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.settings import DEMO_DIRECTORY
from tests.live.live_server import LiveServer, server_process
from tests.live.web_browser import (
    INSECURE_HOST,
    STREAMS,
    WITHOUT_BROWSER,
    Visits,
    answer_with,
    feed,
    send,
    wait,
    wait_for_answers,
)

pytestmark = [pytest.mark.full, WITHOUT_BROWSER]

WIDE = {"width": 1280, "height": 800}
PHONE = {"width": 390, "height": 844}
TOO_LONG = "A word and " * 3000


def rows(page: Any) -> list[str]:
    return page.locator(".entries .entry").all_inner_texts()  # type: ignore[no-any-return]


def actions_of(page: Any, title: str) -> Any:
    """The row of a conversation, with its actions open."""
    row = page.locator(".entries li", has=page.get_by_role("button", name=title, exact=True))
    row.get_by_role("button", name="Rename, export or delete").click()
    return row


# ---- the first sight -------------------------------------------------------------------------------------------------


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize(("viewport", "most"), [(WIDE, 60), (PHONE, 60)], ids=["wide", "phone"])
def test_controls_leave_the_height_to_the_conversation(
    visit: Visits, decoder: LiveServer, viewport: dict[str, int], most: int
) -> None:
    page = visit(decoder, viewport=viewport)
    page.locator(".welcome").wait_for()
    height = "(name) => document.querySelector(name).getBoundingClientRect()"
    assert page.evaluate(f"({height})('.log').top") <= most
    assert page.evaluate(f"({height})('.composer').height") <= 100


def test_an_empty_page_names_the_model_and_has_examples(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, script=STREAMS)
    assert page.locator(".welcome").inner_text().startswith("llama\n")
    assert "a context of 2,048 tokens" in page.locator(".welcome").inner_text()
    example = page.locator(".example").nth(1)
    text = example.inner_text()
    example.click()
    page.wait_for_function("streams.length")
    body = page.evaluate("streams[0].body")
    assert body["messages"] == [{"role": "user", "content": text}]
    assert not {"max_tokens", "n_predict", "max_completion_tokens"} & set(body), "no limit that nobody gave"


def test_a_limit_is_cut_to_the_context_and_a_completion_has_none(visit: Visits, decoder: LiveServer) -> None:
    earlier = "localStorage.setItem('armature.settings', JSON.stringify({ max_tokens: 512, top_k: '7' }))"
    page = visit(decoder, script=STREAMS + earlier)
    send(page, "One")
    page.wait_for_function("streams.length === 1")
    body = page.evaluate("streams[0].body")
    assert body["top_k"] == 7 and "n_predict" not in body, "the limit of an earlier version was nobody's"
    feed(page, "finish('stop')")
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Max tokens").fill("40")
    send(page, "Two")
    page.wait_for_function("streams.length === 2")
    body = page.evaluate("streams[1].body")
    assert (body["n_predict"], "max_tokens" in body) == (40, False)
    feed(page, "finish('stop')")
    page.get_by_label("Max tokens").fill("")
    page.get_by_role("button", name="Completion").click()
    send(page, "Three")
    page.wait_for_function("streams.length === 3")
    assert page.evaluate("streams[2].body.n_predict") == -1


# ---- what goes wrong -------------------------------------------------------------------------------------------------


def test_a_message_that_is_too_long_comes_back_and_leaves_the_history(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    send(page, "Hello.")
    wait_for_answers(page)
    send(page, TOO_LONG)
    page.get_by_text("Not sent: This model's maximum context length is 2048 tokens").wait_for()
    wait(page, lambda: any("400" in text for text in visit.told))
    visit.told.clear()
    assert page.locator(".message").input_value() == TOO_LONG
    bodies = answer_with(page, {"content": "Of course."})
    send(page, "Shorter.")
    wait_for_answers(page, 2)
    assert [message["content"] for message in bodies[0]["messages"]][::2] == ["Hello.", "Shorter."]
    assert page.locator(".error").count() == 0


def test_a_full_context_goes_on_without_the_oldest_messages(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    bodies = answer_with(page, {"content": "Yes."})
    for number in range(4):
        send(page, f"Question {number}")
        wait_for_answers(page, number + 1)
    page.unroute_all()
    refusal = {"error": {"message": "Too many tokens.", "code": "context_length_exceeded"}}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=400, json=refusal))
    send(page, "Last question")
    page.get_by_text("Not sent: Too many tokens.").wait_for()
    visit.told.clear()
    page.unroute_all()
    bodies = answer_with(page, {"content": "Yes."})
    page.get_by_role("button", name="Leave out the oldest messages").click()
    wait_for_answers(page, 5)
    sent = [message["content"] for message in bodies[0]["messages"] if message["role"] == "user"]
    assert sent == ["Question 2", "Question 3", "Last question"]
    assert page.locator(".turn.omitted").count() == 4


def test_a_column_whose_settings_are_no_json_does_not_lose_the_message(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("JSON schema").fill("{")
    send(page, "Hello.")
    page.get_by_text("Not sent: The JSON schema is not valid JSON").wait_for()
    assert page.locator(".message").input_value() == "Hello."


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("close()", "The answer was cut off: the connection ended before the answer did."),
        ("lose()", "The answer was cut off: the connection to the server was lost."),
        ("send('{')", "The answer was cut off: the server sent something that this page cannot read."),
    ],
)
def test_a_cut_stream_is_said_and_the_answer_goes_on(visit: Visits, decoder: LiveServer, end: str, said: str) -> None:
    page = visit(decoder, script=STREAMS)
    send(page, "Tell me.")
    feed(page, "say('Once upon')")
    page.get_by_text("Once upon").wait_for()
    feed(page, end)
    page.get_by_text(said).wait_for()
    page.get_by_role("button", name="Continue").click()
    page.wait_for_function("streams.length === 2")
    body = page.evaluate("streams[1].body")
    assert body["messages"][-1] == {"role": "assistant", "content": "Once upon"}
    assert (body["continue_final_message"], body["add_generation_prompt"]) == (True, False)
    feed(page, "say(' a time.')")
    feed(page, "finish('stop')")
    wait(page, lambda: page.locator(".assistant .prose").inner_text() == "Once upon a time.")
    page.get_by_role("button", name="Continue").wait_for(state="detached")
    assert page.locator(".error").count() == 0 and page.locator(".assistant").count() == 1


def test_a_server_that_is_killed_is_said_and_the_next_message_comes_back(visit: Visits) -> None:
    with server_process(DEMO_DIRECTORY, "--calibrate", "off") as running:
        page = visit(SimpleNamespace(url=running.url()))  # type: ignore[arg-type]
        page.get_by_role("button", name="Completion").click()
        page.get_by_role("button", name="Settings").click()
        page.get_by_label("Stop strings").fill("no such text")
        send(page, "Once upon a time")
        page.locator(".assistant .plain:not(:empty)").wait_for()
        os.kill(running.process.pid, signal.SIGKILL)
        page.locator(".assistant .error, .stats:not(:empty)").first.wait_for()
        visit.told.clear()
        send(page, "And then?")
        page.get_by_text("Not sent: The server cannot be reached. Is it still running?").wait_for()
        assert page.locator(".message").input_value() == "And then?"
        visit.told.clear()


def test_an_answer_is_not_lost_if_another_cannot_be_generated(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    answer_with(page, {"content": "The first answer."})
    send(page, "Question")
    wait_for_answers(page)
    page.unroute_all()
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.get_by_role("button", name="Retry").click()
    page.get_by_text("The server cannot be reached.").wait_for()
    assert page.locator(".assistant .prose").inner_text() == "The first answer."
    visit.told.clear()


def test_an_answer_of_something_else_is_no_answer(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/html", body="<p>Log in</p>"))
    send(page, "Hello.")
    page.get_by_text("Not sent: What answered is not this server").wait_for()


def test_two_messages_without_an_answer_between_them_are_one(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, script=STREAMS)
    send(page, "First.")
    page.get_by_role("button", name="Stop").click()
    page.locator(".stats", has_text="stopped by you").wait_for()
    send(page, "Second.")
    page.wait_for_function("streams.length === 2")
    assert page.evaluate("streams[1].body.messages") == [{"role": "user", "content": "First.\n\nSecond."}]


@pytest.mark.parametrize(("finish", "continues"), [("length", True), ("stop", False)])
def test_continue_is_offered_after_a_cut_alone(
    visit: Visits, decoder: LiveServer, finish: str, continues: bool
) -> None:
    page = visit(decoder)
    answer_with(page, {"content": "A beginning"}, finish=finish)
    send(page, "Question")
    wait_for_answers(page)
    assert page.get_by_role("button", name="Continue").count() == int(continues)
    assert page.get_by_role("button", name="Retry").count() == 1


# ---- what is kept ----------------------------------------------------------------------------------------------------


def test_a_reload_keeps_a_finished_conversation_and_the_draft(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    answer_with(page, {"content": "An **old** answer."})
    send(page, "An old question")
    wait_for_answers(page)
    page.locator(".message").fill("A thought")
    page.reload()
    assert page.locator(".assistant strong").inner_text() == "old"
    assert page.locator(".message").input_value() == "A thought"
    page.get_by_role("button", name="New", exact=True).click()
    page.locator(".welcome").wait_for()
    page.reload()
    page.locator(".welcome").wait_for()
    page.get_by_role("button", name="An old question", exact=True).click()
    assert page.locator(".assistant strong").inner_text() == "old"


def test_a_reload_keeps_what_an_answer_has_so_far(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, script=STREAMS)
    send(page, "A question")
    for piece in ("One ", "two ", "three"):
        feed(page, f"say({json.dumps(piece)})")
    page.get_by_text("One two three").wait_for()
    page.reload()
    page.get_by_text("The answer was cut off: this page was closed or loaded again.").wait_for()
    assert page.locator(".assistant .prose").inner_text() == "One two three"
    assert rows(page) == ["A question"]
    page.get_by_role("button", name="Continue").click()
    feed(page, "say(', four')")
    feed(page, "finish('stop')")
    wait(page, lambda: page.locator(".assistant .prose").inner_text() == "One two three, four")


def test_conversations_are_found_renamed_exported_and_deleted(
    visit: Visits, decoder: LiveServer, tmp_path: Path
) -> None:
    page = visit(decoder, viewport=WIDE, accept_downloads=True)
    answer_with(page, {"content": "A pear, $x^2$."})
    for text in ("About apples", "About bread"):
        page.get_by_role("button", name="New", exact=True).click()
        send(page, text)
        wait_for_answers(page)
    wait(page, lambda: rows(page) == ["About bread", "About apples"])
    search = page.get_by_label("Search the conversations")
    for wanted, found in (("APPLES", ["About apples"]), ("pear", ["About bread", "About apples"]), ("plum", [])):
        search.fill(wanted)
        wait(page, lambda found=found: rows(page) == found)  # type: ignore[misc]
    search.fill("")
    wait(page, lambda: len(rows(page)) == 2)
    row = actions_of(page, "About apples")
    row.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_label("Title").fill("Fruit / today")
    page.get_by_label("Title").press("Enter")
    wait(page, lambda: rows(page) == ["About bread", "Fruit / today"])
    row = actions_of(page, "Fruit / today")
    with page.expect_download() as saved:
        row.get_by_role("button", name="Markdown").click()
    assert saved.value.suggested_filename == "Fruit-today.md"
    saved.value.save_as(tmp_path / "export.md")
    text = (tmp_path / "export.md").read_text(encoding="utf-8")
    assert (
        text.startswith("# Fruit / today\n")
        and "**You**\n\nAbout apples" in text
        and "**llama**\n\nA pear, $x^2$." in text
    )
    with page.expect_download() as saved:
        row.get_by_role("button", name="JSON").click()
    saved.value.save_as(tmp_path / "export.json")
    exported = json.loads((tmp_path / "export.json").read_text(encoding="utf-8"))
    assert [each["title"] for each in exported] == ["Fruit / today"]
    assert exported[0]["columns"][0]["messages"] == [
        {"role": "user", "content": "About apples"},
        {"role": "assistant", "content": "A pear, $x^2$."},
    ]
    row.get_by_role("button", name="Delete", exact=True).click()
    wait(page, lambda: rows(page) == ["About bread"])
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Yes, delete all").click()
    page.get_by_text("There are none yet.").wait_for()
    page.locator(".welcome").wait_for()


def test_conversations_of_an_earlier_version_are_taken_over(visit: Visits, decoder: LiveServer) -> None:
    turns = [{"role": "user", "content": "Long ago"}, {"role": "assistant", "content": "Yes."}]
    earlier = [{"id": "a", "at": 1, "mode": "chat", "lanes": [{"settings": {"max_tokens": 512}, "turns": turns}]}]
    once = f"if (!sessionStorage.seen) localStorage['armature.conversations'] = {json.dumps(json.dumps(earlier))}; sessionStorage.seen = 1;"
    page = visit(decoder, viewport=WIDE, script=once)
    page.get_by_role("button", name="Long ago", exact=True).click()
    assert page.locator(".assistant .prose").inner_text() == "Yes."
    assert page.evaluate("localStorage['armature.conversations']") is None


def test_two_tabs_lose_nothing(visit: Visits, decoder: LiveServer) -> None:
    one = visit(decoder, viewport=WIDE, script=STREAMS)
    send(one, "The beginning")
    feed(one, "say('Hello')")
    feed(one, "finish('stop')")
    wait_for_answers(one)
    wait(one, lambda: rows(one) == ["The beginning"])
    two = visit.open_tab(one.context, f"{decoder.url}/", decoder.url)
    two.get_by_role("button", name="The beginning", exact=True).click()
    assert two.locator(".assistant .prose").inner_text() == "Hello"
    # Both go on at the same time: the one that knows the older state keeps its own as a copy.
    send(two, "In the second tab")
    feed(two, "say('Two')")
    two.get_by_text("Two", exact=True).wait_for()
    send(one, "In the first tab")
    feed(one, "say('One')")
    feed(one, "finish('stop')")
    wait_for_answers(one, 2)
    feed(two, "finish('stop')")
    wait_for_answers(two, 2)
    wait(two, lambda: sorted(rows(two)) == ["The beginning", "The beginning (copy)"])
    kept = two.evaluate("import('./web/history.js').then((history) => history.conversations())")
    said = {turn["content"] for each in kept for turn in each["lanes"][0]["turns"]}
    assert said - {""} == {"The beginning", "Hello", "In the first tab", "One", "In the second tab", "Two"}
    # What one tab deletes, the other does not show any more.
    one.get_by_role("button", name="Delete all").click()
    one.get_by_role("button", name="Yes, delete all").click()
    two.locator(".welcome").wait_for()


def test_a_browser_without_room_says_that_nothing_is_kept(visit: Visits, decoder: LiveServer) -> None:
    full = """
    IDBObjectStore.prototype.put = function () { this.transaction.abort(); };
    const error = { get: () => new DOMException("full", "QuotaExceededError") };
    Object.defineProperty(IDBTransaction.prototype, "error", error);
    """
    page = visit(decoder, script=full)
    answer_with(page, {"content": "Yes."})
    send(page, "Hello.")
    wait_for_answers(page)
    page.get_by_text("This conversation is not kept: the browser has no room left.").wait_for()
    send(page, "Still here?")
    wait_for_answers(page, 2)


def test_a_browser_without_a_database_keeps_them_in_the_tab(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport=WIDE, script="IDBFactory.prototype.open = () => { throw new Error('off'); };")
    answer_with(page, {"content": "Yes."})
    send(page, "Hello.")
    wait_for_answers(page)
    page.get_by_role("button", name="New", exact=True).click()
    page.get_by_role("button", name="Hello.", exact=True).click()
    assert page.locator(".assistant .prose").inner_text() == "Yes."


# ---- copies and files ------------------------------------------------------------------------------------------------


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize("host", ["127.0.0.1", INSECURE_HOST])
def test_copies_are_made_at_every_address(visit: Visits, decoder: LiveServer, host: str) -> None:
    page = visit(decoder, host=host)
    assert page.evaluate("isSecureContext") == (host != INSECURE_HOST)
    answer_with(page, {"content": "Text of the answer.\n\n```\ncode\n```"})
    send(page, "Question")
    wait_for_answers(page)
    for button, copied in ((".footer", "Text of the answer.\n\n```\ncode\n```"), (".code-head", "code")):
        page.locator(button).get_by_role("button", name="Copy").click()
        page.locator(button).get_by_role("button", name="Copied").wait_for()
        page.locator(".message").fill("")
        page.locator(".message").press("Control+V")
        assert page.locator(".message").input_value() == copied


def test_a_copy_that_was_not_made_is_not_called_one(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, host=INSECURE_HOST, script="document.execCommand = () => false;")
    answer_with(page, {"content": "Text"})
    send(page, "Question")
    wait_for_answers(page)
    page.locator(".footer").get_by_role("button", name="Copy").click()
    page.get_by_role("button", name="Not copied: select the text instead").wait_for()


def test_a_text_file_goes_with_a_message(visit: Visits, decoder: LiveServer, tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text("x = 1\n```\n", encoding="utf-8")
    (tmp_path / "wide.txt").write_text("Grüße", encoding="utf-16")
    page = visit(decoder, script=STREAMS)
    page.locator("input[type=file]").set_input_files([tmp_path / "notes.py", tmp_path / "wide.txt"])
    page.get_by_role("button", name="Remove wide.txt").wait_for()
    page.reload()
    page.get_by_role("button", name="Remove wide.txt").wait_for()
    send(page, "What is this?")
    page.wait_for_function("streams.length")
    [message] = page.evaluate("streams[0].body.messages")
    assert message["content"] == "What is this?\n\nnotes.py:\n````py\nx = 1\n```\n````\n\nwide.txt:\n```txt\nGrüße\n```"
    assert page.locator(".turn.user .plain").inner_text() == "What is this?"
    assert page.locator(".turn.user summary").first.inner_text() == "notes.py 10 B"
    assert page.locator(".chip").count() == 0


@pytest.mark.cases(ci=1)
@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.png", b"\x89PNG\r\n\x1a\n\x00\x00", "a.png is a picture, and"),
        ("b.bin", b"text\0text", "b.bin is not a text file."),
        ("c.txt", b" \n", "c.txt is empty."),
        ("d.log", b"x" * (1024 * 1024 + 1), "d.log has 1 MiB. A file may have at most 1 MiB."),
    ],
)
def test_a_file_that_is_no_text_is_refused(
    visit: Visits, decoder: LiveServer, name: str, content: bytes, said: str
) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    page.locator("input[type=file]").set_input_files([{"name": name, "mimeType": "", "buffer": content}])
    page.locator(".attachments", has_text=said).wait_for()
    assert page.locator(".chip").count() == 0


def test_a_file_is_dropped_on_the_page(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    transfer = page.evaluate_handle(
        "() => { const data = new DataTransfer(); data.items.add(new File(['Hello'], 'hello.txt')); return data; }"
    )
    page.dispatch_event(".log", "dragover", {"dataTransfer": transfer})
    assert "dropping" in page.locator(".talk").get_attribute("class")
    page.dispatch_event(".log", "drop", {"dataTransfer": transfer})
    page.get_by_role("button", name="Remove hello.txt").wait_for()


def test_the_list_covers_a_phone_until_a_conversation_is_chosen(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport=PHONE)
    answer_with(page, {"content": "Yes."})
    send(page, "Hello.")
    wait_for_answers(page)
    page.get_by_role("button", name="Conversations").click()
    assert page.evaluate("document.querySelector('.room').inert")
    page.keyboard.press("Escape")
    assert page.locator(".sidebar").is_hidden() and not page.evaluate("document.querySelector('.room').inert")
    page.get_by_role("button", name="Conversations").click()
    page.get_by_role("button", name="New conversation").click()
    assert page.locator(".sidebar").is_hidden()
    page.locator(".welcome").wait_for()


def test_a_late_refresh_of_the_list_leaves_an_open_row_alone(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport=WIDE)
    page.clock.install()  # the list waits for this clock before it shows a change
    answer_with(page, {"content": "A pear."})
    for text in ("About apples", "About bread"):
        page.get_by_role("button", name="New", exact=True).click()
        send(page, text)
        wait_for_answers(page)
    wait(page, lambda: rows(page) == ["About bread", "About apples"])
    page.get_by_role("button", name="New", exact=True).click()
    send(page, "About cake")
    wait_for_answers(page)
    row = actions_of(page, "About apples")
    row.get_by_role("button", name="Rename", exact=True).click()
    page.get_by_label("Title").fill("Fruit")
    page.clock.run_for(1000)
    page.get_by_label("Title").press("Enter")
    wait(page, lambda: rows(page) == ["About cake", "About bread", "Fruit"])


def test_a_change_that_came_while_a_row_was_open_is_shown_when_it_is_closed(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport=WIDE)
    page.clock.install()
    answer_with(page, {"content": "A pear."})
    send(page, "About apples")
    wait_for_answers(page)
    wait(page, lambda: rows(page) == ["About apples"])
    row = actions_of(page, "About apples")
    page.get_by_role("button", name="New", exact=True).click()
    send(page, "About bread")
    wait_for_answers(page)
    for _ in range(10):
        page.clock.run_for(300)  # the list would show the change now
    assert rows(page) == ["About apples"]
    row.get_by_role("button", name="Rename, export or delete").click()
    wait(page, lambda: rows(page) == ["About bread", "About apples"])


def test_a_late_refresh_of_the_list_leaves_a_question_and_the_focus_alone(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport=WIDE)
    page.clock.install()
    answer_with(page, {"content": "A pear."})
    send(page, "About apples")
    wait_for_answers(page)
    page.clock.run_for(1000)
    wait(page, lambda: rows(page) == ["About apples"])
    page.get_by_role("button", name="New", exact=True).click()
    send(page, "About bread")
    wait_for_answers(page)
    page.get_by_role("button", name="Delete all").click()
    entry = page.get_by_role("button", name="About apples", exact=True)
    entry.focus()
    page.clock.run_for(1000)
    wait(page, lambda: rows(page) == ["About bread", "About apples"])
    assert entry.evaluate("(it) => it === document.activeElement")
    page.get_by_role("button", name="No", exact=True).click()
    assert rows(page) == ["About bread", "About apples"]
    page.get_by_role("button", name="Delete all").click()
    page.get_by_role("button", name="Yes, delete all").click()
    wait(page, lambda: rows(page) == [])
