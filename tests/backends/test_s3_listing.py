"""Signed GETs of listings: their signature against botocore's, one deadline, kept connections, a proxy."""

from __future__ import annotations

import base64
import socket
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import TYPE_CHECKING

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from support.servers import serving

from backends.errors import ConfigurationError
from backends.s3_listing import Lister, SignedGet
from backends.s3_settings import Credential, S3Settings
from backends.s3_wire import S3Failure

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

QUERY = {"list-type": "2", "prefix": "a b/ü+&=~/", "start-after": "x\x01"}


class Server:
    """Says "yes" to each GET, and keeps what came."""

    def __init__(self) -> None:
        self.came: list[tuple[str, dict[str, str]]] = []
        self.connections: set[object] = set()
        self.closes = False
        self.body, self.also = b"yes", dict[str, str]()  # of each answer; headers besides
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_: object) -> None: ...

            def do_GET(self) -> None:
                owner.connections.add(self.client_address)
                owner.came.append((self.path, {k.lower(): v for k, v in self.headers.items()}))
                self.send_response(200)
                for name, value in owner.also.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(owner.body)))
                self.end_headers()
                self.wfile.write(owner.body)
                self.close_connection = owner.closes  # not said to the client

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.address = f"127.0.0.1:{self.http.server_port}"


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    made = Server()
    with serving(made.http):
        yield made


def settings_of(
    url: str, headers: Mapping[str, str] | None = None, token: str | None = None
) -> S3Settings:
    def credentials() -> Credential:
        return {
            "access_key_id": "AKID",
            "secret_access_key": "secret",
            "token": token,
            "expires_at": None,
        }

    return S3Settings("bucket", url, "eu-west-1", True, headers or {}, None, 5.0, credentials)


@pytest.mark.parametrize("token", [None, "a/session+token=="])
def test_the_signature_is_botocores(server: Server, token: str | None):
    headers = {"X-Amz-Request-Payer": "requester", "x-other": "not signed"}
    asking = SignedGet(settings_of(f"http://{server.address}", headers, token))
    assert asking.get(QUERY) == (200, b"yes")
    asking.close()
    ((path, sent),) = server.came
    assert sent["x-other"] == "not signed"
    request = AWSRequest("GET", f"http://{server.address}{path}")
    for name in ("x-amz-request-payer", "x-amz-date", "x-amz-content-sha256"):
        request.headers[name] = sent[name]
    if token:
        request.headers["x-amz-security-token"] = sent["x-amz-security-token"]
    request.context["timestamp"] = sent["x-amz-date"]
    signing = S3SigV4Auth(Credentials("AKID", "secret", token), "s3", "eu-west-1")
    text = signing.string_to_sign(request, signing.canonical_request(request))
    assert sent["authorization"].endswith("Signature=" + signing.signature(text, request))


def test_connections_are_kept_and_one_that_the_server_closed_is_made_anew(server: Server):
    asking = SignedGet(settings_of(f"http://{server.address}"))
    for _ in range(5):
        assert asking.get({}) == (200, b"yes")
    assert len(server.connections) == 1
    server.closes = True
    for _ in range(3):
        assert asking.get({}) == (200, b"yes")
    assert len(server.connections) == 3
    asking.close()


@pytest.mark.parametrize(
    ("also", "asked"), [({}, [True]), ({"x-localstack": "true"}, [True, False])]
)
def test_localstack_is_asked_without_escapes(
    server: Server, also: dict[str, str], asked: list[bool]
):
    """It compares prefixes with escaped keys, and leaves out those that are escaped otherwise than the prefix."""
    server.body = b"<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>"
    server.also = also
    lister = Lister(settings_of(f"http://{server.address}"))
    assert list(lister.pages("p/%41/", "")) == [[]]
    lister.close()
    assert ["encoding-type=url" in path for path, _ in server.came] == asked


def test_a_proxy_is_asked_by_the_whole_address(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HTTP_PROXY", f"http://me:p%40ss@{server.address}")
    asking = SignedGet(settings_of("http://store.example:9000"))
    assert asking.get({"list-type": "2"}) == (200, b"yes")
    asking.close()
    ((path, sent),) = server.came
    assert path == "http://store.example:9000/bucket?list-type=2"
    assert sent["host"] == "store.example:9000"
    assert sent["proxy-authorization"] == "Basic " + base64.b64encode(b"me:p@ss").decode()
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    direct = SignedGet(settings_of(f"http://{server.address}"))
    assert direct.get({}) == (200, b"yes")
    direct.close()


@pytest.mark.parametrize(
    "proxy", ["https://proxy:3128", "socks5://proxy", "http://me:secret@", "http://p:x"]
)
def test_a_proxy_that_cannot_be_used_is_told_without_its_password(
    proxy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HTTPS_PROXY", proxy)
    with pytest.raises(ConfigurationError, match="NO_PROXY") as caught:
        SignedGet(settings_of("https://store.example"))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("part", ["status", "headers", "body", "chunks"])
def test_an_answer_that_drips_in_has_one_deadline(part: str):
    """Each byte comes long before a deadline that counts anew would pass."""
    begins = {
        "status": b"",
        "headers": b"HTTP/1.1 200 OK\r\n",
        "body": b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n",
        "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
    }
    drip = {"status": b"H", "headers": b"x", "body": b"x", "chunks": b"1\r\nx\r\n"}[part]
    over = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(begins[part])
                try:
                    while not over.wait(0.05):
                        connection.sendall(drip)
                except OSError:
                    pass  # it has given up

        thread = threading.Thread(target=serve)
        thread.start()
        host, port = listener.getsockname()
        asking = SignedGet(replace(settings_of(f"http://{host}:{port}"), timeout_s=0.5))
        with pytest.raises(S3Failure, match="TimeoutError"):
            asking.get({})
        asking.close()
        over.set()
        thread.join()
