"""A listing that is not whole is the store's failure: no command calls the tier damaged, or advises deletion."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.faultproxy import FaultProxy
from support.servers import S3Server, use_server

import backends.wrapping

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from support.command_line import CommandLine

SIGNED = ("--s3-header", "x-amz-request-payer=requester")
"""Makes every request go through the other of our two clients."""
LIST = "list-type=2"
FOR_EVER = 1_000_000
_HEAD = (
    '<?xml version="1.0" encoding="UTF-8"?><ListBucketResult xmlns="http://s3.amazonaws.com/doc/2006-03-01/">'
    "<Name>bucket</Name><MaxKeys>1000</MaxKeys>"
)
ANSWERS = {
    "cut, without a token": f"{_HEAD}<IsTruncated>true</IsTruncated></ListBucketResult>",
    "cut, with an empty token": (
        f"{_HEAD}<IsTruncated>true</IsTruncated><NextContinuationToken/></ListBucketResult>"
    ),
    "cut, with a marker of the old kind": (
        f"{_HEAD}<IsTruncated>true</IsTruncated><NextMarker>k</NextMarker></ListBucketResult>"
    ),
    "the token stays": (
        f"{_HEAD}<IsTruncated>true</IsTruncated><NextContinuationToken>t</NextContinuationToken></ListBucketResult>"
    ),
    "it does not say whether it is cut": f"{_HEAD}</ListBucketResult>",
    "no bytes": "",
    "a page of somebody else": "<html><head><title>Log in</title></head><body><p>Hello</body></html>",
    "another document": '<?xml version="1.0"?><ListAllMyBucketsResult></ListAllMyBucketsResult>',
    "an error": "<Error><Code>InternalError</Code></Error>",
    "half a document": f"{_HEAD}<IsTruncated>false</IsTruncated><Contents><Key>som",
}
COMMANDS = (
    "status",
    "ls",
    "verify --deep",
    "rebuild",
    "rebuild --apply -",
    "gc --apply -",
    "gc --erase --apply -",
)


@pytest.fixture(autouse=True)
def nothing_is_retried(monkeypatch: pytest.MonkeyPatch) -> None:
    """(It would be, for seconds each time.)"""
    policy = backends.wrapping.RetryPolicy(tries_max=1)
    monkeypatch.setattr("tiered.api.stores.RetryPolicy", lambda: policy)


@pytest.fixture
def proxy(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    with FaultProxy(moto.endpoint_url) as proxy:
        use_server(S3Server("moto", proxy.url, moto.access_key, moto.secret_key), monkeypatch)
        yield proxy


@pytest.mark.parametrize(
    "client",
    [
        pytest.param((), id="fast-client"),
        pytest.param(SIGNED, id="signing-client", marks=pytest.mark.slow),
    ],
)
def test_a_listing_that_is_not_whole_is_no_damage(
    tiered: CommandLine, basic: Path, moto: S3Server, proxy: FaultProxy, client: tuple[str, ...]
):
    url = f"s3://{moto.bucket()}/some/prefix"
    tiered.good("attach", basic, "--to", url, "--once", *client)
    sound = tiered.good("status", url, "--json", *client).document
    for name, body in ANSWERS.items():
        proxy.rules.clear()
        proxy.add("said", "GET", path=LIST, times=FOR_EVER, status=200, body=body.encode())
        commands = COMMANDS if name == "cut, without a token" else ("status",)
        for command in commands:
            verb, *options = command.split()
            ran = tiered(verb, url, *options, *client)
            said = ran.out.decode() + ran.err
            assert ran.code == 3, (name, command, said)
            assert "damage" not in said, (name, command)
            assert "delete" not in said, (name, command)
    for kind in ("cut", "torn", "reset"):
        proxy.rules.clear()
        proxy.add(kind, "GET", path=LIST, times=FOR_EVER)
        assert tiered("status", url, *client).code == 3, kind
    proxy.rules.clear()
    assert tiered.good("status", url, "--json", *client).document == sound
    assert tiered.good("verify", url, "--deep", *client)
