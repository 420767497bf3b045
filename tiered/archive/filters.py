"""Where the bloom filters of keys lie in a Parquet file, so that single blocks of them can be read. Pure."""

from __future__ import annotations

from typing import Any

from tiered.archive.bloom import BLOCK

COLUMNS = ("uniq_key", "keys.list.element")
"""Those whose filters are asked; ``msg_key`` is the text that ``keys`` are divided from."""
_HEADER_MAX = 64


def filters_of(group: Any) -> list[tuple[int, int] | None]:  # noqa: ANN401 (pyarrow has no types)
    """Where the bits of a row group's filters of ``COLUMNS`` lie, first byte and bytes; None: it has none to be asked."""
    chunks = (group.column(number) for number in range(group.num_columns))
    found = {chunk.path_in_schema: chunk for chunk in chunks}
    return [_bits_of(found.get(name)) for name in COLUMNS]


def _bits_of(chunk: Any) -> tuple[int, int] | None:  # noqa: ANN401
    """The filters of our writer have a power of two of bytes, and a short header before them."""
    start = chunk and chunk.bloom_filter_offset
    length = chunk and chunk.bloom_filter_length
    if not start or not length:
        return None
    bits = 1 << (int(length).bit_length() - 1)
    header = length - bits
    return (start + header, bits) if bits >= BLOCK and 0 < header <= _HEADER_MAX else None
