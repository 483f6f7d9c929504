"""How the web page shows what a model writes, in a real browser: formulas, code, directions, tables, lists; growing and hostile text."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from tests.live.live_server import LiveServer
from tests.live.web_browser import WITHOUT_BROWSER, Visits

pytestmark = [pytest.mark.full, WITHOUT_BROWSER]

SHOW = """async (text) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const view = new MarkdownView();
  view.update(text);
  const element = document.createElement("div");
  element.className = "shown";
  element.append(view.element);
  document.querySelector(".log").replaceChildren(element);
}"""
# Shows a text in pieces of the given lengths, and compares with the whole; both wait for formulas and colours.
GROW = """async ([text, cuts]) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const settle = async (view) => {
    const waits = ".math:not(:has(math)), code:not(:has(*))";
    for (let turn = 0; turn < 50 && view.element.querySelector(waits); turn++) await new Promise(requestAnimationFrame);
    view.element.normalize();
    return view.element.innerHTML;
  };
  const whole = new MarkdownView();
  whole.update(text);
  const grown = new MarkdownView();
  for (const cut of cuts) grown.update(text.slice(0, cut), true);
  grown.update(text);
  return [await settle(whole), await settle(grown)];
}"""
COUNT = """async (text) => {
  const { MarkdownView } = await import("./web/markdown.js");
  const view = new MarkdownView();
  const create = document.createElement;
  let made = 0;
  document.createElement = function (...names) { made += 1; return create.apply(this, names); };
  for (let at = 0; at <= text.length; at += 5) view.update(text.slice(0, at), true);
  view.update(text);
  document.createElement = create;
  return made;
}"""
MIXED = r"""Intro with \(a_1\) and `code`.
Second line

1. one

2. two
   ```python
   def f(): pass
   ```

   after

- [ ] task
- [x] done $x^2$

| a | b |
|--:|:-:|
| 1 | \(y\) |

Text before code:
```js
const x = "`";

// more
```

$$
x = 1
+ y
$$

> quote
> - item

~~~
plain
~~~
المعادلة $z$ هنا
"""


def show(page: Any, text: str) -> Any:
    page.locator(".message").wait_for()
    page.evaluate(SHOW, text)
    return page.locator(".shown")


FORMULAS = [
    (r"\(a^2\) and \[b_1\] and $$c$$ and $d$", 4),
    ("$x$, $x_1+x_2$; ($y$)", 3),
    (
        r"$$" "\n" r"a &= b \\" "\n" "+ c\n$$",
        0,
    ),  # & belongs into an environment: not understood, so the source is kept
    (r"\[" "\n" r"\begin{aligned} a &= b \\" "\n" r"- c &= d \end{aligned}" "\n" r"\]", 1),
    (r"- item \(x\)" "\n" r"  $$y$$", 2),
    ("It costs $5 or $10.", 0),
    ("US$5, A$6$ and 5$.", 0),
    ("Between $5 for one, or two for 9$ each.", 0),
    ("$HOME and $PATH, or $HOME/$USER", 0),
    ("`$x$` and \\$x\\$ and $ x $", 0),
    ("```\n$$x$$ \\(y\\)\n```", 0),
    ("A stray $$ in a text\n\n- a list\n- goes on", 0),
]


def test_formulas_are_found_and_prices_are_not(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    for text, formulas in FORMULAS:
        shown = show(page, r"\(w\)" "\n\n" + text)
        shown.locator("math").nth(formulas).wait_for()
        assert shown.locator("math").count() == formulas + 1, text
        if not formulas:
            assert "$" in shown.inner_text() or "&=" in shown.inner_text(), text


def test_a_formula_is_read_from_left_to_right_in_a_text_that_is_not(visit: Visits, decoder: LiveServer) -> None:
    shown = show(visit(decoder), "مرحبا $x+1$ بالعالم `code`\n\nHello\n\n- שלום\n- hello\n\n```py\nx = 1\n```\n")
    shown.locator("math").wait_for()
    direction = "(element) => getComputedStyle(element).direction"
    for selector, wanted in (
        ("p >> nth=0", "rtl"),
        ("p >> nth=1", "ltr"),
        ("ul", "rtl"),
        ("pre", "ltr"),
        ("math", "ltr"),
    ):
        assert shown.locator(selector).evaluate(direction) == wanted, selector


def test_messages_titles_and_the_box_take_the_direction_of_their_text(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder, viewport={"width": 1280, "height": 800})
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.locator(".message").fill("שלום עולם")
    direction = "(element) => getComputedStyle(element).direction"
    assert page.locator(".message").evaluate(direction) == "rtl"
    page.locator(".message").press("Enter")
    page.locator(".user .error").wait_for()
    assert page.locator(".user .plain").evaluate(direction) == "rtl"
    page.locator(".entry").wait_for()
    assert page.locator(".entry").evaluate(direction) == "rtl"
    visit.told.clear()


def test_tables_have_sides_and_tasks_have_boxes(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    shown = show(
        page,
        "| a | b | c | d |\n|:--|--:|:-:|---|\n| 1 | 2 | 3 | x \\| y |\n\n- [x] done\n- [ ] open\n- [z] not a task\n",
    )
    side = "(element) => getComputedStyle(element).textAlign"
    assert [cell.evaluate(side) for cell in shown.locator("td").all()] == ["start", "end", "center", "start"]
    assert shown.locator("td").last.inner_text() == "x | y"
    boxes = shown.locator("input[type=checkbox]")
    assert [(box.is_checked(), box.is_enabled()) for box in boxes.all()] == [(True, False), (False, False)]
    assert shown.locator("li").all_inner_texts() == ["done", "open", "[z] not a task"]


def test_code_has_colours_of_its_language_and_keeps_its_text(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    source = 'def f(x):\n    return "<b>" + str(x)  # a & b'
    shown = show(page, f"```Python\n{source}\n```\n\n```unknown\n{source}\n```\n\n```html\n<b onclick='x'>t</b>\n```\n")
    shown.locator(".hl-keyword").first.wait_for()
    assert shown.locator("pre").nth(0).inner_text() == shown.locator("pre").nth(1).inner_text() == source
    assert shown.locator("pre").nth(0).locator(".hl-comment").inner_text() == "# a & b"
    assert shown.locator("pre").nth(1).locator("span").count() == 0
    assert shown.locator("pre").nth(2).locator("b").count() == 0


def test_text_that_grows_ends_as_the_whole_text(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    chance = random.Random(7)
    for pieces in (1, 3, 9, 40):
        cuts = [cut for cut in range(len(MIXED)) if chance.random() * pieces < 1]
        whole, grown = page.evaluate(GROW, [MIXED, cuts])
        assert "<math" in whole and "hl-keyword" in whole
        assert grown == whole, pieces


@pytest.mark.parametrize(
    "unit",
    ["A paragraph with **bold** text.\n\n", "```python\nx = 1\n```\n\n", r"$$x^2$$" "\n\n"],
    ids=["paragraphs", "code", "formulas"],
)
def test_the_work_grows_with_the_text(visit: Visits, decoder: LiveServer, unit: str) -> None:
    """Twice the text makes at most little more than twice the elements, however often it was shown."""
    page = visit(decoder)
    page.locator(".message").wait_for()
    once, twice = (page.evaluate(COUNT, unit * number) for number in (40, 80))
    assert twice < 2.2 * once


def test_open_code_grows_by_its_text(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    page.locator(".message").wait_for()
    short, long = (page.evaluate(COUNT, "Here:\n```python\n" + "x = 1\n" * number) for number in (10, 500))
    assert long == short


