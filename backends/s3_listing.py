"""Listings of a bucket, asked for and read here, since no client library says whether a listing is whole.

A listing decides what there is, and what is not in it is taken as gone. obstore takes a proxy's page or an empty document
for an empty bucket, and boto3 and obstore alike take a page that says that it goes on, and not where, for the last. Here
each page has to be a ``ListBucketResult`` that says whether it is cut; one that is cut has to say where it goes on, and what
follows has to lie behind it. All else is a failure of the store. Keys come as they are, whatever is in them.

Pages are asked for by signed GETs of the standard library: kept connections, proxies, TLS. botocore's chunks
(``S3SigV4Auth``, ``URLLib3Session``) would do it in fewer lines. They are not used, since every command on ``s3://`` lists:
of a fresh interpreter they take 200 ms of CPU and more to import beside what such a command loads anyway, urllib3 alone
80 ms, and what is used here 20 ms. A page of 1,000 keys costs the same either way, about 20 ms, nearly all of it reading.

A request has one deadline, its answer included, however slowly the answer drips in. Any thread may ask. Nothing is retried,
but for a kept connection that the server had closed before it was asked. One GET a page.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import http.client
import io
import ssl
import threading
import time
import urllib.request
from collections import deque
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import quote, unquote, unquote_plus, urlsplit
from xml.etree import ElementTree as ET

from backends.base import ObjectInfo, Version
from backends.errors import ConfigurationError
from backends.s3_wire import (
    CUT,
    FOREIGN,
    S3Failure,
    answered,
    no_credentials,
    read_ca_bundle,
    tls_refusal,
    untrusted,
)

if TYPE_CHECKING:
    import socket
    from collections.abc import Iterator, Mapping, Sequence

    from backends.s3_settings import S3Settings

_OK: Final = 200
_SERVER_FAULT: Final = 500
_EMPTY_PAGES_MAX: Final = 10_000
"""In a row: a server may look at many keys that it does not show, but not for ever."""


class Lister:
    """Lists one bucket."""

    def __init__(self, settings: S3Settings) -> None:
        self._asking = SignedGet(settings)

    def pages(self, folder: str, start_after: str) -> Iterator[Sequence[ObjectInfo]]:
        """What lies below ``folder`` ("" or ending in a slash) behind a key (""), a page at a time.

        S3Failure as of any request; with a code of ours when the answer is no whole listing.
        """
        query = {"list-type": "2", "encoding-type": "url", "prefix": folder}
        if start_after:
            query["start-after"] = start_after
        last, empty = "", 0
        while True:
            status, body = self._asking.get(query)
            if self._asking.is_localstack and "encoding-type" in query:
                # It compares prefix and start-after with escaped keys, and so leaves out some with a "%" or not in ASCII.
                del query["encoding-type"]
                status, body = self._asking.get(query)
            page = _page(status, body)
            if page.found and page.found[0].key <= last:
                raise S3Failure(_OK, CUT, detail="a page goes on where another began")
            yield page.found
            if not page.token:
                return
            last = page.found[-1].key if page.found else last
            empty = 0 if page.found else empty + 1
            if page.token == query.get("continuation-token") or empty > _EMPTY_PAGES_MAX:
                raise S3Failure(_OK, CUT, detail="it goes on where it was")
            query["continuation-token"] = page.token

    def close(self) -> None:
        """Give back connections."""
        self._asking.close()


class _Page(NamedTuple):
    """One page, and where the next begins ("": it is the last)."""

    found: list[ObjectInfo]
    token: str


def _page(status: int, body: bytes) -> _Page:
    """What an answer says."""
    if status != _OK:
        raise answered(status, body.decode("utf-8", "replace"))
    root = _document(body)
    if root is not None and _name(root) == "Error":  # some servers find out when they have said 200
        raise answered(_SERVER_FAULT, body.decode("utf-8", "replace"))
    if root is None or _name(root) != "ListBucketResult":
        raise S3Failure(status, FOREIGN, detail="it is not a listing")
    parts = {_name(one): one.text or "" for one in root}
    cut, token = parts.get("IsTruncated"), parts.get("NextContinuationToken", "")
    if cut not in {"true", "false"}:
        raise S3Failure(status, FOREIGN, detail="it does not say whether it goes on")
    if cut == "true" and not token:
        raise S3Failure(status, CUT, detail="it goes on, and does not say where")
    is_escaped = parts.get("EncodingType") == "url"
    try:
        found = [_info(one, is_escaped=is_escaped) for one in root if _name(one) == "Contents"]
    except (KeyError, ValueError) as error:
        raise S3Failure(status, FOREIGN, detail="it is not a listing") from error
    return _Page(found, token if cut == "true" else "")


def _document(body: bytes) -> ET.Element | None:
    """The root of a document; None when the bytes are none, or define entities."""
    if b"<!DOCTYPE" in body:
        return None
    try:
        return ET.fromstring(body)  # noqa: S314 (no document type: no entities)
    except (ET.ParseError, ValueError, LookupError):  # the latter two: of an unknown encoding
        return None


def _name(element: ET.Element) -> str:
    """Of an element, without its namespace."""
    return element.tag.rpartition("}")[2]


def _info(element: ET.Element, *, is_escaped: bool) -> ObjectInfo:
    parts = {_name(one): one.text or "" for one in element}
    key, etag = parts["Key"], parts.get("ETag")
    modified = datetime.fromisoformat(parts["LastModified"])
    return ObjectInfo(
        key=unquote_plus(key) if is_escaped else key,
        size_bytes=int(parts["Size"]),
        modified_ms=round(modified.timestamp() * 1000),
        version=None if etag is None else Version(etag),
    )


# -- signed GETs -------------------------------------------------------------------------------------

_KEPT_MAX: Final = 16
_CHUNK_BYTES: Final = 256 * 1024
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""A page of a thousand keys of 1,024 bytes, each byte escaped, is a twentieth of it."""
_GONE: Final = (http.client.RemoteDisconnected, ConnectionError)


