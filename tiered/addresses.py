"""Addresses as people write them, and listening at one: one parser and one way, for all that listens or connects."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from tiered.errors import InvalidError

if TYPE_CHECKING:
    from collections.abc import Callable
    from socketserver import TCPServer

PORT_END: Final = 1 << 16
BACKLOG: Final = 1024
_NOT_HERE: Final = frozenset({errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT})
"""A family of addresses that this machine does not have."""


class Address(NamedTuple):
    """``HOST:PORT``; an IPv6 address stands in brackets, and no host at all is each of this machine's."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """``HOST:PORT``, ``[IPv6]:PORT`` or ``:PORT``."""
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit() and int(port) < PORT_END):
        raise ValueError(f"{text!r} is not a HOST:PORT")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        _require_v6(text, host)
    elif ":" in host:
        raise ValueError(
            f"{text!r} is not a HOST:PORT; write an IPv6 address in brackets, as [::1]:{port}"
        )
    if re.search(r"[\s/\[\]@]", host):
        raise ValueError(f"{text!r} is not a HOST:PORT")
    return Address(host, int(port))


def _require_v6(text: str, host: str) -> None:
    try:
        ipaddress.IPv6Address(host)
    except ValueError:
        raise ValueError(f"{text!r} has no IPv6 address in its brackets") from None


class Addresses(tuple[Address, ...]):
    """One or more, between semicolons or commas."""

    __slots__ = ()

    def __str__(self) -> str:
        return ";".join(map(str, self))


def addresses(text: str) -> Addresses:
    """``HOST:PORT;...``, each with a host and a port, one at least. Commas do as well: a shell leaves them alone."""
    found = Addresses(address(one.strip()) for one in re.split("[;,]", text) if one.strip())
    if not found or not all(one.host and one.port for one in found):
        raise ValueError(f"{text!r} is not a HOST:PORT;...")
    return found


def listening(place: Address, option: str) -> list[socket.socket]:
    """Sockets that listen at an address: one for each that its host has, and of each family where there is no host.

    Args:
        place: Where; port 0: any free one, the same for all.
    """
    try:
        return _bound(place)
    except OSError as error:
        where = place if place.host else f"*:{place.port}"
        raise InvalidError(
            f"cannot listen at {where}: {error.strerror or error}",
            where=option,
            do="choose an address of this machine and a free port",
        ) from error


class Servers:
    """Servers of the standard library, one for each socket of an address. Each has a thread, until they are closed."""

    def __init__(
        self, place: Address, option: str, name: str, make: Callable[[Any], TCPServer]
    ) -> None:
        """Listen, and serve.

        Args:
            name: Of the threads.
            make: Makes a server of the name of its socket, which does not bind.
        """
        self._servers: list[TCPServer] = []
        for listener in listening(place, option):
            server = make(listener.getsockname())
            server.socket.close()
            server.socket = listener
            self._servers.append(server)
        self.port = int(self._servers[0].socket.getsockname()[1])  # that is listened at
        # Daemons: a client that hangs must not keep the process from ending.
        self._threads = [
            threading.Thread(target=one.serve_forever, args=(0.1,), name=name, daemon=True)
            for one in self._servers
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop serving. The threads end before the sockets are closed under them."""
        for server in self._servers:
            server.shutdown()
        for thread in self._threads:
            thread.join()
        for server in self._servers:
            server.server_close()


def why_taken(place: Address) -> str:
    """Why nobody can listen at an address now; empty: it is free. To choose one, since somebody may yet come."""
    if place.port >= PORT_END:
        return f"{place.port} is not a port"  # the system has taken the rest of it
    try:
        found = _bound(place, backlog=None)
    except OSError as error:
        return f"{place if place.host else f'*:{place.port}'}: {error.strerror or error}"
    for one in found:
        one.close()
    return ""


def _bound(place: Address, backlog: int | None = BACKLOG) -> list[socket.socket]:
    """Bound sockets, which listen unless there is no backlog."""
    infos = socket.getaddrinfo(
        place.host or None, place.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    found: list[socket.socket] = []
    absent: OSError | None = None
    with ExitStack() as opened:
        for family, kind, protocol, _, at in dict.fromkeys(infos):
            port = found[0].getsockname()[1] if found else place.port
            try:
                made = opened.enter_context(socket.socket(family, kind, protocol))
                made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                if family == socket.AF_INET6:
                    made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                made.bind((at[0], port, *at[2:]))
            except OSError as error:
                if error.errno not in _NOT_HERE:
                    raise
                absent = error
                continue
            if backlog is not None:
                made.listen(backlog)
            found.append(made)
        if not found:
            raise absent or OSError(errno.EADDRNOTAVAIL, "there is no such address")
        opened.pop_all()
    return found
