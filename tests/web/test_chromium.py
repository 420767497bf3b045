"""Pages in a real browser: narrow and wide, by keyboard, in light and dark, and nothing that its policy refuses."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlencode

import pytest
from support.chromium import NAMELESS

if TYPE_CHECKING:
    from support.chromium import Browser
    from support.pages import Pages

pytestmark = pytest.mark.slow

SAID = {"cluster": "shop", "broker": "north"}
ORDERS = {**SAID, "topic": "orders"}
TARGETS = {
    "fleet": ("/", {}),
    "broker": ("/broker", SAID),
    "topic": ("/topic", ORDERS),
    "queue": ("/queue", {**ORDERS, "queue": 1}),
    "messages": ("/messages", {**ORDERS, "queue": 1}),
    "message": ("/message", {**ORDERS, "queue": 1, "offset": 3}),
    "timers": ("/timers", SAID),
    "archive": ("/archive", SAID),
    "costs": ("/costs", {}),
    "doctor": ("/doctor", {}),
    "error": ("/broker", {**SAID, "broker": "nobody"}),
}


def target(pages: Pages, name: str) -> str:
    path, said = TARGETS[name]
    return pages.address.rstrip("/") + path + (f"?{urlencode(said)}" if said else "")


@pytest.mark.parametrize("width", [390, 1200])
@pytest.mark.parametrize("name", TARGETS)
def test_a_page_fits_its_width_and_keeps_to_its_policy(
    pages: Pages, tab: Browser, name: str, width: int
):
    tab.show(target(pages, name), width=width)
    tab.check_fit(width)
    assert (
        tab.ask("getComputedStyle(document.querySelector('header')).borderBottomStyle") == "solid"
    )
    complaints = [text for text in tab.complaints() if "400" not in text or name != "error"]
    assert complaints == []


LUMINANCE = """
(() => {
  const channel = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * channel(c[0]) + 0.7152 * channel(c[1]) + 0.0722 * channel(c[2]);
  const parse = s => s.match(/[0-9.]+/g).map(Number);
  const ground = e => { for (; e; e = e.parentElement) {
    const c = parse(getComputedStyle(e).backgroundColor); if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  const low = [];
  for (const e of document.querySelectorAll('body *')) {
    if (e.closest('svg, .skip, .hidden') || ![...e.childNodes].some(n => n.nodeType == 3 && n.data.trim())) continue;
    const a = light(parse(getComputedStyle(e).color)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([e.outerHTML.slice(0, 60), ratio]);
  }
  return low;
})()
"""


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_text_can_be_read_in_light_and_dark(pages: Pages, tab: Browser, name: str, dark: bool):
    tab.show(target(pages, name), dark=dark)
    red = tab.ask("getComputedStyle(document.body).backgroundColor.match(/[0-9]+/)[0]")
    assert (int(red) < 60) == dark
    assert tab.ask(LUMINANCE) == []


@pytest.mark.parametrize("name", TARGETS)
def test_everything_has_a_name_and_tables_say_what_they_are(pages: Pages, tab: Browser, name: str):
    tab.show(target(pages, name))
    assert tab.ask(NAMELESS) == []
    assert tab.ask("document.documentElement.lang") == "en"
    assert tab.ask("document.querySelectorAll('h1').length") == 1
    assert tab.ask("[...document.querySelectorAll('table')].filter(t => !t.caption).length") == 0
    assert tab.ask("[...document.querySelectorAll('th:not([scope])')].length") == 0
    assert (
        tab.ask(
            "[...document.querySelectorAll('svg[aria-labelledby]')].flatMap(s =>"
            " s.getAttribute('aria-labelledby').split(' ')).filter(id => !document.getElementById(id)).length"
        )
        == 0
    )
    assert (
        tab.ask(
            "(ids => ids.length - new Set(ids).size)([...document.querySelectorAll('[id]')].map(e => e.id))"
        )
        == 0
    )


def test_by_keyboard_alone_from_the_first_page_to_a_message(pages: Pages, tab: Browser):
    """Tab to what is wanted, Enter; the focus is seen at each step, and the first Tab skips what is on each page."""
    tab.show(target(pages, "fleet"))
    tab.press("Tab", 9)
    assert tab.ask("document.activeElement.className") == "skip"
    assert tab.ask("document.activeElement.getBoundingClientRect().left") >= 0
    tab.press("Enter", 13)
    assert tab.ask("document.activeElement.id") == "main"
    for wanted in ("shop/north", "orders", "queue 1", "Newest messages", "241"):
        tab.tab_to(wanted)
        tab.enter()
    assert tab.ask("location.pathname") == "/message"
    assert "241" in tab.ask("document.querySelector('h1').innerText")


def test_a_form_is_filled_in_and_sent(pages: Pages, tab: Browser):
    tab.show(target(pages, "topic"))
    tab.ask("document.querySelector('input[name=key]').focus()")
    tab.call("Input.insertText", text="key-47")
    tab.enter()
    assert tab.ask("document.querySelector('caption').innerText").endswith(
        "with the key key-47, newest first"
    )
    assert tab.ask("document.querySelectorAll('tbody tr').length") > 1
    assert tab.complaints() == []
