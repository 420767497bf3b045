"""Message ids. An offset message id: hex of store host (8 or 20 bytes) and physical offset (8)."""

from __future__ import annotations

from tiered.format.hosts import V4_HOST_BYTES, V6_HOST_BYTES, format_host, pack_host


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
