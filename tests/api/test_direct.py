"""One way to messages in order, two implementations: what is read directly is what comes through the fetcher."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from support.fetching import rows
from support.opened import ORDERS, Made

from tiered.errors import ClosedError, DataError
from tiered.log.decode import TierBatch
from tiered.model import QueueOffset

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.api.tier import Tier


def made_in(folder: Path) -> Made:
    """Parts small and large, one behind another, an end that was truncated, and a part of which blocks can be hit."""
    made = Made(folder.as_uri())
    made.add(b"0", b"1", b"2")
    made.truncate(2)
    made.add(*(bytes([65 + number]) * 30_000 for number in range(40)))
    made.add(b"last")
    return made


def read_all(tier: Tier, bytes_max: int) -> tuple[dict[int, bytes], str]:
    """Every record up to the end or the first damage, and what that was."""
    cursor, found = tier._opened.reader.cursor(ORDERS), {}
    at = QueueOffset(0)
    try:
        while True:
            batch = tier._opened.fetch("g", cursor, at, bytes_max=bytes_max, count_max=7)
            if batch is None:
                return found, ""
            assert isinstance(batch, TierBatch)
            found |= rows(batch)
            at = batch.end_offset
    except DataError as error:
        return found, error.what


def fetching_threads() -> list[str]:
    return [
        one.name for one in threading.enumerate() if one.name.startswith(("tiered-", "fetcher-"))
    ]


@pytest.mark.parametrize("bytes_max", [1, 50_000, 4 << 20])
def test_a_folder_is_read_directly_as_through_the_fetcher(tmp_path: Path, bytes_max: int):
    made = made_in(tmp_path)
    with made.open() as tier:
        assert not tier._opened.is_direct
        wanted = read_all(tier, bytes_max)
    assert len(wanted[0]) == 43
    before = fetching_threads()
    with made.open(is_sequential=True) as tier:
        assert tier._opened.is_direct
        assert read_all(tier, bytes_max) == wanted
        assert fetching_threads() == before, "nothing runs beside"


def test_directly_too_a_damaged_block_costs_what_lies_in_it(tmp_path: Path):
    made = made_in(tmp_path)
    with made.open() as tier:
        part = max(
            tier._opened.reader.cursor(ORDERS).incarnation.parts(), key=lambda one: one.log_bytes
        )
        path = tmp_path / (tier._opened.place.prefix + part.bundle.key)
    data = bytearray(path.read_bytes())
    data[part.section.start + 20 * 30_000] ^= 1
    path.chmod(0o600)
    path.write_bytes(data)
    with made.open() as tier, made.open(is_sequential=True) as direct:
        through, directly = read_all(tier, 4 << 20), read_all(direct, 4 << 20)
    assert directly == through
    assert 15 <= len(directly[0]) <= 22, "what comes before it is read"
    assert "checksum" in directly[1]


def test_what_was_merged_meanwhile_is_found_where_it_lies_now(tmp_path: Path):
    made = Made(tmp_path.as_uri())
    for number in range(6):
        made.add(b"%d" % number)
    with made.open(is_sequential=True) as tier:
        cursor = tier._opened.reader.cursor(ORDERS)
        made.merge()
        batch = tier._opened.fetch("g", cursor, QueueOffset(2), bytes_max=1 << 20, count_max=10)
        assert isinstance(batch, TierBatch)
        assert list(rows(batch))[:4] == [2, 3, 4, 5]


@pytest.mark.parametrize("more", [{}, {"is_sequential": True}])
def test_only_a_folder_is_read_directly_and_nothing_after_the_end(tmp_path: Path, more: Any):
    made = Made()
    made.add(b"0")
    with made.open(is_sequential=True) as tier:
        assert not tier._opened.is_direct, (
            "of a store that is not here much has to be under way at once"
        )
    with made_in(tmp_path).open(**more) as tier:
        cursor = tier._opened.reader.cursor(ORDERS)
    with pytest.raises(ClosedError):
        tier._opened.fetch("g", cursor, QueueOffset(0), bytes_max=1, count_max=1)
