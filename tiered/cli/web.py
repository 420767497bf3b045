"""``tiered web``: pages in a browser that show a tier. Read-only."""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
from dataclasses import replace
from typing import TYPE_CHECKING

from backends.lazy_dataclass import dataclass
from tiered.addresses import Address
from tiered.cli import kinds
from tiered.cli.exits import DONE
from tiered.cli.frame import command
from tiered.cli.options import argument, flag, option, several
from tiered.cli.output import show
from tiered.cli.signals import Stopper
from tiered.cli.values import (
    counted,
    format_duration,
    format_size,
    format_time,
    parse_time,
    printable,
)
from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from backends.base import ObjectStore
    from backends.s3_settings import S3Options
    from tiered.api.stores import OpenStore
    from tiered.cli.call import Call
    from tiered.upkeep.doctor import Check
    from tiered.web.pages import PageSources
    from tiered.web.server import Admission
    from tiered.web.watch import ArchiveWatch

GIVE_UP_S = 8.0
"""How long a request to the store is tried: somebody waits for the page."""
TOKEN_CHARS_MIN = 16


@dataclass(frozen=True, kw_only=True)
class WebOptions:
    """What ``tiered web`` can be told."""

    url: str = argument()
    listen: Address = option(
        "address of the pages; :PORT: all interfaces; port 0: any free one",
        kinds.ADDRESS,
        default=Address("127.0.0.1", 8321),
    )
    token_file: str | None = option(
        "file with the access token",
        kinds.FILE,
        default_text="a random one, printed; none at a loopback address",
    )
    allow_host: tuple[str, ...] = several(
        "further host names, as of a proxy",
        kinds.Kind("NAME,...", str),
        default_text="this machine's",
    )
    bodies: bool = flag("show message bodies")
    store: str | None = option(
        "the broker's store directory", kinds.DIR, default_text="none: lag unknown"
    )
    archive: str | None = option("the tier's archive, shown too", kinds.URL)
    refresh_s: float = option(
        "how often open pages are updated; two requests a broker",
        kinds.DURATION_S,
        default=5.0,
    )


@command("web", WebOptions)
def run(call: Call, options: WebOptions) -> int:
    """Shows a tier as pages in a browser, read-only.

    Examples:
        tiered web file:///tmp/tier --listen 127.0.0.1:8321
        tiered web s3://bucket/prefix --listen :8321 --store /data/rocketmq/store
    """
    from tiered.web.server import PageMaker, PageServer

    admission = admission_of(options)
    stop = threading.Event()
    with Stopper(call.watch, stop.set, seconds=1.0):
        maker = PageMaker(sources_of(call, options), forms(call))
        server = PageServer(options.listen, maker, admission, call.clock)
        try:
            address = address_of(options.listen, server.port, admission.token)
            show(call, {"format": 1, "url": options.url, "address": address}, lines=[address])
            call.stdout.flush()
            call.say("tiered: read-only pages at this address until it is told to stop")
            stop.wait()
        finally:
            server.close()
    return DONE


def address_of(listen: Address, port: int, token: str) -> str:
    """What to open in a browser."""
    host = listen.host or socket.gethostname()
    return f"http://{Address(host, port)}/" + (f"?token={token}" if token else "")


def admission_of(options: WebOptions) -> Admission:
    """Who may ask, as the options say."""
    from tiered.web.server import Admission

    token = _token(options)
    names = {"localhost", socket.gethostname(), options.listen.host, *options.allow_host}
    return Admission(frozenset(name.lower() for name in names if name), token)


def _token(options: WebOptions) -> str:
    if options.token_file is None:
        return "" if is_loopback(options.listen.host) else secrets.token_urlsafe(32)
    from backends.local_files import read_regular

    try:
        token = read_regular(options.token_file).decode().strip()
    except (OSError, ValueError) as error:
        raise InvalidError(
            f"it cannot be read: {error}", where=options.token_file, do="check --token-file"
        ) from error
    if (
        len(token) < TOKEN_CHARS_MIN
        or not token.isascii()
        or not all(c.isalnum() or c in "-_" for c in token)
    ):
        raise InvalidError(
            f"a token has at least {TOKEN_CHARS_MIN} letters, digits, - or _, and this one has other signs or fewer",
            where=options.token_file,
            do="make one with `openssl rand -hex 32`",
        )
    return token


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def forms(call: Call) -> Mapping[str, Callable[..., str]]:
    """How pages show values: as the command line does."""
    return {
        "shown": printable,
        "counted": counted,
        "size": lambda size: "-" if size is None else format_size(size),
        "time": lambda ms: "-" if ms is None else format_time(ms),
        "ago": lambda ms: "-" if ms is None else f"{ago(call.clock.now_ms() - ms)} ago",
        "dollars": lambda amount: "-" if amount is None else dollars(amount),
    }


def dollars(amount: float) -> str:
    """An amount; of less than a cent four digits."""
    return f"${amount:,.4f}" if 0 < amount < 0.01 else f"${amount:,.2f}"  # noqa: PLR2004 (a cent)


def ago(duration_ms: int) -> str:
    """A duration to look at: two units of it."""
    unit_ms = next((ms for ms in (86_400_000, 3_600_000, 60_000) if duration_ms >= 24 * ms), 1000)
    return format_duration(max(duration_ms, 0) // unit_ms * unit_ms)


def sources_of(call: Call, options: WebOptions) -> PageSources:
    """What pages are made of; it is closed when the command ends."""
    from tiered.web.pages import PageSources
    from tiered.web.watch import TierWatch

    store = _opened(call, options.url).store
    watch = TierWatch(
        store,
        call.clock,
        cluster=call.common.cluster,
        broker=call.common.broker,
        local=call.local(options.store) if options.store else None,
        refresh_s=options.refresh_s,
    )
    call.opened.callback(watch.close)
    return PageSources(
        store.url,
        watch,
        call.clock,
        parse_time,
        format_time,
        lambda: examined(call, options, store),
        _archive(call, options),
        options.bodies,
    )


def _opened(call: Call, url: str) -> OpenStore:
    """A store whose requests end while somebody still waits for the page."""
    from tiered.api.stores import open_for_reading

    found = open_for_reading(url, _s3_options(call), call.clock, give_up_s=GIVE_UP_S)
    call.opened.callback(found.close)
    return found


def _s3_options(call: Call) -> S3Options:
    options = call.s3_options()
    return replace(options, timeout_s=min(options.timeout_s, GIVE_UP_S))


def _archive(call: Call, options: WebOptions) -> ArchiveWatch | None:
    if options.archive is None:
        return None
    from tiered.web.watch import ArchiveWatch

    return ArchiveWatch(_opened(call, options.archive), call.clock)


def examined(call: Call, options: WebOptions, store: ObjectStore) -> Iterator[Check]:
    """What doctor says of the URL, without writing."""
    from tiered.local.sources import open_store
    from tiered.upkeep.doctor import examine

    directory = options.store
    return examine(
        options.url,
        store,
        _s3_options(call),
        clock=call.clock,
        probe_id=None,
        open_local=(lambda: open_store(directory, clock=call.clock)) if directory else None,
    )
