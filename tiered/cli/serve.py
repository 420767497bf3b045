"""What commands have in common that serve until they are told to stop: waiting for a lease, metrics, and how they end.

Beside that what keeps such a process a good neighbour of the broker: memory given back, and a step back behind it.
"""

from __future__ import annotations

import contextlib
import threading
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from backends.lazy_dataclass import dataclass
from tiered.addresses import Address, Servers
from tiered.cli import kinds
from tiered.cli.options import flag, option
from tiered.errors import TieredStoreError
from tiered.metrics import Exposition, Sample

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from http.server import BaseHTTPRequestHandler

    from backends.wrapping import MeteredStore
    from tiered.cli.call import Call
    from tiered.cli.signals import Stopper
    from tiered.journal.lease import LeaseState
    from tiered.metrics import Metric

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MetricsOptions:
    """What a command can be told that serves metrics."""

    metrics_listen: Address | None = option(
        "serve metrics (/metrics) and health (/livez, /readyz, /healthz) here",
        kinds.ADDRESS,
    )


@dataclass(frozen=True, kw_only=True)
class ServingOptions(MetricsOptions):
    """What a command can be told that serves until it is told to stop."""

    lease_s: float = option(
        "duration of the lease", kinds.DURATION_S, name="lease-seconds", default=10.0
    )
    no_wait: bool = flag("exit with code 4 if another process holds the lease")
    drain_s: float = option(
        "time to finish work after a stop signal",
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


def announce_lease(call: Call, what: str, shown: Shown | None, lease: LeaseState) -> None:
    """Say whom we wait for; ``what`` is what the holder has."""
    if shown is not None:
        shown.waits(f"it waits for the {what} of process {lease.holder.pid} on {lease.holder.host}")
    left_s = max(0.0, (lease.expires_ms - call.clock.now_ms()) / 1000)
    call.say(
        f"tiered: waiting for the {what} of process {lease.holder.pid} on {lease.holder.host}"
        f" (the lease lasts {left_s:.0f} s more unless it is renewed; --no-wait ends at once)"
    )


class Watched(Protocol):
    """What a serving command shows of itself: each from any thread, and in one clause; empty: nothing."""

    def samples(self) -> Iterable[Sample]:
        """What it measures, as of now."""
        ...

    def fault(self) -> str:
        """What is wrong, be it here or with what it needs."""
        ...

    def unready(self) -> str:
        """Why it does not do its work, yet or any more."""
        ...

    def stuck(self) -> str:
        """Why only a new start can help: it stands still, and waits for nothing that has a name."""
        ...


class Opening:
    """Shown until there is something else: opening may take as long as another process holds the lease."""

    def __init__(self, up: str) -> None:
        """``up``: the metric that is 0 meanwhile."""
        self._up = up
        self.waits_for = "it is being opened"

    def samples(self) -> Iterable[Sample]:
        return [Sample(self._up, 0)]

    def fault(self) -> str:
        return self.waits_for

    def unready(self) -> str:
        return self.waits_for

    def stuck(self) -> str:
        return ""


class Shown:
    """What is shown at an address: at first that something is being opened, then what is open."""

    def __init__(self, table: Iterable[Metric], up: str) -> None:
        """Nothing is open; ``up``: the metric that is 0 until something is."""
        self._opening = Opening(up)
        self._watched: Watched = self._opening
        self._more: Callable[[], Iterable[Sample]] = tuple
        self.exposition = Exposition(table, lambda: [*self._watched.samples(), *self._more()])

    def waits(self, what: str) -> None:
        """Name what opening waits for."""
        self._opening.waits_for = what

    def watch(
        self,
        watched: Watched,
        meter: MeteredStore | None = None,
        more: Callable[[], Iterable[Sample]] = tuple,
    ) -> None:
        """Show this from now on, and how long requests to a store take; ``more``: what else is measured."""
        self._watched, self._more = watched, more
        if meter is not None:
            self.time_requests(meter)

    def time_requests(self, meter: MeteredStore, **labels: str) -> None:
        """Measure how long requests to a store take."""
        timing = self.exposition.timing
        meter.timing = lambda kind: timing("tiered_request_seconds", kind=kind, **labels)

    def pages(self) -> Mapping[str, Callable[[], tuple[bool, str]]]:
        """Each page: whether all is well, and what there is to say."""

        def well(wrong: str) -> tuple[bool, str]:
            return not wrong, wrong or "ok"

        def lives() -> tuple[bool, str]:
            stuck = self._watched.stuck()
            return not stuck, stuck or self._watched.fault() or "ok"

        return {
            "/healthz": lambda: well(self._watched.fault()),
            "/livez": lives,
            "/readyz": lambda: well(self._watched.unready()),
        }


@contextlib.contextmanager
def metrics_served(
    call: Call, address: Address | None, table: Iterable[Metric], up: str
) -> Iterator[Shown | None]:
    """Serve metrics and health at an address while the block runs; None: nobody asked for them.

    Args:
        up: The metric of the table that is 0 until there is something to watch.
    """
    if address is None:
        yield None
        return
    shown = Shown(table, up)
    server = MetricsServer(address, shown.exposition.text, shown.pages())
    told = Address(address.host or "0.0.0.0", server.port)  # noqa: S104 (said, not bound)
    call.say(f"tiered: metrics at http://{told}/metrics")
    try:
        yield shown
    finally:
        server.close()


# -- over HTTP -------------------------------------------------------------------------------------
#
# Requests are answered one at a time, so that a scraper cannot take more than one look at the local store at once.


_REQUEST_S = 10.0


class MetricsServer(Servers):
    """One address with ``/metrics`` and pages of health."""

    def __init__(
        self,
        address: Address,
        metrics: Callable[[], str],
        pages: Mapping[str, Callable[[], tuple[bool, str]]],
    ) -> None:
        """Bind and serve.

        Args:
            address: Where; no host: at all of this machine's; port 0: any free one.
            pages: By path: whether all is well (200, else 503), and the text.
        """
        from http.server import HTTPServer

        handler = _handler(metrics, pages)
        super().__init__(
            *(address, "--metrics-listen", "tiered-metrics"),
            partial(HTTPServer, RequestHandlerClass=handler, bind_and_activate=False),
        )


def _handler(
    metrics: Callable[[], str], pages: Mapping[str, Callable[[], tuple[bool, str]]]
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
                is_well, said = pages[path]()
                self._answer(200 if is_well else 503, said, "text/plain; charset=utf-8")
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
