"""Hosts of a record as text, as Java prints them: ``10.0.0.1:80``, ``[2001:db8:0:0:0:0:7:1]:80``.

A host takes 4 or 16 address bytes, then the port as a big-endian 4-byte integer. Zeros in an IPv6
address are not shortened, so that the text compares equal with what RocketMQ's tools print. The
port is taken as unsigned: a damaged or foreign one keeps its bytes.
"""

from __future__ import annotations

import ipaddress
from functools import lru_cache
from typing import Final

V4_HOST_BYTES: Final = 8
V6_HOST_BYTES: Final = 20
_PORT_MAX: Final = 2**32 - 1
_KNOWN_MAX: Final = 4096
"""A store has few hosts; so many of each form are remembered, of at most some 200 bytes each."""


@lru_cache(_KNOWN_MAX)
def format_host(packed: bytes) -> str:
    """Text of a packed host.

    Args:
        packed: 8 (IPv4) or 20 (IPv6) bytes.

    Raises:
        ValueError: Any other length.
    """
    port = int.from_bytes(packed[-4:], "big")
    if len(packed) == V4_HOST_BYTES:
        return f"{packed[0]}.{packed[1]}.{packed[2]}.{packed[3]}:{port}"
    if len(packed) == V6_HOST_BYTES:
        groups = ":".join(f"{packed[i] << 8 | packed[i + 1]:x}" for i in range(0, 16, 2))
        return f"[{groups}]:{port}"
    raise ValueError(f"a packed host has 8 or 20 bytes, not {len(packed)}")


@lru_cache(_KNOWN_MAX)
def pack_host(text: str) -> bytes:
    """Bytes of ``ip:port`` or ``[ip]:port``: 8 for IPv4, 20 for IPv6.

    Raises:
        ValueError: Not of one of these two forms.
    """
    address, colon, port = text.rpartition(":")
    if not colon or not port.isascii() or not port.isdigit() or int(port) > _PORT_MAX:
        raise ValueError(f"not a host and port: {text!r}")
    if is_v6(text):
        packed = ipaddress.IPv6Address(address.removeprefix("[").removesuffix("]")).packed
    else:
        packed = ipaddress.IPv4Address(address).packed
    return packed + int(port).to_bytes(4, "big")


def is_v6(text: str) -> bool:
    """Whether ``text`` names an IPv6 host."""
    return text.startswith("[")


# -- message ids -----------------------------------------------------------------------------------
#
# Message ids. An offset message id: hex of store host (8 or 20 bytes) and physical offset (8).


def offset_msg_id(store_host: str, physical_offset: int) -> str:
    """The id by which a broker finds a message in its log: 32 or 56 upper-case hex digits.

    Args:
        store_host: ``ip:port`` or ``[ip]:port``.
        physical_offset: Local physical offset.
    """
    return (pack_host(store_host) + physical_offset.to_bytes(8, "big", signed=True)).hex().upper()


def parse_offset_msg_id(text: str) -> tuple[str, int]:
    """Store host and physical offset of an offset message id.

    Raises:
        ValueError: Not 32 or 56 hex digits.
    """
    packed = bytes.fromhex(text)
    if len(packed) - 8 not in {V4_HOST_BYTES, V6_HOST_BYTES} or len(text) != 2 * len(packed):
        raise ValueError(f"not an offset message id: {text!r}")
    return format_host(packed[:-8]), int.from_bytes(packed[-8:], "big", signed=True)
