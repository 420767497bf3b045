"""TLS: verified unless the endpoint says http, an own authority can be named, and what is wrong is said with what to do."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import pytest
from support.tls import Authority, TlsFront

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine
    from support.servers import S3Server

SIGNED = ("--s3-header", "x-amz-request-payer=requester")
"""Makes every request go through the other of our two clients."""


@pytest.fixture(params=[(), SIGNED], ids=["fast-client", "signing-client"])
def client(request: pytest.FixtureRequest) -> tuple[str, ...]:
    found: tuple[str, ...] = request.param
    return found


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path)


@pytest.fixture
def plain(ministack: S3Server, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """The address of a server without TLS; nothing of this machine's AWS settings counts."""
    for name in ("AWS_PROFILE", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nonexistent")
    for name, value in ministack.environment.items():
        monkeypatch.setenv(name, value)
    address = urlsplit(ministack.endpoint_url)
    assert address.hostname
    assert address.port
    return address.hostname, address.port


@pytest.fixture
def front(plain: tuple[str, int], authority: Authority) -> Iterator[TlsFront]:
    with TlsFront(plain, authority.certificate("127.0.0.1")) as front:
        yield front


def test_a_server_of_no_known_authority_is_refused(
    tiered: CommandLine, front: TlsFront, client: tuple[str, ...]
):
    ran = tiered("ls", "s3://bucket/prefix", "--endpoint-url", front.url, *client)
    assert (ran.code, ran.out) == (3, b"")
    assert f"{front.url} is not trusted: no known authority has signed its certificate" in ran.error
    assert "--ca-bundle or AWS_CA_BUNDLE" in ran.error
    assert front.received_bytes == 0


@pytest.mark.parametrize(
    ("how", "client"),
    [
        ("option", ()),
        ("environment", SIGNED),
        pytest.param("profile", (), marks=pytest.mark.slow),
    ],
)
def test_an_authority_of_ones_own(
    *, tiered: CommandLine, ministack: S3Server, front: TlsFront, authority: Authority, basic: Path,
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, client: tuple[str, ...], how: str,
):  # fmt: skip
    url = f"s3://{ministack.bucket()}/prefix"
    options = ["--endpoint-url", front.url, *client]
    if how == "option":
        options += ["--ca-bundle", str(authority.bundle)]
    elif how == "environment":
        monkeypatch.setenv("AWS_CA_BUNDLE", str(authority.bundle))
    else:
        config = tmp_path / "config"
        config.write_text(
            f"[profile own]\nca_bundle = {authority.bundle}\naws_access_key_id = test\n"
            "aws_secret_access_key = test\n"
        )
        monkeypatch.setenv("AWS_CONFIG_FILE", str(config))
        options += ["--profile", "own"]
    tiered.good("attach", basic, "--to", url, "--once", *options)
    assert tiered.good("verify", url, "--deep", "--store", basic, *options).code == 0
    assert front.received_bytes > 0


@pytest.mark.parametrize(
    ("host", "expired", "what"),
    [
        ("other.example", False, "its certificate is for another host name"),
        ("127.0.0.2", False, "its certificate is for another host name"),
        ("127.0.0.1", True, "its certificate is not valid at this time"),
    ],
)
def test_a_certificate_that_does_not_fit(
    *, tiered: CommandLine, plain: tuple[str, int], authority: Authority, client: tuple[str, ...],
    host: str, expired: bool, what: str,
):  # fmt: skip
    with TlsFront(plain, authority.certificate(host, expired=expired)) as front:
        options = ("--endpoint-url", front.url, "--ca-bundle", authority.bundle, *client)
        ran = tiered("ls", "s3://bucket/prefix", *options)
    assert (ran.code, front.received_bytes) == (3, 0)
    assert f"{front.url} is not trusted: {what}" in ran.error


def test_a_server_without_tls_is_not_talked_to_in_plain_words(
    tiered: CommandLine, plain: tuple[str, int], client: tuple[str, ...]
):
    endpoint = f"https://{plain[0]}:{plain[1]}"
    ran = tiered("ls", "s3://bucket/prefix", "--endpoint-url", endpoint, *client)
    assert ran.code == 3
    assert "it does not speak TLS" in ran.error
    assert "say http:// in the endpoint" in ran.error


def test_a_bundle_that_is_none(
    tiered: CommandLine, front: TlsFront, tmp_path: Path, client: tuple[str, ...]
):
    (tmp_path / "empty.pem").write_text("nothing\n")
    for path, what in (
        (tmp_path / "missing.pem", "the CA bundle cannot be read: No such file"),
        (tmp_path / "empty.pem", "the CA bundle has no certificate in PEM form"),
    ):
        options = ("--endpoint-url", front.url, "--ca-bundle", path, *client)
        ran = tiered("ls", "s3://bucket/prefix", *options)
        assert ran.code == 2
        assert what in ran.error
        assert str(path) in ran.error