class SignedGet:
    """Asks one bucket."""

    def __init__(self, settings: S3Settings) -> None:
        self._settings = settings
        self._endpoint = _endpoint_of(settings)
        self._tls = _tls(settings) if self._endpoint.scheme == "https" else None
        self._way = _way_to(self._endpoint)
        self._kept: deque[http.client.HTTPConnection] = deque()
        # Whether LocalStack has answered. Set by any thread; it only ever becomes true.
        self.is_localstack = False
        self._is_closed = threading.Event()

    def get(self, query: Mapping[str, str]) -> tuple[int, bytes]:
        """Status and body of an answer, which is whole; S3Failure: there is none."""
        target, headers = self._signed(query)
        until_s = time.monotonic() + self._settings.timeout_s
        try:
            kept = self._kept.pop()
        except IndexError:
            return self._ask(self._connection(), target, headers, until_s)
        try:
            return self._ask(kept, target, headers, until_s)
        except S3Failure as failure:
            if not isinstance(failure.__cause__, _GONE):
                raise
            return self._ask(self._connection(), target, headers, until_s)

    def close(self) -> None:
        """Close the connections that nobody uses; those in use are closed when they are given back."""
        self._is_closed.set()
        while self._kept:
            self._kept.pop().close()

    def _ask(
        self,
        connection: http.client.HTTPConnection,
        target: str,
        headers: Mapping[str, str],
        until_s: float,
    ) -> tuple[int, bytes]:
        is_over = False
        try:
            if connection.sock is None:
                _connect(connection)
            connection.sock.settimeout(_left_s(until_s))
            connection.response_class = _answer_until(until_s)
            connection.request("GET", target, headers=dict(headers))
            with connection.getresponse() as answer:
                body = _body_of(answer)
                if b"<Code>RequestTimeTooSkewed<" in body and b"<ServerTime>" not in body:
                    body += _times_of(answer.getheader("date", ""), headers["x-amz-date"])
                self.is_localstack = (
                    self.is_localstack or answer.getheader("x-localstack") is not None
                )
                is_over = answer.isclosed() and not answer.will_close
        except ssl.SSLError as error:
            raise untrusted(tls_refusal(error)) from error
        except (OSError, http.client.HTTPException) as error:
            raise S3Failure(0, detail=type(error).__name__) from error
        finally:
            self._give_back(connection, is_over=is_over)
        return answer.status, body

    def _give_back(self, connection: http.client.HTTPConnection, *, is_over: bool) -> None:
        if not is_over or len(self._kept) >= _KEPT_MAX:
            connection.close()
            return
        self._kept.append(connection)
        if self._is_closed.is_set():
            self.close()

    def _connection(self) -> http.client.HTTPConnection:
        """One that is not connected yet."""
        host, port = self._way.host, self._way.port
        timeout_s = self._settings.connect_timeout_s
        if self._tls is None:
            return http.client.HTTPConnection(host, port, timeout=timeout_s)
        made = http.client.HTTPSConnection(host, port, timeout=timeout_s, context=self._tls)
        if self._way.is_proxy:
            made.set_tunnel(self._endpoint.host, self._endpoint.port, dict(self._way.headers))
        return made

    def _signed(self, query: Mapping[str, str]) -> tuple[str, dict[str, str]]:
        """Target and headers of a request."""
        endpoint = self._endpoint
        own = {name.lower(): value.strip() for name, value in self._settings.headers.items()}
        line = "&".join(f"{_escaped(k)}={_escaped(v)}" for k, v in sorted(query.items()))
        signed = {"host": endpoint.authority}
        signed |= {name: value for name, value in own.items() if name.startswith("x-amz-")}
        headers = own | _signature(self._settings, endpoint.path, line, signed)
        target = f"{endpoint.path}?{line}"
        if self._way.is_proxy and self._tls is None:
            target = f"http://{endpoint.authority}{target}"
            headers |= self._way.headers
        return target, headers


