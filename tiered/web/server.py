"""Serves the pages over HTTP/1.0, by the standard library: a thread a connection, and limits on all of it.

Who may ask: the header ``Host`` must name this server, so that no other site's name leads a browser here (DNS rebinding);
and with a token, who has it. Only GET and HEAD are answered, and nothing is changed by any request.

Limits: ``CONNECTIONS_MAX`` at once (beyond, 503 at once), ``REQUEST_S`` for a connection from its first byte to its last,
``TARGET_BYTES_MAX`` of an address; request bodies are never read.

Errors: a ``TieredStoreError`` becomes a page that says what, where and what to do; a defect one that says so, and is logged.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import logging
import socket
import threading
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import resources
from typing import TYPE_CHECKING, Any, ClassVar, Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from backends.errors import BackendError
from backends.lazy_dataclass import dataclass
from tiered.addresses import Servers
from tiered.api.arrow import load_library
from tiered.api.stores import backend_errors
from tiered.errors import InvalidError, StoreUnavailableError, TieredStoreError
from tiered.web.pages import PAGES, Page, PageQuery

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tiered.addresses import Address
    from tiered.clock import Clock
    from tiered.web.pages import PageSources

CONNECTIONS_MAX: Final = 32
REQUEST_S: Final = 30.0
TARGET_BYTES_MAX: Final = 16 << 10
_FIELDS_MAX: Final = 20
_COOKIE: Final = "tiered-web"
_LOG: Final = logging.getLogger("tiered.web")
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'self'; img-src 'self' data:;"
    " form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
}
_STATIC: Final = {"/static/style.css": ("style.css", "text/css; charset=utf-8")}


@dataclass(frozen=True, slots=True)
class Admission:
    """Who may ask."""

    hosts: frozenset[str]  # names that ``Host`` may bear, in small letters; addresses always may
    token: str = ""  # without which nothing is shown; empty: everybody who reaches us may ask

    def knows(self, host: str) -> bool:
        """Whether a ``Host`` is ours. An address cannot be another site's name."""
        name = urlsplit(f"//{host}").hostname or ""
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return name.lower().rstrip(".") in self.hosts
        return True

    def admits(self, said: str) -> bool:
        """Whether a token is the right one; takes the same time for every wrong one."""
        return hmac.compare_digest(
            hashlib.sha256(said.encode("utf-8", "replace")).digest(),
            hashlib.sha256(self.token.encode()).digest(),
        )


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back."""

    status: HTTPStatus
    body: bytes
    kind: str = "text/html; charset=utf-8"
    headers: Mapping[str, str] | None = None


def link(path: str, **said: object) -> str:
    """The address of a page; what is None is left out."""
    fields = {name: str(value) for name, value in said.items() if value is not None}
    return f"{path}?{urlencode(fields, errors='surrogateescape')}" if fields else path


class PageMaker:
    """Pages and files by their paths. For any thread."""

    def __init__(self, sources: PageSources, forms: Mapping[str, Callable[..., str]]) -> None:
        """Load the templates.

        Args:
            forms: How values are shown, by name; ``shown`` of them is for all that a template does not form itself.
        """
        jinja = load_library("jinja2", "the pages need Jinja2", "web")
        shown, markup = (
            forms["shown"],
            load_library("markupsafe", "the pages need Jinja2", "web").Markup,
        )
        self._sources = sources
        self._environment = jinja.Environment(
            loader=jinja.PackageLoader("tiered.web"),
            autoescape=True,
            undefined=jinja.StrictUndefined,
            auto_reload=False,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=lambda value: value if isinstance(value, markup) else shown(value),
        )
        self._environment.filters.update(forms)
        self._environment.globals.update(link=link, url=sources.url)
        folder = resources.files("tiered.web") / "static"
        self._static = {path: (folder / name).read_bytes() for path, (name, _) in _STATIC.items()}

    def answer(self, path: str, fields: Mapping[str, str]) -> Answer:
        """What is at an address."""
        if path in self._static:
            cached = {"Cache-Control": "max-age=3600"}
            return Answer(HTTPStatus.OK, self._static[path], _STATIC[path][1], cached)
        make = PAGES.get(path)
        if make is None:
            error = InvalidError(f"there is no page {path}", do="begin at the first page")
            return self.failed(error, HTTPStatus.NOT_FOUND, PageQuery({}))
        try:
            with backend_errors():
                return self._rendered(make(self._sources, PageQuery(fields)), HTTPStatus.OK)
        except TieredStoreError as error:
            return self.failed(error, _status_of(error), PageQuery(fields))
        except (OSError, BackendError) as error:
            away = StoreUnavailableError(str(error))
            return self.failed(away, HTTPStatus.BAD_GATEWAY, PageQuery(fields))

    def failed(
        self, error: TieredStoreError, status: HTTPStatus, query: PageQuery | None = None
    ) -> Answer:
        """A page that says what is wrong, where, and what to do.

        Args:
            query: What was asked; None: by somebody who was not let in, and learns nothing of the tier.
        """
        names: dict[str, Any] = {"error": error}
        if query is None:
            names["url"] = ""
        elif {"cluster", "broker"} <= set(query.values):
            names["place"] = {name: query.values[name] for name in ("cluster", "broker")}
        return self._rendered(Page("error.html", "Cannot be shown", names), status)

    def _rendered(self, page: Page, status: HTTPStatus) -> Answer:
        template = self._environment.get_template(page.template)
        text = template.render({"place": None, "trouble": None, "looked_ms": None, **page.names},
                               title=page.title)  # fmt: skip
        # Names of topics may hold bytes that are no text.
        return Answer(status, text.encode("utf-8", "replace"))


def _status_of(error: TieredStoreError) -> HTTPStatus:
    if isinstance(error, InvalidError):
        return HTTPStatus.BAD_REQUEST
    is_away = isinstance(error, StoreUnavailableError)
    return HTTPStatus.BAD_GATEWAY if is_away else HTTPStatus.INTERNAL_SERVER_ERROR


class PageServer(Servers):
    """Listens, and answers until it is closed."""

    def __init__(
        self, address: Address, maker: PageMaker, admission: Admission, clock: Clock
    ) -> None:
        """Bind and serve; no host: at all of this machine's addresses; port 0: any free one."""
        known = {"maker": maker, "admission": admission}
        handler = type("BoundHandler", (PageHandler,), known)
        room = threading.BoundedSemaphore(CONNECTIONS_MAX)
        super().__init__(
            *(address, "--listen", "tiered-web"),
            partial(_Listener, handler=handler, room=room, clock=clock),
        )


