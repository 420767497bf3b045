"""What commands have in common that serve until they are told to stop: waiting for a lease, metrics, and how they end.

Beside that what keeps such a process a good neighbour of the broker: memory given back, and a step back behind it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.addresses import Address, listening
from tiered.cli import kinds
from tiered.cli.options import flag, option
from tiered.errors import TieredStoreError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from http.server import BaseHTTPRequestHandler

    from tiered.cli.call import Call
    from tiered.cli.signals import Stopper
    from tiered.journal.lease import LeaseState

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a command can be told that serves metrics."""

    metrics_listen: Address | None = option(
        "serve Prometheus metrics (/metrics), /healthz and, of a mount, /readyz at this address",
        kinds.ADDRESS,
        default_text="not served",
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(MetricsOptions):
    """What a command can be told that serves until it is told to stop."""

    lease_s: float = option(
        "how long the lease lasts", kinds.DURATION_S, name="lease-seconds", default=10.0
    )
    no_wait: bool = flag("end with code 4 when another process holds the lease, instead of waiting")
    drain_s: float = option(
        "when told to stop: how long to finish what is in hand",
        kinds.DURATION_S_FROM_0,
        name="drain-seconds",
        default=10.0,
    )


def open_unless_stopped(stopper: Stopper, open_it: Callable[[], T]) -> T | None:
    """What opens; None when that ended because of a signal, and so with nothing in hand."""
    try:
        return open_it()
    except TieredStoreError:
        if stopper.received is None:
            raise
        return None


def announce_lease(call: Call, what: str, lease: LeaseState) -> None:
    """Say whom we wait for; ``what`` is what the holder has."""
    left_s = max(0.0, (lease.expires_ms - call.clock.now_ms()) / 1000)
    call.say(
        f"tiered: waiting for the {what} of process {lease.holder.pid} on {lease.holder.host}"
        f" (the lease lasts {left_s:.0f} s more unless it is renewed; --no-wait ends at once)"
    )


@contextlib.contextmanager
def metrics_served(
    call: Call,
    address: Address | None,
    *,
    metrics: Callable[[], str],
    health: Callable[[], str],
    readiness: Callable[[], str] | None = None,
) -> Iterator[None]:
    """Serve metrics and health at an address while the block runs."""
    if address is None:
        yield
        return
    server = MetricsServer(address, metrics=metrics, health=health, readiness=readiness)
    shown = Address(address.host or "0.0.0.0", server.port)  # noqa: S104 (said, not bound)
    call.say(f"tiered: metrics at http://{shown}/metrics")
    try:
        yield
    finally:
        server.close()


# -- over HTTP -------------------------------------------------------------------------------------
#
# Requests are answered one at a time, so that a scraper cannot take more than one look at the local store at once.


_REQUEST_S = 10.0


class MetricsServer:
    """One address with two pages, or three."""

    def __init__(
        self,
        address: Address,
        *,
        metrics: Callable[[], str],
        health: Callable[[], str],
        readiness: Callable[[], str] | None = None,
    ) -> None:
        """Bind and serve.

        Args:
            address: Where; no host: at all of this machine's; port 0: any free one.
            health: What is wrong, in one clause; empty when nothing is.
            readiness: Why nobody should come yet, or any more; likewise. None: there is no such page.
        """
        from http.server import HTTPServer

        pages = {"/healthz": health} | ({"/readyz": readiness} if readiness else {})
        handler = _handler(metrics, pages)
        self._servers: list[HTTPServer] = []
        for listener in listening(address, "--metrics-listen"):
            server = HTTPServer(listener.getsockname(), handler, bind_and_activate=False)
            server.socket.close()
            server.socket = listener
            self._servers.append(server)
        self.port = int(self._servers[0].socket.getsockname()[1])  # that is listened at
        # Daemons: a scraper that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(
                target=server.serve_forever, args=(0.1,), name="tiered-metrics", daemon=True
            )
            for server in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving."""
        # The threads end before the sockets are closed under them.
        for server in self._servers:
            server.shutdown()
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.server_close()


def _handler(
    metrics: Callable[[], str], pages: Mapping[str, Callable[[], str]]
) -> type[BaseHTTPRequestHandler]:
    from http.server import BaseHTTPRequestHandler

    from tiered.metrics import CONTENT_TYPE

    one_at_a_time = threading.Lock()  # over all sockets

    class Handler(BaseHTTPRequestHandler):
        timeout = _REQUEST_S  # a client that says nothing must not hold the server

        def do_GET(self) -> None:
            with one_at_a_time:
                self._page()

        def _page(self) -> None:
            path = self.path.partition("?")[0]
            if path in pages:
                wrong = pages[path]()
                self._answer(503 if wrong else 200, wrong or "ok", "text/plain; charset=utf-8")
            elif path == "/metrics":
                self._metrics()
            else:
                there = " and ".join(["/metrics", *pages])
                self._answer(404, f"there are {there}", "text/plain; charset=utf-8")

        def _metrics(self) -> None:
            try:
                text = metrics()
            except Exception as error:  # noqa: BLE001 (a scrape must never end the server)
                self._answer(500, f"{type(error).__name__}: {error}", "text/plain; charset=utf-8")
            else:
                self._answer(200, text, CONTENT_TYPE)

        def _answer(self, status: int, text: str, content_type: str) -> None:
            body = text.encode()
            with contextlib.suppress(ConnectionError):
                self.send_response(status)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (the base's name)
            """Scrapes are no news."""

    return Handler


# -- a good neighbour ------------------------------------------------------------------------------


NICENESS_MAX = 19
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_ARENAS = 2
_OWN_MAPPING_BYTES = 32 << 20
"""The greatest that glibc takes; blocks of less come from the pools."""
_FREE_BYTES_MAX = 64 << 20


def bound_malloc() -> None:
    """Have glibc share few pools of memory among all threads, and use their memory again; without glibc, nothing.

    By default each thread gets a pool, which keeps what it once needed. Records are allocated by one thread and freed by
    another, so that pools grow. And blocks of a MiB come from the kernel and go back to it each time: it clears their pages
    anew, which costs more than what is copied into them. So they stay, up to 64 MiB at the end of a pool.
    Before threads are started.
    """
    import ctypes

    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_ARENA_MAX, _ARENAS)
        mallopt(_M_MMAP_THRESHOLD, _OWN_MAPPING_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _FREE_BYTES_MAX)


def step_back(niceness: int) -> None:
    """Let everybody else on this machine go first."""
    if niceness > os.getpriority(os.PRIO_PROCESS, 0):
        os.setpriority(os.PRIO_PROCESS, 0, niceness)