def _times_of(date: str, ours: str) -> bytes:
    """Elements of an answer that says that our clock is wrong, for servers (MinIO) that tell the time in a header alone."""
    try:
        theirs = parsedate_to_datetime(date)
    except ValueError:
        return b""
    told = f"<RequestTime>{ours}</RequestTime><ServerTime>{theirs:%Y-%m-%dT%H:%M:%SZ}</ServerTime>"
    return told.encode()


# -- signing (AWS signature version 4) ---------------------------------------------------------------

_NO_BODY: Final = hashlib.sha256(b"").hexdigest()


def _signature(
    settings: S3Settings, path: str, line: str, headers: Mapping[str, str]
) -> dict[str, str]:
    """The headers, and those that sign them and a GET of a path with a query."""
    try:
        keys = settings.credentials()
    except Exception as error:  # noqa: BLE001 (of any source; its text may hold secrets)
        raise no_credentials(type(error).__name__) from None
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    signed = {**headers, "x-amz-content-sha256": _NO_BODY, "x-amz-date": moment}
    if token := keys.get("token"):
        signed["x-amz-security-token"] = token
    names = ";".join(sorted(signed))
    told = "".join(f"{name}:{' '.join(signed[name].split())}\n" for name in sorted(signed))
    canonical = f"GET\n{path}\n{line}\n{told}\n{names}\n{_NO_BODY}"
    scope = f"{moment[:8]}/{settings.region}/s3/aws4_request"
    digest = hashlib.sha256(canonical.encode()).hexdigest()
    secret = ("AWS4" + keys["secret_access_key"]).encode()
    for part in scope.split("/"):
        secret = hmac.digest(secret, part.encode(), "sha256")
    text = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{digest}"
    signature = hmac.digest(secret, text.encode(), "sha256").hex()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys['access_key_id']}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def _escaped(text: str) -> str:
    return quote(text, safe="-_.~")


# -- one deadline ------------------------------------------------------------------------------------


