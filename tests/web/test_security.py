"""Who is let in, what is refused, and that nothing that a tier holds becomes markup."""

from __future__ import annotations

import base64
import json
import socket
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from support.command_line import attach, here, program
from support.pages import BODY, EVIL, assert_harmless, every_page, served
from support.tiers import TierBuilder
from support.waiting import until

from backends.local import LocalFolderStore
from tiered.addresses import Address
from tiered.api.broker_place import Place
from tiered.clock import ManualClock
from tiered.model import MessageQueue
from tiered.web.server import CONNECTIONS_MAX, REQUEST_S, Admission, PageServer

if TYPE_CHECKING:
    from pathlib import Path

    from support.pages import PageAnswer, Pages


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:1", 200),
        ("[::1]:8321", 200),
        ("localhost:8321", 200),
        ("LOCALHOST", 200),
        (socket.gethostname(), 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("127.0.0.1.evil.example", 421),
        ("evil.example:127.0.0.1", 421),
        ("", 421),
        ("[::1", 421),
        ("@", 421),
    ],
)
def test_a_name_of_somebody_else_is_refused(pages: Pages, host: str, status: int):
    got = pages.get("/", headers={"Host": host})
    assert got.status == status
    assert ("shop/north" in got.text) == (status == 200)
    assert ("file://" in got.text) == (status == 200)


def raw(pages: Pages, request: bytes) -> bytes:
    where = urlsplit(pages.address)
    with closing(socket.create_connection((where.hostname, where.port), 60)) as one:
        one.sendall(request)
        found = b""
        while chunk := one.recv(1 << 16):
            found += chunk
    return found


@pytest.mark.parametrize("heads", [b"", b"Host: localhost\r\nHost: evil.example\r\n"])
def test_no_host_and_two_hosts_are_refused(pages: Pages, heads: bytes):
    assert b" 421 " in raw(pages, b"GET / HTTP/1.1\r\n" + heads + b"\r\n").splitlines()[0]


def test_a_further_name_is_let_in(shown_tier: str):
    with served(shown_tier, "--allow-host", "tiers.example") as found:
        assert found.get("/", headers={"Host": "tiers.example"}).status == 200
        assert found.get("/", headers={"Host": "other.example"}).status == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "FOO"])
def test_only_reading_is_answered(pages: Pages, method: str):
    got = pages.get("/", method=method)
    assert got.status == 405
    assert got.headers["Allow"] == "GET, HEAD"


def test_a_head_has_no_body(pages: Pages):
    got = pages.get("/doctor", method="HEAD")
    assert (got.status, got.body) == (200, b"")
    assert int(got.headers["Content-Length"]) > 500


@pytest.mark.parametrize("path", ["/", "/nothing", "/broker", "/static/style.css"])
def test_every_answer_bears_the_headers(pages: Pages, path: str):
    headers = pages.get(path).headers
    policy = dict(
        one.strip().split(" ", 1) for one in headers["Content-Security-Policy"].split(";")
    )
    assert policy["default-src"] == "'none'"
    assert policy["frame-ancestors"] == policy["base-uri"] == "'none'"
    assert "script-src" not in policy
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert ("no-store" in headers["Cache-Control"]) == (path != "/static/style.css")
    assert "Python" not in headers["Server"]


@pytest.mark.parametrize(
    "path",
    [
        "/static/../style.css",
        "/static/../../pages.py",
        "/static/%2e%2e/%2e%2e/pages.py",
        "/static//etc/passwd",
        "//etc/passwd",
        "/templates/base.html",
        "/static/",
        "/broker/",
        "/?page=1/../../x",
    ],
)
def test_no_path_leads_elsewhere(pages: Pages, path: str):
    got = pages.get(path)
    assert got.status in {400, 404}
    assert b"root:" not in got.body
    assert b"import" not in got.body


