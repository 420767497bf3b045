"""Certificates made on the spot, and TLS in front of a server that has none."""

from __future__ import annotations

import contextlib
import datetime as dt
import ipaddress
import socket
import ssl
import threading
from typing import TYPE_CHECKING

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType
    from typing import Self

_DAY = dt.timedelta(days=1)


class Authority:
    """Signs certificates; ``bundle`` is the PEM file that clients are to trust."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = _name("an authority of a test")
        self._count = 0
        self.bundle = folder / "authority.pem"
        made = self._make(self._name, self._key, [], expired=False, is_authority=True)
        self.bundle.write_bytes(made.public_bytes(serialization.Encoding.PEM))

    def certificate(self, host: str, *, expired: bool = False) -> Path:
        """A PEM file with a certificate for a host name or address, and its key."""
        key = ec.generate_private_key(ec.SECP256R1())
        made = self._make(_name("a server"), key, [_alternative(host)], expired=expired)
        self._count += 1
        path = self._folder / f"server-{self._count}.pem"
        path.write_bytes(
            made.public_bytes(serialization.Encoding.PEM)
            + key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.PKCS8,
                serialization.NoEncryption(),
            )
        )
        return path

    def _make(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        names: list[x509.GeneralName],
        *,
        expired: bool,
        is_authority: bool = False,
    ) -> x509.Certificate:
        now = dt.datetime.now(dt.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - 3 * _DAY)
            .not_valid_after(now - _DAY if expired else now + _DAY)
            .add_extension(x509.BasicConstraints(is_authority, None), critical=True)
        )
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return builder.sign(self._key, hashes.SHA256())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


class TlsFront:
    """Takes TLS connections at ``url`` and passes their bytes to a plain server, while the ``with`` block runs."""

    def __init__(self, upstream: tuple[str, int], certificate: Path) -> None:
        self._upstream = upstream
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(certificate)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._stopping = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self.url = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.received_bytes = 0

    def __enter__(self) -> Self:
        self._start(self._accept)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stopping = True
        self._listener.shutdown(socket.SHUT_RDWR)
        with self._lock:
            for one in self._open:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
        self._listener.close()

    def _start(self, body: object, *arguments: object) -> None:
        thread = threading.Thread(target=body, args=arguments, daemon=True)  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._stopping:
            try:
                plain, _ = self._listener.accept()
            except OSError:
                return
            self._start(self._serve, plain)

    def _serve(self, plain: socket.socket) -> None:
        with contextlib.suppress(OSError), plain:
            plain.settimeout(30)
            with (
                self._context.wrap_socket(plain, server_side=True) as client,
                socket.create_connection(self._upstream, 30) as server,
            ):
                with self._lock:
                    self._open |= {client, server}
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                self._forward(client, server)
                back.join()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError, ValueError):
            while data := client.recv(1 << 16):
                self.received_bytes += len(data)
                server.sendall(data)
        with contextlib.suppress(OSError, ValueError):
            server.shutdown(socket.SHUT_RDWR)  # who has closed its end wants no answer


def _copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError, ValueError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with contextlib.suppress(OSError, ValueError):
        target.shutdown(socket.SHUT_WR)