class _Until(io.RawIOBase):
    """What a socket gives until a moment: its own timeout would count anew for each chunk."""

    def __init__(self, sock: socket.socket, until_s: float) -> None:
        super().__init__()
        self._sock = sock
        self._raw = sock.makefile("rb", buffering=0)
        self._until_s = until_s

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int | None:  # type: ignore[override]
        self._sock.settimeout(_left_s(self._until_s))
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _answer_until(until_s: float) -> type[http.client.HTTPResponse]:
    """Answers that have to be whole at a moment."""

    class Timely(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: object, **more: object) -> None:
            super().__init__(sock, *args, **more)  # type: ignore[arg-type]
            self.fp.close()
            self.fp = io.BufferedReader(_Until(sock, until_s))

    return Timely


def _left_s(until_s: float) -> float:
    left_s = until_s - time.monotonic()
    if left_s <= 0:
        raise TimeoutError
    return left_s


def _connect(connection: http.client.HTTPConnection) -> None:
    """Connect, so that what fails has carried nothing."""
    try:
        connection.connect()
    except ssl.SSLError:
        raise
    except OSError as error:
        detail = error.strerror or str(error) or type(error).__name__
        raise S3Failure(0, sent=False, detail=detail) from error


def _body_of(answer: http.client.HTTPResponse) -> bytes:
    body = bytearray()
    while chunk := answer.read(_CHUNK_BYTES):
        body += chunk
        if len(body) > _ANSWER_BYTES_MAX:
            raise S3Failure(answer.status, FOREIGN, detail="it does not end")
    if answer.length:  # what is missing at the end is not an error of a read with a size
        raise http.client.IncompleteRead(b"", answer.length)
    return bytes(body)


# -- places ------------------------------------------------------------------------------------------

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}


class _Endpoint(NamedTuple):
    """Where the bucket is: ``path`` as it is signed and sent, ``authority`` as the header Host has it."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str


def _endpoint_of(settings: S3Settings) -> _Endpoint:
    url = settings.request_url
    if url is None:
        ending = ".cn" if settings.region.startswith("cn-") else ""
        domain = f"s3.{settings.region}.amazonaws.com{ending}"
        url = f"https://{domain}" if settings.path_style else f"https://{settings.bucket}.{domain}"
    parts = urlsplit(url)
    host, scheme = parts.hostname or "", parts.scheme
    name = f"[{host}]" if ":" in host else host
    port = parts.port or _DEFAULT_PORTS[scheme]
    authority = name if port == _DEFAULT_PORTS[scheme] else f"{name}:{port}"
    below = parts.path.rstrip("/")
    path = f"{below}/{settings.bucket}" if settings.path_style else below or "/"
    return _Endpoint(scheme, host, port, authority, quote(path, safe="/-_.~"))


class _Way(NamedTuple):
    """What to connect to: the server, or a proxy before it."""

    host: str
    port: int
    is_proxy: bool = False
    headers: Mapping[str, str] = {}


def _way_to(endpoint: _Endpoint) -> _Way:
    """As the environment says (``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY``, ``NO_PROXY``)."""
    proxies = urllib.request.getproxies()
    named = proxies.get(endpoint.scheme) or proxies.get("all")
    if not named or urllib.request.proxy_bypass(f"{endpoint.host}:{endpoint.port}"):
        return _Way(endpoint.host, endpoint.port)
    parts = urlsplit(named if "://" in named else f"http://{named}")
    try:
        port = parts.port or _DEFAULT_PORTS["http"]
    except ValueError:
        port = 0
    if not parts.hostname or not port or parts.scheme != "http":  # (it may hold a password)
        raise ConfigurationError(
            "cannot use the proxy that the environment names; begin its address with http:// (messages are still"
            " encrypted through it), or put the store's host in NO_PROXY"
        )
    headers = {}
    if parts.username is not None:
        user = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
        headers["proxy-authorization"] = "Basic " + base64.b64encode(user.encode()).decode()
    return _Way(parts.hostname, port, is_proxy=True, headers=headers)


def _tls(settings: S3Settings) -> ssl.SSLContext:
    """The system's authorities, and those that are named."""
    context = ssl.create_default_context()
    if settings.ca_bundle is not None:
        bundle = read_ca_bundle(settings.ca_bundle).decode("ascii", "ignore")
        try:
            context.load_verify_locations(cadata=bundle)
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"the CA bundle has no certificate in PEM form ({settings.ca_bundle})"
            ) from error
    return context
