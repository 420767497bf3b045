#!/usr/bin/env python3
"""An S3-shaped server that drops what it gets and invents what it gives: what a client costs by itself.

usage: nulls3.py [--port P]      prints READY and its address

PUT and POST bodies are read and dropped. GET /bucket/.../o<bytes> gives that many bytes, ranges too; any
other GET is an empty listing. No keys are checked. One thread per connection, which is kept open.
Conditions are ignored, so every put wins: never use it to test that.
"""

from __future__ import annotations

import argparse
import re
import socket
import threading
from contextlib import suppress

SOURCE = memoryview(bytes(range(256)) * (64 << 12))  # 64 MiB
SINK_BYTES = 1 << 20
ETAG = '"0123456789abcdef0123456789abcdef"'
DATE = "Fri, 20 Nov 2026 18:00:00 GMT"
SIZE = re.compile(rb"/o(\d+)$")
RANGE = re.compile(rb"bytes=(\d+)-(\d*)")
XMLNS = 'xmlns="http://s3.amazonaws.com/doc/2006-03-01/"'
EMPTY_LISTING = (
    f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult {XMLNS}><Name>b</Name><Prefix></Prefix>'
    "<KeyCount>0</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated></ListBucketResult>"
).encode()


class Connection:
    """One client, with what has been read ahead."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer
        self.ahead = bytearray()
        self.sink = memoryview(bytearray(SINK_BYTES))

    def head(self) -> bytes | None:
        """The next request's head, or None at the end."""
        while (end := self.ahead.find(b"\r\n\r\n")) < 0:
            more = self.peer.recv(1 << 16)
            if not more:
                return None
            self.ahead += more
        head = bytes(self.ahead[:end])
        del self.ahead[: end + 4]
        return head

    def drop(self, count: int) -> None:
        """Read and forget ``count`` bytes."""
        known = min(count, len(self.ahead))
        del self.ahead[:known]
        count -= known
        while count:
            received = self.peer.recv_into(self.sink[:count])
            if not received:
                raise ConnectionError
            count -= received

    def answer(self, status: str, size: int, headers: str = "") -> None:
        """Send the head of an answer."""
        head = f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nETag: {ETAG}\r\nLast-Modified: {DATE}\r\n"
        self.peer.sendall(f"{head}Date: {DATE}\r\n{headers}\r\n".encode())


def serve(connection: Connection) -> None:
    """Answer one client until it leaves."""
    while (head := connection.head()) is not None:
        first, *lines = head.split(b"\r\n")
        method, target, _ = first.split(b" ", 2)
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if headers.get(b"expect", b"").lower() == b"100-continue":
            connection.peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        connection.drop(int(headers.get(b"content-length", 0)))
        if method in {b"PUT", b"POST"}:
            connection.answer("200 OK", 0)
        elif method == b"DELETE":
            connection.answer("204 No Content", 0)
        else:
            give(connection, target.partition(b"?")[0], headers.get(b"range"), method == b"HEAD")


def give(connection: Connection, path: bytes, asked: bytes | None, only_head: bool) -> None:
    """Answer a GET or HEAD."""
    size = SIZE.search(path)
    if size is None:
        connection.answer("200 OK", len(EMPTY_LISTING), "Content-Type: application/xml\r\n")
        connection.peer.sendall(b"" if only_head else EMPTY_LISTING)
        return
    total = min(int(size[1]), len(SOURCE))
    begin, end, status, extra = 0, total, "200 OK", ""
    wanted = RANGE.match(asked) if asked else None
    if wanted is not None:
        begin = int(wanted[1])
        end = min(total, int(wanted[2]) + 1 if wanted[2] else total)
        status, extra = "206 Partial Content", f"Content-Range: bytes {begin}-{end - 1}/{total}\r\n"
    connection.answer(status, end - begin, extra)
    if not only_head:
        connection.peer.sendall(SOURCE[begin:end])


def serve_until_gone(peer: socket.socket) -> None:
    """One thread's work."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with peer, suppress(OSError, ValueError):
        serve(Connection(peer))


def main() -> None:
    """Listen for ever."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    with socket.create_server(("127.0.0.1", parser.parse_args().port), backlog=256) as listener:
        print(f"READY http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=serve_until_gone, args=(peer,), daemon=True).start()


if __name__ == "__main__":
    main()
