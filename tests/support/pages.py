"""Pages of `tiered web`: the program as a process of its own, asked over HTTP; and what a page says, parsed strictly."""

from __future__ import annotations

import contextlib
import http.client
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import TYPE_CHECKING
from urllib.parse import urlencode, urlsplit

from support.command_line import spawn

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

VOID = frozenset({"meta", "link", "input", "br", "rect", "polyline"})
"""Elements without an end of their own; of SVG those that the templates close at once."""


@dataclass
class Element:
    """An element of a page: its own text is that of all below it, spaces as one."""

    name: str
    attributes: dict[str, str]
    children: list[Element | str] = field(default_factory=list)

    def each(self, *names: str) -> Iterator[Element]:
        for child in self.children:
            if isinstance(child, Element):
                if not names or child.name in names:
                    yield child
                yield from child.each(*names)

    @property
    def text(self) -> str:
        said = (c if isinstance(c, str) else c.text for c in self.children)
        return " ".join("".join(f" {one} " if "\n" in one else one for one in said).split())

    def first(self, name: str) -> Element:
        return next(self.each(name))


class _Strict(HTMLParser):
    """Builds a tree, and refuses what a browser would have to guess."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), (tag, attrs)
        made = Element(tag, {name: value or "" for name, value in attrs})
        self.open[-1].children.append(made)
        if tag not in VOID or (tag == "rect" and not self.get_starttag_text().endswith("/>")):
            self.open.append(made)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Element(tag, {name: v or "" for name, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].name == tag, f"</{tag}> within <{self.open[-1].name}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


@dataclass
class PageAnswer:
    """An answer."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def page(self) -> Element:
        parser = _Strict()
        parser.feed(self.body.decode())
        parser.close()
        assert len(parser.open) == 1, parser.open[-1].name
        return parser.open[0]

    @property
    def text(self) -> str:
        return self.page.text

    @property
    def links(self) -> list[str]:
        return [a.attributes["href"] for a in self.page.each("a") if "href" in a.attributes]

    @property
    def facts(self) -> dict[str, str]:
        """What stands in the list of facts, by its names."""
        (one,) = self.page.each("dl")
        return {pair.first("dt").text: pair.first("dd").text for pair in one.each("div")}

    def table(self, caption: str) -> list[dict[str, str]]:
        """Rows of the table whose caption begins so, by the heads of its columns."""
        (table,) = [
            t for t in self.page.each("table") if t.first("caption").text.startswith(caption)
        ]
        heads = [cell.text for cell in table.first("thead").each("th")]
        rows = [
            [cell.text for cell in row.each("th", "td")] for row in table.first("tbody").each("tr")
        ]
        return [dict(zip(heads, row, strict=True)) for row in rows if len(row) == len(heads)]


@dataclass
class Pages:
    """A server of pages."""

    address: str

    def get(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: dict[str, str] | None = None,
        **said: object,
    ) -> PageAnswer:
        where = urlsplit(self.address)
        connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
        target = f"{path}?{urlencode(said, errors='surrogateescape')}" if said else path
        with contextlib.closing(connection):
            connection.request(method, target, headers=headers or {})
            answer = connection.getresponse()
            return PageAnswer(answer.status, answer.headers, answer.read())

    def good(self, path: str, **said: object) -> PageAnswer:
        got = self.get(path, **said)
        assert got.status == 200, got.text
        return got


@contextlib.contextmanager
def served(url: str, *options: str | Path) -> Iterator[Pages]:
    """`tiered web` while the block runs; it ends well."""
    process = spawn("web", url, "--listen", "127.0.0.1:0", *options)
    try:
        assert process.stdout is not None
        address = process.stdout.readline().decode().strip()
        assert address.startswith("http://"), process.communicate(timeout=60)
        yield Pages(address)
    finally:
        process.terminate()
        _, error = process.communicate(timeout=60)
    assert process.returncode == 0, error.decode()
    assert "Traceback" not in error.decode()


def every_page(pages: Pages, start: str = "/", most: int = 400) -> dict[str, PageAnswer]:
    """All that links lead to, so many at most, each path as often as any other."""
    found: dict[str, PageAnswer] = {}
    waiting = [start]
    while waiting and len(found) < most:
        counts: dict[str, int] = {}
        for known in found:
            counts[known.partition("?")[0]] = counts.get(known.partition("?")[0], 0) + 1
        waiting.sort(key=lambda target: counts.get(target.partition("?")[0], 0))
        target = waiting.pop(0)
        found[target] = pages.get(target)
        for one in found[target].links:
            if one.startswith("/") and one not in found and one not in waiting:
                waiting.append(one)
    return found


EVIL = "<script>alert(1)</script>\"'&<b x=`"
BODY = b'{"a": "</pre><script>alert(2)</script>"}'


def assert_harmless(got: PageAnswer) -> None:
    """Nothing on the page runs, or leads elsewhere."""
    for element in got.page.each():
        assert element.name not in {"script", "b", "img", "iframe", "style", "object"}, element
        for name, value in element.attributes.items():
            assert not name.startswith("on"), element
            assert name != "style", element
            if name in {"href", "src", "action"}:
                assert value.startswith(("/", "#", "data:,")), element
                assert not value.startswith("//")
