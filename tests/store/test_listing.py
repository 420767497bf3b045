"""Consume queues are the same whether all queues of a chunk are listed at once or one after another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tiered.format.sysflag import TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK
from tiered.model import MessageQueue
from tiered.store.listing import Described, Facts, Listing, QueueKinds, Reput

if TYPE_CHECKING:
    import pytest

KINDS = QueueKinds(lambda _: False, (1000,), 20 * 100, 0)
NONE = np.zeros(0, np.int64)
QUEUES = [MessageQueue("t", 0), MessageQueue("t", 1), MessageQueue("u", 0)]
FLAGS = [0, 0, 0, 0, TRANSACTION_COMMIT, TRANSACTION_PREPARED, TRANSACTION_ROLLBACK]


class Rows:
    """Keeps what is written, byte by byte."""

    def __init__(self) -> None:
        self.bytes: dict[tuple[str, int], int] = {}

    def write(self, folder: str, file_bytes: int, offset: int, data: bytes) -> None:
        self.bytes.update({(folder, offset + at): byte for at, byte in enumerate(data)})


class NoKeys:
    def put(self, *_: object) -> None:
        raise AssertionError("there are no keys")


def facts(records: list[tuple[int, int, int]], begin: int) -> Facts:
    """Of records: which queue, its offset, sysFlag."""
    numbers = [queue for queue, _, _ in records]
    count = len(records)
    groups = [
        (QUEUES[queue], np.flatnonzero(np.array(numbers) == queue))
        for queue in dict.fromkeys(numbers)
    ]
    return Facts(
        groups,
        begin + 100 * np.arange(count, dtype=np.int64),
        np.array([offset for _, offset, _ in records], np.int64),
        np.full(count, 5, np.int64),
        np.full(count, 100, np.int32),
        np.array([flag for _, _, flag in records], np.int32),
        Described(np.arange(begin, begin + count, dtype=np.int64), NONE, NONE),
    )


STEPS = st.sampled_from([1, 1, 1, 1, 1, 1, 0, 2, -3])
"""From one record's queue offset to the next: mostly it follows; some come again, some are missing."""


@settings(deadline=None)
@given(
    st.lists(
        st.lists(st.tuples(st.integers(0, 2), STEPS, st.sampled_from(FLAGS)), max_size=12),
        max_size=6,
    )
)
def test_at_once_is_one_after_another(chunks: list[list[tuple[int, int, int]]]):
    together, apart = Rows(), Rows()
    listings: list[Any] = []
    for rows in (together, apart):
        listing: Any = Listing("", {}, rows, NoKeys(), KINDS)  # type: ignore[arg-type]
        listings.append(listing)
    listings[1]._list_plainly = lambda facts: facts.groups
    next_offsets = [7, 0, 150]
    for number, chunk in enumerate(chunks):
        records = []
        for queue, step, flag in chunk:
            records.append((queue, next_offsets[queue], flag))
            next_offsets[queue] = max(0, next_offsets[queue] + step)
        for listing in listings:
            listing.take(facts(records, 10_000 * number))
    assert together.bytes == apart.bytes
    assert listings[0].queues == listings[1].queues
    assert listings[0].duplicates == listings[1].duplicates


def test_queues_that_go_on_are_not_looked_at_one_by_one(monkeypatch: pytest.MonkeyPatch):
    listing: Any = Listing("", {}, Rows(), NoKeys(), KINDS)  # type: ignore[arg-type]
    listing.take(facts([(0, 0, 0), (1, 0, 0)], 0))
    monkeypatch.setattr(listing, "_list", None)
    listing.take(facts([(0, 1, 0), (1, 1, TRANSACTION_COMMIT), (0, 2, 0)], 1000))
    assert [listing.queues[queue].next_offset for queue in QUEUES[:2]] == [3, 2]


class Log:
    """Of one file with records of 200 and 156 bytes, which the reput thread takes while somebody looks."""

    file_bytes = 1000

    def base_of(self, _: int) -> int:
        return 0

    def read(self, position: int, _: int) -> bytes:
        self.reput.position = 200
        return (200 if position == 0 else 156).to_bytes(4, "big")

    reput: Reput


def test_whether_a_limit_cuts_a_record_is_judged_of_one_place():
    """Else who closed a store took the size of the record before for that of the last, and gave up waiting for it."""
    log: Any = Log()
    nobody: Any = None
    log.reput = Reput(log, nobody, nobody, 0, lambda: 356)
    assert not log.reput.is_cut(356)
    assert log.reput.position == 200
    log.reput.position = 0
    assert log.reput.is_cut(199)
