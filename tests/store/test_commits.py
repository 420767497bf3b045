"""Appends that wait are written as one, and answered together; what the disk refuses fails those it was asked for."""

from __future__ import annotations

import errno
import threading
from typing import TYPE_CHECKING

import pytest
from support.embedded import SYNC, Groups, create
from support.stored import KINDS, check_same, read_all, without_cluster
from support.waiting import until

from tiered.errors import ClosedError, InvalidError, StoreUnavailableError
from tiered.model import MessageQueue
from tiered.store.encoding import INT_MAX
from tiered.store.new_message import NewMessage

if TYPE_CHECKING:
    from pathlib import Path

    from tiered.store.embedded import MessageStore


@pytest.fixture
def store(tmp_path: Path):
    with create(tmp_path / "s", SYNC) as store:
        yield store


def test_a_group_is_one_write_and_everyone_gets_his_own_places(store: MessageStore, tmp_path: Path):
    groups, batches = Groups(store), [list(KINDS[:3]), [KINDS[0]], list(KINDS), [KINDS[5]] * 90]
    found = groups.together(batches)
    assert groups.written == [sum(map(len, batches))]
    store.close()
    records = read_all(tmp_path / "s")
    for messages, receipts in zip(batches, found, strict=True):
        assert isinstance(receipts, list)
        for message, where in zip(messages, receipts, strict=True):
            record = records[MessageQueue(message.topic, message.queue_id)][where.queue_offset]
            check_same(without_cluster(message), where, record)
    assert sum(map(len, records.values())) == sum(map(len, batches))


def test_a_write_that_is_refused_fails_its_group_and_the_next_goes_on(store: MessageStore):
    groups, one = Groups(store), [[NewMessage("t", 0, b"x")], [NewMessage("t", 1, b"y")]]
    groups.refuses = OSError(errno.ENOSPC, "No space left on device")
    for error in groups.together(one):
        assert isinstance(error, StoreUnavailableError)
        assert "No space left" in str(error)
    assert store.log_end == 0
    groups.refuses = None
    found = groups.together(one)
    assert [receipts[0].queue_offset for receipts in found if isinstance(receipts, list)] == [0, 0]


def test_a_fault_of_ours_in_a_write_is_told_to_all_who_wait(store: MessageStore):
    """At once, and not by their time limits: the thread that would answer them ends."""
    groups, one = Groups(store), [[NewMessage("t", 0, b"x")], [NewMessage("t", 1, b"y")]]
    groups.refuses = fault = MemoryError("no room")
    future, told = groups.commits.submit(1), []
    prepared = [store._encoder.prepare(messages, 0) for messages in one]

    def work(number: int) -> None:
        try:
            groups.commits.append(prepared[number], 60.0)
        except (MemoryError, TimeoutError) as error:
            told.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    until(lambda: len(groups.commits._unwritten) == 2)
    with pytest.raises(MemoryError):
        groups.commits.run_once()
    groups.commits.fail(fault)
    for thread in threads:
        thread.join()
    assert told == [fault, fault]
    assert future.exception(0) is fault


def test_a_sync_that_fails_fails_all_and_whatever_comes(store: MessageStore):
    groups, one = Groups(store), [[NewMessage("t", 0, b"x")], [NewMessage("t", 1, b"y")]]
    groups.sync_refuses = OSError(errno.EIO, "broken")
    with pytest.raises(OSError, match="broken"):
        groups.together(one)
    with pytest.raises(StoreUnavailableError, match="broken"):
        store.append(NewMessage("t", 0, b"z"))
    future = groups.commits.submit(0)
    assert isinstance(future.exception(0), OSError)


def test_who_waits_when_the_store_is_closed_is_told(store: MessageStore):
    groups, found = Groups(store), []

    def work() -> None:
        with pytest.raises(ClosedError):
            store.append(NewMessage("t", 0, b"x"))
        found.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    until(lambda: len(groups.commits._unwritten) == 1)
    store.close()
    thread.join()
    assert found


def test_who_gave_up_keeps_no_answer_from_those_behind_him(store: MessageStore):
    """Each that is woken wakes the next, and those who are gone cannot."""
    groups, found = Groups(store), []
    message = [NewMessage("t", 0, b"x")]
    store.create_topic("t", queues=1)
    for _ in range(5):
        with pytest.raises(TimeoutError):
            groups.commits.append(store._encoder.prepare(message, 0), 0.01)
    threads = [
        threading.Thread(target=lambda: found.append(store.append(message[0]))) for _ in range(9)
    ]
    for thread in threads:
        thread.start()
    until(lambda: len(groups.commits._unwritten) == 14)
    groups.commits.run_once()
    for thread in threads:
        thread.join()
    assert groups.written == [14]
    assert sorted(one.queue_offset for one in found) == list(range(5, 14))


@pytest.mark.parametrize(
    "message",
    [
        NewMessage("t", 0, b"", flag=INT_MAX + 1),
        NewMessage("t", 0, b"", born_timestamp_ms=1 << 63),
        NewMessage("t", 0, b"", reconsume_times=INT_MAX + 1),
    ],
    ids=["flag", "born", "times"],
)
def test_what_does_not_fit_is_refused_before_it_joins_a_group(
    store: MessageStore, message: NewMessage
):
    groups = Groups(store)
    with pytest.raises(InvalidError):
        store.append(message)
    assert groups.commits._unwritten == []
