"""What a newcomer sees of the API: ``dir``, ``help``, reprs, and what a notebook shows."""

from __future__ import annotations

import inspect
import pydoc
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from support.opened import Made

import tiered
from tiered.api.aio import AsyncTier
from tiered.api.notebook import ROWS_MAX, TEXT_MAX
from tiered.api.tier import Tier
from tiered.model import MessageQueue

EVIL = b"<script>alert(1)</script>&" + b"x" * 100_000


@pytest.fixture
def made() -> Made:
    made = Made()
    made.add(EVIL, b"second")
    made.add(b"other", queue=MessageQueue("<b>bold", 1))
    return made


class Shown(HTMLParser):
    """Tags and texts of a chunk of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def test_dir_and_help_show_the_api():
    assert {"open", "Tier", "Message"} <= set(dir(tiered))
    assert [name for name in dir(tiered) if not name.startswith("__")] == tiered.__all__
    text = pydoc.plain(pydoc.render_doc(tiered))
    for line in ("class Tier(", "class Message(", "open(url: ", "read_topic_arrow(self, topic"):
        assert line in text, line


def test_dir_loads_nothing():
    code = "import sys, tiered; dir(tiered); assert 'tiered.api' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_of_a_tier_is_a_method_that_says_what_it_does(made: Made):
    with made.open() as tier:
        public = {name for name in dir(tier) if not name.startswith("_")}
    assert public == {name for name in vars(Tier) if not name.startswith("_")}
    for name in public:
        assert inspect.isfunction(vars(Tier)[name]), name
        assert inspect.getdoc(vars(Tier)[name]), name


def test_reprs_are_short_and_say_which(made: Made):
    with made.open() as tier:
        assert repr(tier) == f"<Tier {made.url} c/b: 2 topics, 2 queues>"
        assert repr(AsyncTier(tier)).startswith(f"<AsyncTier {made.url} c/b")
        (batch,) = tier.read_records("orders", 0)
        assert repr(batch).startswith("<TierBatch orders/0@[0, 2) 100")
        assert repr(next(tier.read("orders", 0))) == "<Message orders/0@0>"


def test_what_a_notebook_shows_is_small_and_escaped(made: Made):
    with made.open() as tier:
        tier_html, topics = tier._repr_html_(), tier.topics()
        assert topics == ["<b>bold", "orders"]
        shown = [tier_html, topics._repr_html_(), AsyncTier(tier)._repr_html_()]
        shown.append(next(tier.read("orders", 0))._repr_html_())
    for html in shown:
        assert len(html) < 2000
        assert Shown(html).tags <= {
            "table", "caption", "br", "thead", "tbody", "tr", "th", "td"
        }  # fmt: skip
    assert "<b>bold" in Shown(tier_html).texts
    body = next(text for text in Shown(shown[-1]).texts if "script" in text)
    assert body == EVIL.decode()[:TEXT_MAX] + "…"


def test_a_notebook_is_not_flooded_with_topics():
    made = Made()
    for number in range(ROWS_MAX + 5):
        made.add(b"x", queue=MessageQueue(f"topic-{number:02}", 0))
    with made.open() as tier:
        texts = Shown(tier._repr_html_()).texts
    assert "… and 5 more" in texts
    assert sum(text.startswith("topic-") for text in texts) == ROWS_MAX