class _Listener(ThreadingHTTPServer):
    """One socket; its connections share a limit with the others'."""

    daemon_threads = True
    block_on_close = False

    def __init__(
        self,
        name: Any,  # noqa: ANN401 (of a socket)
        handler: type[BaseHTTPRequestHandler],
        room: threading.BoundedSemaphore,
        clock: Clock,
    ) -> None:
        super().__init__(name, handler, bind_and_activate=False)
        self._room = room
        self._clock = clock
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, float] = {}  # when each is cut off

    def process_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 (the base's)
        if not self._room.acquire(blocking=False):
            request.settimeout(1.0)
            with contextlib.suppress(OSError):
                request.sendall(b"HTTP/1.0 503 Service Unavailable\r\nRetry-After: 1\r\n\r\n")
            super().shutdown_request(request)
            return
        with self._lock:
            self._ends[request] = self._clock.monotonic_s() + REQUEST_S
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:  # noqa: ANN401 (the base's)
        with self._lock:
            known = self._ends.pop(request, None)
        if known is not None:
            self._room.release()
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close connections that are over their time; called a few times a second."""
        now_s = self._clock.monotonic_s()
        self.cut_off(lambda end_s: end_s <= now_s)

    def server_close(self) -> None:
        """Cut off what is under way, and listen no more."""
        self.cut_off()
        super().server_close()

    def cut_off(self, chosen: Callable[[float], bool] = lambda _end_s: True) -> None:
        """End connections; their threads then meet an error."""
        with self._lock:
            late = [one for one, end_s in self._ends.items() if chosen(end_s)]
        for one in late:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401, ARG002 (the base's)
        """A client that went away is no news."""
        _LOG.debug("a connection of %s ended with an error", client_address, exc_info=True)


class PageHandler(BaseHTTPRequestHandler):
    """Answers one request."""

    maker: ClassVar[PageMaker]
    admission: ClassVar[Admission]
    timeout = 10.0
    server_version = "tiered"
    sys_version = ""

    def do_GET(self) -> None:
        """Answer; to HEAD without the body."""
        self._send(self._answered())

    do_HEAD = do_GET  # noqa: N815 (the base's name)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 (do_POST and all others)
        if name.startswith("do_"):
            return self._refuse_method
        raise AttributeError(name)

    def _refuse_method(self) -> None:
        said = InvalidError("pages are only read", do="ask with GET")
        answer = self.maker.failed(said, HTTPStatus.METHOD_NOT_ALLOWED)
        self._send(Answer(answer.status, answer.body, headers={"Allow": "GET, HEAD"}))

    def _answered(self) -> Answer:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not _knows(self.admission, hosts[0]):
            said = InvalidError(
                "this name is not one of this server",
                do="ask by its address, or give --allow-host",
            )
            return self.maker.failed(said, HTTPStatus.MISDIRECTED_REQUEST)
        try:
            path, fields = _split(self.path)
        except InvalidError as error:
            return self.maker.failed(error, HTTPStatus.BAD_REQUEST)
        if self.admission.token:
            given = fields.pop("token", None)
            if given is not None and self.admission.admits(given):
                return self._welcomed(path, fields)
            if not any(map(self.admission.admits, self._tokens())):
                return self._unknown()
        try:
            return self.maker.answer(path, fields)
        except Exception:  # noqa: BLE001 (a page must never end the server)
            _LOG.exception("a page could not be made: %s", path)
            said = InvalidError("a defect of ours", do="see the log, and report it")
            return self.maker.failed(said, HTTPStatus.INTERNAL_SERVER_ERROR)

    def _tokens(self) -> list[str]:
        """That the request bears, in a header or a cookie."""
        scheme, _, value = self.headers.get("Authorization", "").partition(" ")
        found = [value.strip()] if scheme.lower() == "bearer" else []
        # By hand: one odd cookie of another program on this machine would hide ours from the library.
        for cookie in self.headers.get("Cookie", "").split(";"):
            name, _, value = cookie.strip().partition("=")
            found += [value] if name == self._cookie_name else []
        return found

    @property
    def _cookie_name(self) -> str:
        """Cookies do not tell ports apart, and two of us may run."""
        return f"{_COOKIE}-{self.connection.getsockname()[1]}"

    def _welcomed(self, path: str, fields: Mapping[str, str]) -> Answer:
        """The token moves into a cookie, and out of the address."""
        headers = {
            "Location": link(path if path in PAGES else "/", **fields),
            "Set-Cookie": f"{self._cookie_name}={self.admission.token}; Path=/; HttpOnly; SameSite=Strict",
        }
        return Answer(HTTPStatus.SEE_OTHER, b"", headers=headers)

    def _unknown(self) -> Answer:
        said = InvalidError(
            "this page is shown to those who have its token",
            do="open the address that `tiered web` printed, with its token",
        )
        answer = self.maker.failed(said, HTTPStatus.UNAUTHORIZED)
        headers = {"WWW-Authenticate": 'Bearer realm="tiered web"'}
        return Answer(answer.status, answer.body, headers=headers)

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        headers = {**_HEADERS, "Cache-Control": "no-store", **(answer.headers or {})}
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Type", answer.kind)
        self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
        """Requests are no news; and addresses may bear a token."""


def _knows(admission: Admission, host: str) -> bool:
    try:
        return admission.knows(host)
    except ValueError:  # brackets that do not close
        return False


def _split(target: str) -> tuple[str, dict[str, str]]:
    """Path and fields of an address; of a field that comes twice the last."""
    if len(target) > TARGET_BYTES_MAX or not target.startswith("/"):
        raise InvalidError("this address is too long, or no path", do="begin at the first page")
    path, _, rest = target.partition("?")
    try:
        pairs = parse_qsl(
            rest, keep_blank_values=True, max_num_fields=_FIELDS_MAX, errors="surrogateescape"
        )
    except ValueError as error:
        raise InvalidError(f"this address has too many fields: {error}") from error
    return path, dict(pairs)
