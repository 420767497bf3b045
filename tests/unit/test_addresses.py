"""Addresses: how they are written, and listening at them."""

from __future__ import annotations

import re
import socket
import urllib.request
from contextlib import closing

import pytest

from tiered.addresses import Address, address, addresses, listening, why_taken
from tiered.cli.serve import MetricsServer
from tiered.cli.timer import name_servers
from tiered.errors import InvalidError


def has_v6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


needs_v6 = pytest.mark.skipif(not has_v6(), reason="no IPv6 here")


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("broker-1.example:9876", "broker-1.example", 9876),
        ("10.0.0.1:0", "10.0.0.1", 0),
        (":10911", "", 10911),
        ("[::1]:10911", "::1", 10911),
        ("[fe80::1%eth0]:1", "fe80::1%eth0", 1),
        ("[::]:65535", "::", 65535),
    ],
)
def test_an_address_is_read_and_written_alike(text: str, host: str, port: int):
    assert address(text) == Address(host, port)
    assert str(address(text)) == text


@pytest.mark.parametrize(
    "text",
    ["", "a", "a:", "a:b", "a:65536", "a:-1", "a:\u0661", "::1:9876", "::1", "[::1]", "[::1]9876",
     "[a]:1", "[]:1", "[::1:1", "::1]:1", "http://a:1", "a b:1", "user@a:1", "namesrv://a:1"],
)  # fmt: skip
def test_what_is_no_address(text: str):
    with pytest.raises(ValueError, match=re.escape(repr(text))):
        address(text)


def test_who_leaves_out_brackets_is_told_of_them():
    with pytest.raises(ValueError, match=r"brackets, as \[::1\]:9876"):
        address("::1:9876")


@pytest.mark.parametrize(
    "text", ["a:1;b:2", "a:1,b:2", " a:1 ; b:2 ,", "a:1;[::1]:2", "[::1]:1,[::2]:2"]
)
def test_addresses_stand_between_semicolons_or_commas(text: str):
    found = addresses(text)
    assert [one.port for one in found] == [1, 2]
    assert addresses(str(found)) == found
    assert name_servers("namesrv", text) == [*found]
    assert name_servers("namesrv", text + "/") == [*found]


@pytest.mark.parametrize("text", ["", ",;", "a", "a:1,b", ":1", "a:0", "a;b"])
def test_what_are_no_addresses(text: str):
    with pytest.raises(ValueError, match="not a HOST:PORT"):
        addresses(text)
    with pytest.raises(InvalidError, match="not a HOST:PORT"):
        name_servers("namesrv", text)


def test_each_family_listens_at_the_same_port():
    found = listening(Address("", 0), "--listen")
    try:
        assert len({one.getsockname()[1] for one in found}) == 1
        families = {one.family for one in found}
        assert socket.AF_INET in families
        assert (socket.AF_INET6 in families) == has_v6()
    finally:
        for one in found:
            one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("::1", marks=needs_v6)])
def test_what_is_taken_is_told_with_the_option(host: str):
    (first,) = listening(Address(host, 0), "--listen")
    with closing(first):
        place = Address(host, first.getsockname()[1])
        assert str(place) in why_taken(place)
        with pytest.raises(InvalidError, match=re.escape(f"cannot listen at {place}")) as caught:
            listening(place, "--metrics-listen")
        assert caught.value.where == "--metrics-listen"
    assert not why_taken(place)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "", pytest.param("::1", marks=needs_v6)]
)
def test_metrics_are_served_at_each_address_of_a_host(host: str):
    server = MetricsServer(Address(host, 0), lambda: "m 1\n", {"/healthz": lambda: (True, "ok")})
    try:
        families = {"127.0.0.1", "::1"} if host == "" and has_v6() else {host or "127.0.0.1"}
        for at in families:
            url = f"http://{Address(at, server.port)}"
            assert urllib.request.urlopen(f"{url}/metrics", timeout=60).read() == b"m 1\n"
            assert urllib.request.urlopen(f"{url}/healthz", timeout=60).read() == b"ok"
    finally:
        server.close()