HOSTILE = {
    "href": r"\href{javascript:alert(1)}{x}",
    "url": r"\url{javascript:alert(1)}",
    "picture": r"\includegraphics{https://evil.example/p.png}",
    "html": r"\text{<img src=x onerror=alert(1)>}",
    "id": r"\htmlId{main}{x}",
    "class": r"\class{sidebar}{x}",
    "style": r"\htmlStyle{position:fixed;inset:0}{x}",
    "label": r"\label{main} x",
    "space": r"x\hspace{-9999em}y\kern9999em\raisebox{9999em}{z}",
    "rule": r"\rule{9999em}{9999em}",
    "loop": r"\def\a{\a\a}\a",
    "bomb": r"\def\a{" + "x" * 100 + r"}\def\b{" + r"\a" * 50 + "}" + r"\b" * 60,
    "deep": r"\frac{1}{" * 400 + "x" + "}" * 400,
    "braces": "{" * 1900 + "x" + "}" * 1900,
    "long": "x+" * 1999 + "x",
    "global": r"\gdef\sin{y}",
}


def test_hostile_formulas_are_inert_and_stay_at_their_place(visit: Visits, decoder: LiveServer) -> None:
    page = visit(decoder)
    dialogs: list[str] = []
    page.on("dialog", lambda dialog: (dialogs.append(dialog.message), dialog.dismiss()))
    shown = show(page, "\n\n".join(rf"\({source}\)" for source in HOSTILE.values()) + "\n\n" r"\(\sin x\)")
    shown.get_by_text("sin", exact=True).wait_for()
    for selector in ("a", "img", "iframe", "[id]", "[href]", "[src]", ".sidebar", "math script"):
        assert shown.locator(selector).count() == 0, selector
    # Nothing but colours, fonts and lengths that are short comes from a formula.
    styles = shown.evaluate("(root) => [...root.querySelectorAll('[style]')].map((each) => each.getAttribute('style'))")
    assert not any(word in json.dumps(styles) for word in ("position", "url", "fixed", "transform"))
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    widest = shown.evaluate(
        "(root) => Math.max(...[...root.querySelectorAll('mspace, mpadded')].map((each) => each.getBoundingClientRect().width), 0)"
    )
    assert widest < 400
    assert dialogs == []
    # A formula of one message changes no later one.
    assert show(page, r"\(\sin y\)").locator("mi", has_text="sin").count() == 1


def test_code_in_the_bounds_of_depth_and_length(visit: Visits, decoder: LiveServer) -> None:
    """Very long code stays without colours, and nested languages end."""
    page = visit(decoder)
    long = "x = 1\n" * 20_000
    shown = show(page, f"```python\n{long}```\n\n```python\nx = 1\n```\n")
    shown.locator("pre").nth(1).locator(".hl-number").wait_for()
    assert shown.locator("pre").nth(0).locator("span").count() == 0
    nested = "<script>" * 500
    assert show(page, f"```html\n{nested}\n```\n").locator("pre").inner_text() == nested
