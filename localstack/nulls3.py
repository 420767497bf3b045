#!/usr/bin/env python3
"""An S3-shaped server that drops what it gets and invents what it gives: what a client costs by itself.

usage: nulls3.py [--port P] [--keep BYTES]      prints READY and its address

PUT and POST bodies are read and dropped. GET /bucket/.../o<bytes> gives that many bytes, ranges too; any
other GET is an empty listing. No signature is checked. One thread per connection, which is kept open.
Conditions are ignored, so every put wins: never use it to test that.

With --keep, bodies below so many bytes are kept in memory, listed, given back and deleted, and their conditions
(If-None-Match: *, If-Match) are honoured, so that what keeps a small journal beside large objects can run.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import socket
import threading
from contextlib import suppress
from urllib.parse import parse_qs, unquote
from xml.sax.saxutils import escape

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


class Small:
    """The objects that are kept, by path."""

    def __init__(self, keep_bytes: int) -> None:
        self.keep_bytes = keep_bytes
        self.lock = threading.Lock()
        self.objects: dict[str, bytes] = {}

    def put(self, path: str, body: bytes, headers: dict[bytes, bytes]) -> bool:
        """Store a body; False when its condition does not hold."""
        with self.lock:
            present = self.objects.get(path)
            if headers.get(b"if-none-match") == b"*" and present is not None:
                return False
            wanted = headers.get(b"if-match")
            if wanted is not None and (present is None or etag(present) != wanted.decode()):
                return False
            self.objects[path] = body
            return True

    def listing(self, path: str, query: str) -> bytes:
        """A page of ListObjectsV2, of everything that is left."""
        asked = parse_qs(query)
        prefix, after = (asked.get(name, [""])[0] for name in ("prefix", "start-after"))
        bucket = path.strip("/")
        begin = len(bucket) + 2
        with self.lock:
            found = sorted(
                (key[begin:], body)
                for key, body in self.objects.items()
                if key.startswith(f"/{bucket}/{prefix}") and key[begin:] > after
            )
        contents = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-20T18:00:00.000Z</LastModified>"
            f"<ETag>{escape(etag(body))}</ETag><Size>{len(body)}</Size></Contents>"
            for key, body in found
        )
        return (
            f'<?xml version="1.0" encoding="UTF-8"?><ListBucketResult {XMLNS}><Name>{bucket}</Name><Prefix></Prefix>'
            f"<KeyCount>{len(found)}</KeyCount><MaxKeys>1000</MaxKeys><IsTruncated>false</IsTruncated>{contents}"
            "</ListBucketResult>"
        ).encode()


def etag(body: bytes) -> str:
    """As S3 makes it."""
    return f'"{hashlib.md5(body, usedforsecurity=False).hexdigest()}"'


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

    def take(self, count: int) -> bytes:
        """Read ``count`` bytes."""
        while len(self.ahead) < count:
            more = self.peer.recv(1 << 16)
            if not more:
                raise ConnectionError
            self.ahead += more
        body = bytes(self.ahead[:count])
        del self.ahead[:count]
        return body

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

    def answer(self, status: str, size: int, headers: str = "", tag: str = ETAG) -> None:
        """Send the head of an answer."""
        head = f"HTTP/1.1 {status}\r\nContent-Length: {size}\r\nETag: {tag}\r\nLast-Modified: {DATE}\r\n"
        self.peer.sendall(f"{head}Date: {DATE}\r\n{headers}\r\n".encode())


def serve(connection: Connection, small: Small) -> None:
    """Answer one client until it leaves."""
    while (head := connection.head()) is not None:
        first, *lines = head.split(b"\r\n")
        method, target, _ = first.split(b" ", 2)
        pairs = (line.partition(b":") for line in lines)
        headers = {name.strip().lower(): value.strip() for name, _, value in pairs}
        if headers.get(b"expect", b"").lower() == b"100-continue":
            connection.peer.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        path = target.decode().partition("?")[0]
        size = int(headers.get(b"content-length", 0))
        if method == b"PUT" and size < small.keep_bytes:
            keep(connection, small, unquote(path), connection.take(size), headers)
            continue
        connection.drop(size)
        if method in {b"PUT", b"POST"}:
            connection.answer("200 OK", 0)
        elif method == b"DELETE":
            with small.lock:
                small.objects.pop(unquote(path), None)
            connection.answer("204 No Content", 0)
        elif not (
            small.keep_bytes and give_kept(connection, small, method, target.decode(), headers)
        ):
            give(connection, path.encode(), headers.get(b"range"), method == b"HEAD")


def keep(
    connection: Connection, small: Small, path: str, body: bytes, headers: dict[bytes, bytes]
) -> None:
    """Answer a PUT of a small object."""
    if small.put(path, body, headers):
        connection.answer("200 OK", 0, tag=etag(body))
    else:
        refuse(connection, "412 Precondition Failed", "PreconditionFailed")


def refuse(connection: Connection, status: str, code: str) -> None:
    """Answer with an error."""
    body = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
    connection.answer(status, len(body), "Content-Type: application/xml\r\n")
    connection.peer.sendall(body)


def give_kept(
    connection: Connection, small: Small, method: bytes, target: str, headers: dict[bytes, bytes]
) -> bool:
    """Answer a GET or HEAD of a small object, or a listing; False when it is neither."""
    raw, _, query = target.partition("?")
    path = unquote(raw)
    if "list-type=2" in query:
        page = small.listing(path, query)
        connection.answer("200 OK", len(page), "Content-Type: application/xml\r\n")
        connection.peer.sendall(page)
        return True
    if SIZE.search(path.encode()):
        return False
    with small.lock:
        body = small.objects.get(path)
    if body is None:
        if method == b"HEAD":
            connection.answer("404 Not Found", 0)
        else:
            refuse(connection, "404 Not Found", "NoSuchKey")
        return True
    wanted = RANGE.match(headers.get(b"range", b""))
    begin, end = (int(wanted[1]), int(wanted[2] or len(body) - 1) + 1) if wanted else (0, len(body))
    status = "206 Partial Content" if wanted else "200 OK"
    extra = f"Content-Range: bytes {begin}-{end - 1}/{len(body)}\r\n" if wanted else ""
    connection.answer(status, len(body[begin:end]), extra, tag=etag(body))
    if method != b"HEAD":
        connection.peer.sendall(body[begin:end])
    return True


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


def serve_until_gone(peer: socket.socket, small: Small) -> None:
    """One thread's work."""
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with peer, suppress(OSError, ValueError):
        serve(Connection(peer), small)


def main() -> None:
    """Listen for ever."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--keep", type=int, default=0, metavar="BYTES")
    arguments = parser.parse_args()
    small = Small(arguments.keep)
    with socket.create_server(("127.0.0.1", arguments.port), backlog=256) as listener:
        print(f"READY http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
        while True:
            peer, _ = listener.accept()
            threading.Thread(target=serve_until_gone, args=(peer, small), daemon=True).start()


if __name__ == "__main__":
    main()