def test_what_is_too_much_is_refused(pages: Pages):
    assert pages.get("/?" + "a=1&" * 100).status == 400
    assert pages.get("/?find=" + "x" * 20_000).status == 400
    assert b" 414 " in raw(pages, b"GET /" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n").splitlines()[0]


# -- tokens ----------------------------------------------------------------------------------------


def test_beyond_this_machine_a_token_is_asked_for(shown_tier: str):
    with served(shown_tier, "--listen", "0.0.0.0:0") as found:
        where = urlsplit(found.address)
        token = where.query.removeprefix("token=")
        assert len(token) >= 43
        found.address = f"http://127.0.0.1:{where.port}/"
        for path in ("/", "/static/style.css", "/doctor"):
            got = found.get(path)
            assert got.status == 401
            assert "shop" not in got.text
            assert "/tier" not in got.text
        wrong = {"Authorization": f"Bearer {token[:-1]}x"}
        assert found.get("/", headers=wrong).status == 401
        assert found.get("/", token=token[:-1]).status == 401
        assert found.get("/", headers={"Authorization": f"Bearer {token}"}).status == 200
        assert found.get("/", headers={"Authorization": f"Basic {token}"}).status == 401

        got = found.get("/broker", token=token, cluster="shop", broker="north")
        assert got.status == 303
        assert got.headers["Location"] == "/broker?cluster=shop&broker=north"
        cookie, *said = [one.strip() for one in got.headers["Set-Cookie"].split(";")]
        assert {"HttpOnly", "SameSite=Strict", "Path=/"} <= set(said)
        assert found.get("/", headers={"Cookie": cookie}).status == 200
        assert found.get("/", headers={"Cookie": f"a=b; {cookie}; c"}).status == 200
        assert found.get("/", headers={"Cookie": cookie[:-1]}).status == 401
        assert found.get("/", headers={"Cookie": cookie, "Host": "evil.example"}).status == 421


def test_who_has_the_token_is_led_nowhere_else(shown_tier: str, tmp_path: Path):
    file = tmp_path / "token"
    file.write_text("0123456789abcdef0123\n")
    with served(shown_tier, "--token-file", file) as found:
        assert found.address.endswith("/?token=0123456789abcdef0123")
        where = urlsplit(found.address)
        found.address = f"http://{where.netloc}/"
        assert found.get("/").status == 401
        for path in ("//evil.example/x", "/\\evil.example", "/%0d%0aX:%20y"):
            got = found.get(path, token="0123456789abcdef0123")
            assert got.headers["Location"] in {"/", None}


@pytest.mark.parametrize("text", ["short", "0123456789 0123456789", "0123456789abcdeü0123"])
def test_a_token_that_is_none_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "token"
    file.write_text(text)
    ran = program("web", f"file://{tmp_path}", "--token-file", file)
    assert ran.code == 2
    assert "openssl rand" in ran.error
    assert text not in ran.error


# -- limits ----------------------------------------------------------------------------------------


class _Maker:
    """Answers nothing."""


def test_who_says_nothing_is_cut_off_and_beyond_the_limit_nobody_waits():
    clock = ManualClock()
    server = PageServer(Address("127.0.0.1", 0), _Maker(), Admission(frozenset()), clock)
    with ExitStack() as opened:
        opened.callback(server.close)

        def connect() -> socket.socket:
            made = socket.create_connection(("127.0.0.1", server.port), 60)
            opened.callback(made.close)
            return made

        idle = [connect() for _ in range(CONNECTIONS_MAX)]
        idle[0].sendall(b"GET / HT")
        assert connect().recv(100).startswith(b"HTTP/1.0 503 ")
        clock.advance(REQUEST_S - 1)
        assert connect().recv(100).startswith(b"HTTP/1.0 503 ")
        clock.advance(2)
        assert [one.recv(100) for one in idle] == [b""] * CONNECTIONS_MAX

        def is_room() -> bool:
            with closing(connect()) as one:
                one.settimeout(0.3)
                try:
                    return not one.recv(100)
                except TimeoutError:
                    return True

        until(is_room)


# -- markup ----------------------------------------------------------------------------------------


def test_names_that_are_markup_stay_names(tmp_path: Path):
    place = Place(f"c{EVIL}", f"b{EVIL}")
    builder = TierBuilder(LocalFolderStore(tmp_path), prefix=place.prefix)
    topic = MessageQueue(f"t{EVIL}", 0)
    builder.add([b"one", BODY, None, b"three"], queue=topic)
    builder.gap(3, queue=topic)
    builder.add([b"four"], queue=topic)
    with served(f"file://{tmp_path}", "--bodies") as pages:
        found = every_page(pages, most=60)
    texts = [got.text for got in found.values()]
    assert {target.partition("?")[0] for target in found} >= {"/queue", "/messages", "/message"}
    for target, got in found.items():
        assert got.status == 200, (target, got.text)
        if not target.startswith("/static"):
            assert_harmless(got)
    assert any(f"t{EVIL}" in text for text in texts)
    assert any("alert(2)" in text for text in texts)


def test_keys_tags_and_bodies_that_are_markup_stay_text(tmp_path: Path):
    lines = tmp_path / "lines"
    row = {
        "topic": "orders",
        "queue_id": 0,
        "tags": "<b>tag</b>",
        "keys": "<img/src=x/onerror=alert(3)>",
        "properties": {"<i>": "</td><script>x</script>\u202e\x1b[31m"},
        "body_base64": base64.b64encode(BODY + b"\xff\x00").decode(),
    }
    lines.write_text(json.dumps(row) + "\n")
    here("store", "create", tmp_path / "store").good()
    here("store", "put", tmp_path / "store", lines).good()
    url = attach(tmp_path / "store", tmp_path / "tier", "--cluster", "c", "--broker", "b")
    with served(url, "--bodies") as pages:
        found = every_page(pages)
        said = {"topic": "orders", "cluster": "c", "broker": "b"}
        asked = [
            pages.get("/messages", key="<img/src=x/onerror=alert(3)>", **said),
            pages.get("/messages", queue=0, tag="<b>tag</b>", **said),
            pages.get("/messages", queue=0, offset="<script>", **said),
            pages.get("/messages", queue=0, time='"><script>', **said),
            pages.get("/broker", find='"><script>alert(4)</script>', **said),
            pages.get("/<script>alert(5)</script>"),
            pages.get("/broker", cluster="<script>", broker='"onload="x'),
        ]
    for got in [*found.values(), *asked]:
        if got.headers["Content-Type"].startswith("text/html"):
            assert_harmless(got)
            assert "\x1b" not in got.body.decode()
            assert "\u202e" not in got.body.decode()
    assert "<img/src=x/onerror=alert(3)>" in asked[0].text
    message = pages_text(found, "/message?")
    assert "7b 22 61 22" in message  # bytes that are no text, as numbers
    assert "<b>tag</b>" in message


def pages_text(found: dict[str, PageAnswer], start: str) -> str:
    return " ".join(got.text for target, got in found.items() if target.startswith(start))
